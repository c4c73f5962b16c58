"""Sharded equals unsharded: the same training under DeepSpeed on several ranks and in one process without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engines as on_rank
import pytest
from engines import Case
from ranks import Ranks

from mechanic_plugins import Settings

Engines = Callable[[int], Ranks]

CPU = {"device": "cpu"}
EARLY = {"settings": Settings(rule="paper", s_init=1e-3)}
SGD: dict[str, Any] = {
    "base": "SGD",
    "base_options": {"lr": 1.0, "momentum": 0.9},
    "options": {"settings": Settings(rule="paper", s_init=1e-3)},
}
CPU_ADAM: dict[str, Any] = {"base": "DeepSpeedCPUAdam", "zero": {"offload_optimizer": CPU}}
LARGER: dict[str, Any] = {"settings": Settings(rule="paper", s_init=1e-3, s_decay=0.01)}

EVERY_STAGE = [
    case
    for stage in (0, 1, 2, 3)
    for case in (
        Case(stage=stage),
        Case(stage=stage, clip=0.1, accumulation=2, options=LARGER),
        Case(stage=stage, **SGD),
    )
]
OFFLOADED = [
    *(Case(stage=stage, clip=0.1, accumulation=2, options=LARGER, **CPU_ADAM) for stage in (1, 2, 3)),
    *(Case(stage=stage, clip=0.1, options=LARGER, zero={"offload_optimizer": CPU}) for stage in (1, 2, 3)),
    Case(stage=3, options=LARGER, zero={"offload_optimizer": CPU, "offload_param": CPU}),
    Case(stage=3, base="DeepSpeedCPUAdam", zero={"offload_optimizer": CPU, "offload_param": CPU}),
]
VARIANTS = [
    *(Case(stage=stage, param_groups=2, clip=0.1, options=LARGER) for stage in (0, 1, 2, 3)),
    *(Case(stage=stage, param_groups=2, options={"scope": "group"}) for stage in (1, 3)),
    *(Case(stage=stage, param_groups=2, warmup=10, options=LARGER) for stage in (0, 1, 2, 3)),
    Case(stage=2, param_groups=2, warmup=10, options={"scope": "group"}),
    # ZeRO-3 steps one group at a time and leaves the others empty, which Lion used to reject
    Case(stage=3, base="Lion", param_groups=2, options={"rule": "paper"}),
    Case(stage=3, warmup=10, options=LARGER, **CPU_ADAM),
    Case(stage=2, base_options={"lr": 1e-3, "weight_decay": 0.01}),
    Case(
        stage=2,
        base_options={"lr": 1e-3, "weight_decay": 0.01, "maximize": True},
        options={"settings": Settings(rule="paper", s_init=1e-6)},
    ),
    Case(stage=3, options={"rule": "optax"}),
    Case(stage=1, options=LARGER, zero={"round_robin_gradients": True}),
    Case(stage=2, options=LARGER, zero={"round_robin_gradients": True, "overlap_comm": True}),
    Case(stage=2, options=LARGER, accumulation=2, zero={"contiguous_gradients": False, "reduce_scatter": False}),
    Case(stage=3, options=LARGER, zero={"overlap_comm": True, "zero_hpz_partition_size": 2}),
    Case(stage=3, options=LARGER, zero={"stage3_param_persistence_threshold": 10}),
    Case(stage=3, options=LARGER, zero={"sub_group_size": 10**9}),
]


def distance(a: Any, b: Any) -> float:
    """The largest absolute difference between two nested structures of numbers."""
    if isinstance(a, dict):
        return max(distance(a[key], b[key]) for key in a.keys() | b.keys())
    if isinstance(a, list):
        return max(distance(x, y) for x, y in zip(a, b, strict=True))
    return abs(a - b)


def size(a: Any) -> float:
    return max(map(size, a)) if isinstance(a, list) else abs(a)


def assert_same_training(case: Case, ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    """Compares weights, h (s cannot tell h from twice h) and s of every step; s must be bit-equal on all ranks."""
    tolerance = 1e-5 if case.base == "DeepSpeedCPUAdam" else 5e-6
    for seen in ranks:
        assert seen["s"] == ranks[0]["s"], "every rank must have the same scales, to the last bit"
    seen = ranks[0]
    assert distance(seen["weights"], plain["weights"]) < tolerance
    assert distance(seen["h"], plain["h"]) < tolerance * size(plain["h"])
    assert distance(seen["s"], plain["s"]) < tolerance * size(plain["s"])
    assert size(plain["s"]) > 0, "a run in which nothing was learned compares nothing"


def check(engines: Engines, world_size: int, case: Case) -> None:
    ranks = engines(world_size)(on_rank.run, case)
    assert_same_training(case, ranks, on_rank.plain_run(case))
    for seen in ranks:
        assert seen["reductions"] == [int(case.stage > 0)] * case.steps
        assert seen["steps"] == case.steps


@pytest.mark.parametrize("case", EVERY_STAGE, ids=Case.id)
def test_every_stage(engines: Engines, case: Case) -> None:
    check(engines, 2, case)


@pytest.mark.parametrize("case", OFFLOADED, ids=Case.id)
def test_offloaded(engines: Engines, case: Case) -> None:
    check(engines, 2, case)


@pytest.mark.parametrize("case", VARIANTS, ids=Case.id)
def test_variants(engines: Engines, case: Case) -> None:
    check(engines, 2, case)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_default_rule(engines: Engines, stage: int) -> None:
    """With two groups and clipping; its first step takes different sums."""
    check(engines, 2, Case(stage=stage, param_groups=2, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])  # two ranks cover the other stages
def test_four_ranks(engines: Engines, stage: int) -> None:
    check(engines, 4, Case(stage=stage, clip=0.1, param_groups=2, options=LARGER))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_tune_alone_are_caught(engines: Engines, stage: int) -> None:
    """The authors' package gives every rank its own scale, which these tests must detect."""
    case = Case(stage=stage, options=LARGER)
    ranks = engines(2)(on_rank.run_without_reduction, case)
    assert ranks[0]["s"] != ranks[1]["s"]
    plain = on_rank.plain_run(case)
    with pytest.raises(AssertionError):
        assert_same_training(case, ranks, plain)
    for key, tolerance in (("weights", 5e-6), ("h", 5e-6 * size(plain["h"])), ("s", 5e-6 * size(plain["s"]))):
        assert distance(ranks[0][key], plain[key]) > 10 * tolerance, f"{key} alone would not show it"
