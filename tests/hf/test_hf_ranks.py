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

Pair = Callable[[int], Ranks]

FSDP2 = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["GPT2Block"],
    "state_dict_type": "SHARDED_STATE_DICT",
    "sync_module_states": "false",  # accelerate would need a GPU for it; both ranks build the same model
}
FSDP1 = {**FSDP2, "version": 1, "state_dict_type": "FULL_STATE_DICT", "use_orig_params": "false"}
# FSDP1 clips only in float32. The larger epsilon keeps Adam from amplifying the rounding errors of gradients that are 0
# in exact arithmetic, those of an attention's key bias.
FLOAT32 = {"dtype": "float32", "adam_epsilon": 1e-3, "weight_decay": 0}  # FSDP1's flat parameters have no names
SETUPS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "ddp": ("none", None),
    "fsdp2": ("fsdp", FSDP2),
    "fsdp2_full": ("fsdp", {**FSDP2, "state_dict_type": "FULL_STATE_DICT"}),
    "fsdp1": ("fsdp", FSDP1),
}


def arguments(folder: Path, setup: str, **options: Any) -> tuple[list[str], str]:
    shim, config = SETUPS[setup]
    if setup == "fsdp1":
        options.update(FLOAT32)
    if config is not None:
        path = folder / "fsdp.json"
        path.write_text(json.dumps(config))
        options.update(fsdp="full_shard auto_wrap", fsdp_config=path)
    return command_line(folder, **options), shim


@pytest.mark.parametrize("setup", SETUPS)
def test_two_ranks_are_a_plain_loop_on_both_ranks_batches_and_resume_exactly(
    ranks: Pair, tmp_path: Path, setup: str
) -> None:
    argv, shim = arguments(tmp_path, setup, save_strategy="steps", save_steps=STEPS // 2)
    whole = ranks(2)(train, argv, shim)
    assert whole[0]["distributed"] == ("MULTI_CPU" if setup == "ddp" else "FSDP")
    assert whole[0]["batches"] != whole[1]["batches"]
    scales = [[entry["mechanic/scale"] for entry in result["logs"]] for result in whole]
    assert scales[0] == scales[1]
    if setup == "fsdp1":
        adamw = partial(torch.optim.AdamW, eps=1e-3)
        assert_same(whole[0], plain_loop(by_step(whole), adamw, dtype="float32", weight_decay=0.0))
    else:
        assert_same(whole[0], plain_loop(by_step(whole)))
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    resumed = ranks(2)(train, [*argv, "--resume_from_checkpoint", str(checkpoint)], shim)
    assert len(resumed[0]["batches"]) == STEPS // 2
    assert resumed[0]["logs"] == whole[0]["logs"]
    assert resumed[0]["weights"] == whole[0]["weights"]
