from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ranks import train
from hf_tiny import STEPS, assert_same, by_step, command_line, plain_loop
from ranks import Ranks

pytestmark = pytest.mark.slow

Engines = Callable[[int], Ranks]


def arguments(folder: Path, stage: int, *, offload: bool = False, block: Any = None, **options: Any) -> list[str]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero.update(stage3_param_persistence_threshold=0, stage3_gather_16bit_weights_on_model_save=True)
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **dict.fromkeys(auto, "auto")}
    if block is not None:
        config["optimizer"] = block
    path = folder / "zero.json"
    path.write_text(json.dumps(config))
    # DeepSpeed's master weights are float32. Without the larger epsilon Adam would amplify the rounding errors of
    # gradients that are 0 in exact arithmetic (those of an attention's key bias).
    fixed = {"deepspeed": path, "use_cpu": False, "dtype": "float32", "adam_epsilon": 1e-3}
    return command_line(folder, **{**fixed, **options})


def adamw(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_a_plain_loop_on_both_ranks_batches_and_resumes_exactly(
    engines: Engines, tmp_path: Path, stage: int
) -> None:
    argv = arguments(tmp_path, stage, save_strategy="steps", save_steps=STEPS // 2)
    whole = engines(2)(train, argv, "deepspeed")
    assert whole[0]["distributed"] == "DEEPSPEED"
    assert whole[0]["optimizers"][0] == "DeepSpeedOptimizerWrapper"
    assert "MechanicAdamW" in whole[0]["optimizers"]
    scales = [[entry["mechanic/scale"] for entry in result["logs"]] for result in whole]
    assert scales[0] == scales[1]
    assert_same(whole[0], plain_loop(by_step(whole), adamw, dtype="float32"))
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    resumed = engines(2)(train, [*argv, "--resume_from_checkpoint", str(checkpoint)], "deepspeed")
    assert len(resumed[0]["batches"]) == STEPS // 2
    assert resumed[0]["logs"] == whole[0]["logs"]
    assert resumed[0]["weights"] == whole[0]["weights"]


def test_an_offloaded_optimizer_keeps_mechanic(engines: Engines, tmp_path: Path) -> None:
    """accelerate replaces any optimizer by a plain DeepSpeedCPUAdam."""
    results = engines(2)(train, arguments(tmp_path, 2, offload=True), "deepspeed")
    assert results[0]["optimizers"][-2:] == ["MechanicDeepSpeedCPUAdam", "DeepSpeedCPUAdam"]
    steps = [[batch.tolist() for batch in step] for step in by_step(results)]
    expected = engines(2)(loop_with_cpu_adam, steps)[0]
    expected["weights"] = {name: torch.tensor(weight) for name, weight in expected["weights"].items()}
    assert_same(results[0], expected)


def loop_with_cpu_adam(rank: int, steps: list[list[list[list[int]]]]) -> dict[str, Any]:
    """Runs on a rank, for the compiled operator. Its betas are float32, so torch's AdamW differs in the sixth digit."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    build = partial(DeepSpeedCPUAdam, eps=1e-3, adamw_mode=True)
    result = plain_loop([[torch.tensor(batch) for batch in step] for step in steps], build, dtype="float32")
    return {**result, "weights": {name: weight.tolist() for name, weight in result["weights"].items()}}


def test_an_optimizer_in_the_config_that_takes_mechanics_place_is_noticed(engines: Engines, tmp_path: Path) -> None:
    block = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    with pytest.raises(AssertionError, match='Remove the "optimizer" block from the DeepSpeed config'):
        engines(2)(train, arguments(tmp_path, 2, block=block), "deepspeed")
