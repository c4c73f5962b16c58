"""Tests the fixture `ranks` itself: a distributed test that could not fail would prove nothing."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def abort(rank: int) -> None:
    if rank == 1:
        os.abort()
    dist.barrier()


def abort_once(rank: int, mark: Path) -> float:
    if not mark.exists():
        dist.barrier()
        mark.touch()
        abort(rank)
    return add_up(rank, 1.0)


def test_a_killed_rank_gets_a_second_chance_and_it_is_told(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 1 by SIGABRT"):
        assert ranks(2)(abort_once, tmp_path / "mark") == [3.0, 3.0]


def start_another(rank: int, fifo: Path) -> None:
    with fifo.open("wb") as out:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], stdout=out)


@pytest.mark.ranks
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    """Two processes of Megatron's checkpoints used to stay behind."""
    fifo, alone = tmp_path / "open while it lives", Ranks(tmp_path, 1)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        alone(start_another, fifo)
        assert select.select([reader], [], [], 0)[0] == []
    finally:
        alone.stop()
    assert select.select([reader], [], [], 30)[0] == [reader]
    os.close(reader)


def test_a_rank_killed_twice_fails_the_caller(ranks: Callable[[int], Ranks]) -> None:
    with pytest.warns(UserWarning, match="run once more"), pytest.raises(AssertionError, match="rank 1 by SIGABRT"):
        ranks(2)(abort)
