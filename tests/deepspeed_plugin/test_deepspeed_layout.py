"""mechanic_plugins.deepspeed.layout: whole parameters, put together from the blocks of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layout_engines as on_rank
import pytest
from engines import Case
from ranks import Ranks
from wholes import assert_same, put_together

Engines = Callable[[int], Ranks]

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_OPTIMIZER: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}

SHARDED = [
    *(Case(stage=stage, param_groups=groups) for stage in (1, 2, 3) for groups in (1, 2)),
    Case(stage=2, param_groups=2, zero={"round_robin_gradients": True}),
    Case(stage=2, param_groups=2, config=BF16, zero={"parameter_alignment": True}),
    Case(stage=3, param_groups=2, config=BF16),
    Case(stage=1, param_groups=2, config=BF16_OPTIMIZER),
]
REPLICATED = [Case(stage=0), Case(stage=0, param_groups=2, config=BF16)]


@pytest.mark.parametrize("case", SHARDED, ids=Case.id)
def test_shards_make_up_the_parameters(engines: Engines, case: Case) -> None:
    ranks = engines(2)(on_rank.run, case)
    assert (ranks[0]["holder"] == "BF16_Optimizer") == (case.config == BF16_OPTIMIZER)
    wholes, times = put_together(ranks)
    assert set(times) == {1}
    assert_same(wholes, list(ranks[0]["wholes"].values()))
    if case.param_groups == 2:
        assert ranks[0]["groups"] == [int(whole.shape[1] == 1) for whole in wholes]


@pytest.mark.parametrize("stage", [1, 3])
def test_four_ranks(engines: Engines, stage: int) -> None:
    ranks = engines(4)(on_rank.run, Case(stage=stage, param_groups=2))
    wholes, times = put_together(ranks)
    assert set(times) == {1}
    assert_same(wholes, list(ranks[0]["wholes"].values()))


@pytest.mark.parametrize("case", REPLICATED, ids=Case.id)
def test_replicas_hold_whole_parameters(engines: Engines, case: Case) -> None:
    for each in engines(2)(on_rank.run, case):
        wholes, times = put_together([each])
        assert set(times) == {1}
        if case.config == BF16:  # DeepSpeed returns the rounded weights here
            wholes = [whole.bfloat16().float() for whole in wholes]
        assert_same(wholes, list(each["wholes"].values()))


def test_tensors_for_fused_adam(engines: Engines) -> None:
    for each in engines(2)(on_rank.flattened_for_fused_adam):
        wholes, times = put_together([each])
        assert set(times) == {1}
        assert_same(wholes, list(each["wholes"].values()))
        assert each["owners"] == sorted(each["owners"])


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_of_other_ranks_are_other_parameters(engines: Engines, stage: int, ep_size: int) -> None:
    ranks = engines(2)(on_rank.run_experts, Case(stage=stage), ep_size)
    named = list(ranks[0]["wholes"].values())
    if ep_size == 2:
        named += [value for name, value in ranks[1]["wholes"].items() if "deepspeed_experts" in name]
    wholes, times = put_together(ranks)
    copies = {1} if stage else {2} if ep_size == 1 else {1, 2}
    assert set(times) == copies
    if stage or ep_size == 2:
        assert_same(wholes, named)
