"""Runs the code block of docs/deepspeed.md verbatim on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from documented import blocks, execute
from engines import quiet, start
from ranks import Ranks


def run_blocks(rank: int) -> float:
    start(rank)
    from mechanic_plugins import unwrap

    torch.manual_seed(0)
    (block,) = (block for block in blocks("python") if block.page.name == "deepspeed.md")
    with quiet():
        names = execute(block)
    return unwrap(names["engine"]).learned_lr


def test_deepspeed_block(engines: Callable[[int], Ranks]) -> None:
    mine, other = engines(2)(run_blocks)
    assert mine > 0
    assert other == mine
