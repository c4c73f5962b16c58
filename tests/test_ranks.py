"""The fixture itself: a distributed test that could not fail would prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


def add_up(rank: int, factor: float) -> float:
    value = torch.tensor(factor * (rank + 1))
    dist.all_reduce(value)
    return value.item()


def fail_on_one(rank: int) -> float:
    assert rank == 0, "rank 1 disagrees"
    return add_up(rank, 1.0)


def test_every_rank_returns_its_value(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(add_up, 10.0) == [30.0, 30.0]


def test_a_failing_rank_fails_the_caller_and_new_ranks_start(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError, match="rank 1 disagrees"):
        ranks(2)(fail_on_one)
    assert ranks(2)(add_up, 1.0) == [3.0, 3.0]
