"""Sharded equals unsharded: the same training under DeepSpeed on several ranks and in one process without it."""

from __future__ import annotations

from typing import Any

import engines as on_rank
import pytest
from engines import Case

SGD = {"base": "SGD", "base_options": {"lr": 1.0, "momentum": 0.9}}
CPU_ADAM = {"base": "DeepSpeedCPUAdam", "zero": {"offload_optimizer": {"device": "cpu"}}}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}
OFFLOAD_PARAM = {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}

ALL = [
    *(Case(stage=stage) for stage in (0, 1, 2, 3)),
]


def distance(a: Any, b: Any) -> float:
    """The largest absolute difference."""
    if isinstance(a, dict):
        return max(distance(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return max(map(distance, a, b, strict=True) if False else [distance(x, y) for x, y in zip(a, b, strict=True)])
    return abs(a - b)


def assert_same_training(case: Case, ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    tolerance = 1e-5 if case.base == "DeepSpeedCPUAdam" else 5e-6
    for seen in ranks:
        assert seen["s"] == ranks[0]["s"], "every rank must have the same scale, to the last bit"
    seen = ranks[0]
    print(case.id(), distance(seen["weights"], plain["weights"]),
          distance(seen["h"], plain["h"]) / max(map(abs, plain["h"])),
          max(abs(a - b) / b if b else a for a, b in zip(seen["scale"], plain["scale"])), plain["scale"][-1])
    assert distance(seen["weights"], plain["weights"]) < tolerance


@pytest.mark.parametrize("case", ALL, ids=Case.id)
def test_two_ranks(engines: Any, case: Case) -> None:
    seen = engines(2)(on_rank.run, case)
    print(seen[0]["reductions"], seen[0]["holder"])
    assert_same_training(case, seen, on_rank.plain_run(case))
