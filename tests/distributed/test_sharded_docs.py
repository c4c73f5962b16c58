"""Runs the code blocks of docs/sharding.md verbatim on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from documented import blocks, execute
from ranks import Ranks


def run_blocks(rank: int) -> tuple[float, Any]:
    torch.manual_seed(0)
    sharded, staged = (execute(block)["optimizer"] for block in blocks("python") if block.page.name == "sharding.md")
    return sharded.learned_lr, staged.group is not None


def test_sharding_blocks(ranks: Callable[[int], Ranks]) -> None:
    (learned, has_group), other = ranks(2)(run_blocks)
    assert learned > 0
    assert has_group
    assert other == (learned, has_group)
