"""Shared by the tests in this folder: the script's command line, and the plain loop to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_script import add_lora, build_model
from torch import Tensor
from transformers import get_scheduler

from mechanic_plugins import mechanize

STEPS = 16

HAS_MUON = hasattr(torch.optim, "Muon")  # torch >= 2.9


def skip_unless_json_is_read() -> None:
    """transformers 4 accepts no dictionary on the command line."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("--lr_scheduler_kwargs as JSON came with transformers 5")


def command_line(folder: Path, **options: Any) -> list[str]:
    """Arguments for the script."""
    options = {
        "output_dir": folder,
        "optim": "mechanic_adamw",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "warning",
        **options,
    }
    return [text for key, value in options.items() for text in (f"--{key}", str(value))]


def by_step(ranks: Sequence[dict[str, Any]], accumulation: int = 1) -> list[list[Tensor]]:
    """The batches of each optimizer step, over all ranks and micro-batches."""
    counts = {len(rank["batches"]) for rank in ranks}
    assert len(counts) == 1, counts
    steps = range(0, counts.pop(), accumulation)
    return [[torch.tensor(b) for rank in ranks for b in rank["batches"][i : i + accumulation]] for i in steps]


def plain_loop(
    batches: Sequence[Sequence[Tensor]],
    build: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    lr: float = 5e-5,
    weight_decay: float = 0.1,
    warmup: int = 2,
    steps: int = STEPS,
    max_grad_norm: float = 1.0,
    schedule: str = "linear",
    lora: bool = False,
    width: int = 16,
    dtype: str = "float64",
    bf16: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains with `mechanize` around a torch optimizer in a loop without a framework, on the Trainer's batches."""
    model: Any = build_model(dtype=dtype, width=width)
    if lora:
        model = add_lora(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = [p for name, p in named if "bias" not in name and ".ln_" not in name]
    others = [p for name, p in named if "bias" in name or ".ln_" in name]
    groups = [{"params": decays, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = mechanize(build(groups, lr=lr), **options)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    scales, losses = [], []
    for micro_batches in batches:
        tokens = sum(x.numel() for x in micro_batches)  # the Trainer divides by all labels, even the unused first ones
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = sum(model(input_ids=x, labels=x, num_items_in_batch=tokens).loss for x in micro_batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        scales.append(optimizer.scale.item())
        losses.append(loss.item())
    return {"weights": model.state_dict(), "scales": scales, "losses": losses}


def assert_same(result: dict[str, Any], expected: dict[str, Any], *, within: float = 1e-6) -> None:
    """Checks that the Trainer's weights and scales equal the loop's."""
    scales = [entry["mechanic/scale"] for entry in result["logs"]]
    assert scales[-1] > 0
    assert scales == _approx(expected["scales"], within)
    assert set(result["weights"]) == set(expected["weights"])
    for name, weight in result["weights"].items():
        torch.testing.assert_close(
            torch.tensor(weight, dtype=torch.float64), expected["weights"][name].double(), rtol=within, atol=within
        )


def _approx(values: Sequence[float], within: float) -> Any:
    import pytest

    return pytest.approx(values, rel=within)
