"""The blocks of docs/sharding.md, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from documented import Model, execute, python_blocks, train
from ranks import Ranks


def run_blocks(rank: int) -> tuple[float, Any]:
    torch.manual_seed(0)
    found = python_blocks("sharding")
    names = execute(found[:1], {"torch": torch, "model": Model(), "train": train})
    scale = names["optimizer"].scale.item()
    execute(found[1:], names)
    return scale, names["optimizer"].group is not None


def test_sharding_blocks(ranks: Callable[[int], Ranks]) -> None:
    (scale, has_group), other = ranks(2)(run_blocks)
    assert scale > 0
    assert has_group
    assert other == (scale, has_group)
