"""bf16, fp16 with its skipped steps, gradients that are not finite, and experts.

No single process rounds as these do, so each step's h and move are recomputed from the full weights, gradients and
deltas that DeepSpeed returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import precision_engines as on_rank
import pytest
from engines import Case, run_audit
from ranks import Ranks

from mechanic_plugins import Settings

Engines = Callable[[int], Ranks]

LARGER: dict[str, Any] = {"settings": Settings(rule="paper", s_init=1e-3, s_decay=0.01)}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_OPTIMIZER: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
FP16: dict[str, Any] = {
    "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 3, "min_loss_scale": 1}
}
CPU_ADAM: dict[str, Any] = {"base": "DeepSpeedCPUAdam", "zero": {"offload_optimizer": {"device": "cpu"}}}

LOW_PRECISION = [
    *(Case(stage=stage, config=BF16, options=LARGER, clip=0.1, steps=20) for stage in (1, 2, 3)),
    *(Case(stage=stage, config=BF16, accumulation=2, param_groups=2, steps=20) for stage in (2, 3)),
    *(Case(stage=stage, config=BF16, clip=0.1, steps=20, **CPU_ADAM) for stage in (2, 3)),
    Case(stage=1, config=BF16_OPTIMIZER, options=LARGER, clip=0.1, param_groups=2, steps=20),
    *(Case(stage=stage, config=FP16, options=LARGER, clip=0.1, steps=24) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize("case", LOW_PRECISION, ids=Case.id)
def test_every_step_is_mechanics(engines: Engines, case: Case) -> None:
    ranks = engines(2)(run_audit, case)
    assert ranks[0]["s"] == ranks[1]["s"]
    assert (ranks[0]["holder"] == "BF16_Optimizer") == (case.config == BF16_OPTIMIZER)
    for seen in ranks:
        made = [index for index, count in enumerate(seen["reductions"]) if count]
        assert set(seen["reductions"]) <= {0, 1}
        assert seen["steps"] == len(made)
        assert (len(made) < case.steps) == ("fp16" in case.config), "only fp16 overflows"
        size = max(abs(seen["h"][index]) for index in made)
        assert len(made) > 5
        assert max(abs(seen["h"][i] - seen["expected_h"][i]) for i in made) < 1e-6 * size
        assert max(seen["error"]) < 5e-7


def test_a_skipped_step_leaves_no_trace(engines: Engines) -> None:
    """DeepSpeed handles an overflow: there is no all-reduce and no step of the tuner, and the scales stay the same."""
    case = Case(stage=2, config=FP16, options=LARGER, steps=16)
    for seen in engines(2)(run_audit, case):
        skipped = [index for index, count in enumerate(seen["reductions"]) if not count]
        assert skipped
        for index in skipped:
            assert seen["s"][index] == (seen["s"][index - 1] if index else [0.0] * 6)
            assert seen["error"][index] == 0


@pytest.mark.parametrize("base", ["AdamW", "SGD"])
def test_bf16_at_stage_0_starts_at_the_models_weights(engines: Engines, base: str) -> None:
    """DeepSpeed steps the base once with zero gradients, whose weight decay at an lr of 1 would remove 10%."""
    case = Case(base=base, base_options={"lr": 1.0, "weight_decay": 0.1}, config=BF16, options=LARGER)
    ranks = engines(2)(on_rank.run_replayed, case)
    assert ranks[0] == ranks[1]
    assert ranks[0]["distance_at_start"] == 0
    assert ranks[0]["distance_to_replay"] == 0
    assert ranks[0]["moved"] > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0),
        *(Case(stage=stage, config=BF16, options=LARGER) for stage in (1, 2, 3)),
        Case(stage=1, config=BF16_OPTIMIZER, options=LARGER),
    ],
    ids=Case.id,
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(engines: Engines, case: Case) -> None:
    ranks = engines(2)(on_rank.run_with_nan, case, 5)
    for seen in ranks:
        assert seen["before"] == seen["after"], "weights, moments and scales stay as they were"
        assert seen["steps"] == 9
        assert seen["finite_at_the_end"]
    assert ranks[0]["s"] == ranks[1]["s"]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts(engines: Engines, stage: int, ep_size: int) -> None:
    """With ep_size 2 the two ranks hold different experts, even at stage 0, where nothing else is sharded."""
    case = Case(stage=stage, options=LARGER)
    ranks = engines(2)(on_rank.run_experts, case, ep_size)
    assert ranks[0]["s"] == ranks[1]["s"]
    for seen in ranks:
        assert seen["reductions"] == [1] * case.steps
        size = max(map(abs, seen["h"]))
        assert max(abs(a - b) for a, b in zip(seen["h"], seen["expected_h"], strict=True)) < 1e-6 * size
        assert max(seen["error"]) < 5e-7


@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_are_measured_alike_at_every_stage(engines: Engines, ep_size: int) -> None:
    """The default rule's scales come from the changes of all experts, wherever they live."""
    runs = [engines(2)(on_rank.run_experts, Case(stage=stage), ep_size) for stage in (0, 1, 2)]
    for first, second in runs:
        assert first["s"] == second["s"]
        assert first["s"][-1][0] > 0
        for scales, expected in zip(first["s"], runs[0][0]["s"], strict=True):
            assert scales == pytest.approx(expected, rel=1e-4)
