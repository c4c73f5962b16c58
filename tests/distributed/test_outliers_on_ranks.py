"""Outlier gradients on shards: all ranks skip them or start over together, as a single process would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparing import assert_all_close
from ranks import Ranks
from setups import Run

STEPS = 9
FACTORS = {"first": {0: 1e4}, "in mid-run": {5: 1e4}, "both": {0: 1e4, 5: 1e6}}

pytestmark = pytest.mark.filterwarnings("ignore:a gradient was not finite, or more than 100 times as long")


def train(rank: int, name: str, base: str, factors: dict[int, float]) -> dict[str, Any]:
    run = Run.start(name, base=base, counted=False)
    for step in range(STEPS):
        run.backward(step)
        for p in run.setup.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factors.get(step, 1.0))
        run.step()
    return {**run.result(), "skipped": run.optimizer.metrics()["mechanic/skipped_steps"]}


SPREAD = [("ddp", 2), ("fsdp2", 4), ("hsdp", 4), ("fsdp1_full_shard_flat", 2)]
CASES = [  # pairwise: each pair of spread, base and time occurs
    (name, world, ("adamw", "sgd")[(row + column) % 2], when)
    for row, (name, world) in enumerate(SPREAD)
    for column, when in enumerate(FACTORS)
]


@pytest.mark.parametrize(("name", "world", "base", "when"), CASES, ids=str)
def test_ranks_drop_an_outlier_as_one_process_does(
    ranks: Callable[[int], Ranks], name: str, world: int, base: str, when: str
) -> None:
    factors = FACTORS[when]
    expected = train(0, "alone", base, factors)
    results = ranks(world)(train, name, base, factors)
    assert expected["skipped"] == (5 in factors)
    assert expected["tuner"]["steps"] == STEPS - len(factors)
    assert all(result["skipped"] == expected["skipped"] for result in results)
    assert_all_close(results, expected, tolerance=1e-12)


@pytest.mark.parametrize(("name", "world"), [("ddp", 2), ("fsdp2", 4)], ids=str)
@pytest.mark.filterwarnings("ignore:an update of RAdam was more than 20 times as long")
def test_ranks_drop_an_update_that_jumps_as_one_process_does(
    ranks: Callable[[int], Ranks], name: str, world: int
) -> None:
    """That is RAdam's sixth update, since the gradients are short."""
    factors = dict.fromkeys(range(STEPS), 1e-4)
    expected = train(0, "alone", "radam", factors)
    assert expected["tuner"]["steps"] == STEPS - 1
    assert_all_close(ranks(world)(train, name, "radam", factors), expected, tolerance=1e-9)


def train_resumed(rank: int, stop: int) -> list[Any]:
    """Trains with a first gradient that the second step forgets, and a checkpoint after `stop` steps."""
    run = Run.start("fsdp2", counted=False)
    for step in range(STEPS):
        if step == stop:
            saved, weights = run.optimizer.state_dict(), run.setup.model.state_dict()
            run = Run.start("fsdp2", seed=1, counted=False)
            run.setup.model.load_state_dict(weights)
            run.optimizer.load_state_dict(saved)
        run.backward(step)
        for p in run.setup.model.parameters():
            p.grad.mul_(1e4 if step == 0 else 1.0)  # type: ignore[union-attr]
        run.step()
    return [run.weights(), run.optimizer.tuner.s.tolist(), run.optimizer.metrics()["mechanic/steps"]]


def test_a_start_that_was_forgotten_resumes_bit_for_bit(ranks: Callable[[int], Ranks]) -> None:
    whole = ranks(2)(train_resumed, -1)
    for stop in (1, 2, 4):
        assert ranks(2)(train_resumed, stop) == whole, f"stopped after {stop} steps"
