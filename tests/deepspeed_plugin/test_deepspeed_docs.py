"""The DeepSpeed blocks of README and docs/deepspeed.md, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from documented import Model, execute, python_blocks
from engines import Case, config_of, quiet, start
from ranks import Ranks


def train(engine: Any) -> None:
    """What the page calls `train`."""
    for step in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward((engine(x) - x.sum(dim=1, keepdim=True)).square().mean())
        engine.step()


def run_blocks(rank: int, page: str) -> float:
    start(rank)
    import deepspeed

    from mechanic_plugins import mechanize, unwrap

    torch.manual_seed(0)
    config = config_of(Case(stage=2), world_size=2)
    names = {"torch": torch, "deepspeed": deepspeed, "mechanize": mechanize, "model": Model(), "config": config}
    with quiet():
        names = execute(python_blocks("deepspeed", page), {**names, "train": train})
    train(names["engine"])
    return unwrap(names["engine"]).scale.item()


@pytest.mark.parametrize("page", ["README.md", "deepspeed.md"])
def test_deepspeed_blocks(engines: Callable[[int], Ranks], page: str) -> None:
    mine, other = engines(2)(run_blocks, page)
    assert mine > 0
    assert other == mine
