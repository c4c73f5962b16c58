"""Outlier gradients on shards: all ranks shorten them or start over together, as a single process would."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, distance
from ranks import Ranks
from setups import Run

STEPS = 9
FACTORS = {"first": {0: 1e4}, "in mid-run": {5: 1e4}, "both": {0: 1e4, 5: 1e6}}


def train(rank: int, name: str, base: str, factors: dict[int, float]) -> dict[str, Any]:
    run = Run.start(name, base=base, counted=False)
    for step in range(STEPS):
        run.backward(step)
        for p in run.setup.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factors.get(step, 1.0))
        run.step()
    return {**run.result(), "steps": run.optimizer.metrics()["mechanic/steps"]}


SPREAD = [("ddp", 2), ("fsdp2", 4), ("hsdp", 4), ("fsdp1_full_shard_flat", 2)]
CASES = [  # pairwise: each pair of spread, base and time occurs
    (name, world, ("adamw", "sgd")[(row + column) % 2], when)
    for row, (name, world) in enumerate(SPREAD)
    for column, when in enumerate(FACTORS)
]


@pytest.mark.parametrize(("name", "world", "base", "when"), CASES, ids=str)
def test_ranks_shorten_an_outlier_as_one_process_does(
    ranks: Callable[[int], Ranks], name: str, world: int, base: str, when: str
) -> None:
    factors = FACTORS[when]
    expected = train(0, "alone", base, factors)
    assert expected["steps"] == STEPS - (0 in factors)  # a start that was forgotten does not count
    # a hundred times as long as the longest that stays as it is: it would show
    usual = train(0, "alone", base, {step: min(factor, 1.0) for step, factor in factors.items()})
    if 0 not in factors:
        assert size(expected) < 1.5 * size(usual)
    assert_all_close(ranks(world)(train, name, base, factors), expected, tolerance=1e-12)


def size(result: dict[str, Any]) -> float:
    return max(torch.tensor(values).norm().item() for values in result["weights"].values())


def train_and_warn(rank: int, name: str) -> dict[str, Any]:
    """Gradients so short that RAdam's sixth update, the first with a denominator, is far longer than the fifth."""
    run, taken_back = Run.start(name, base="radam", counted=False), []
    for step in range(STEPS):
        run.backward(step)
        for p in run.setup.model.parameters():
            if p.grad is not None:
                p.grad.mul_(1e-4)
        before = run.weights()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
        if any("was taken back" in str(each.message) for each in caught):
            taken_back.append((step, distance_of(run.weights(), before)))
    return {**run.result(), "taken back": taken_back}


def distance_of(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> float:
    return max(distance(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("name", "world"), [("ddp", 2), ("fsdp2", 4), ("fsdp1_full_shard_flat", 2)], ids=str)
def test_ranks_take_back_an_update_that_jumps_as_one_process_does(
    ranks: Callable[[int], Ranks], name: str, world: int
) -> None:
    expected, results = train_and_warn(0, "alone"), ranks(world)(train_and_warn, name)
    for result in [expected, *results]:
        assert result["taken back"][0][0] == 5
        # what is left is the rounding of weights that were a million times as large
        assert all(moved < 1e-9 for _, moved in result["taken back"])
    assert_all_close(results, expected, tolerance=1e-9)


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
