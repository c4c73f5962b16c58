from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import run
from hf_tiny import STEPS, assert_same, by_step, command_line, plain_loop

import mechanic_plugins.transformers  # noqa: F401

bitsandbytes = pytest.importorskip("bitsandbytes")

WIDE = {"width": 64, "dtype": "float32"}  # it keeps state of parameters with fewer than 4096 elements in 32 bits


def arguments(folder: Path, **options: Any) -> list[str]:
    return command_line(folder, optim="mechanic_adamw_8bit", **WIDE, **options)


def adamw_8bit(groups: Any, lr: float) -> torch.optim.Optimizer:
    return bitsandbytes.optim.AdamW(groups, lr=lr, optim_bits=8)


def test_8_bit_moments_train_as_in_a_plain_loop_and_resume_exactly(tmp_path: Path) -> None:
    argv = arguments(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
    whole = run(argv)
    assert_same(whole, plain_loop(by_step([whole]), adamw_8bit, **WIDE))
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    assert torch.uint8 in dtypes(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    resumed = run([*argv, "--resume_from_checkpoint", str(checkpoint)])
    assert len(resumed["batches"]) == STEPS // 2
    assert resumed["logs"] == whole["logs"]
    assert resumed["weights"] == whole["weights"]


def dtypes(state: Any) -> set[torch.dtype]:
    if isinstance(state, torch.Tensor):
        return {state.dtype}
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return {dtype for value in values for dtype in dtypes(value)}


def test_any_learning_rate_trains_alike(tmp_path: Path) -> None:
    """Its update is computed from float32 weights, where it would lose digits at a small learning rate.

    To the rounding of float32: the base is stepped at the learning rate itself, and how much that changes the layers is
    measured by 17 products with float32 matrices in a row.
    """
    low, high = (run(arguments(tmp_path, learning_rate=lr))["logs"] for lr in (5e-5, 1.0))
    for key in ("loss", "mechanic/effective_lr"):
        assert [entry[key] for entry in high] == pytest.approx([entry[key] for entry in low], rel=1e-5)
