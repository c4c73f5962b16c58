"""Checkpoints that older versions wrote, kept in tests/data/golden, and the runs they were taken from.

Every setting is passed by name, so that a change of the defaults leaves these runs as they were. All arithmetic of the
problem is elementwise and on short fractions: its gradients are the same bits on every machine.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.lion import Lion

FOLDER = Path(__file__).parent / "data" / "golden"
SAVED, LAST = 12, 22
"""The step of the checkpoint, and the end of the ten steps after it that are recorded."""

SETTINGS: dict[str, Any] = {
    "betas": (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999),
    "s_init": "auto",
    "first_move": 1e-3,
    "s_decay": 0.0,
    "eps": 1e-8,
    "rule": "paper",
    "normalize_lr": True,
    "smoothing": 0.97,
    "hindsight": 0.3,
    "own_warmup": True,
    "scope": "all",
    "max_scale": None,
}
"""The defaults of 0.1.0."""
AS_PUBLISHED = {**SETTINGS, "smoothing": 0.0, "hindsight": 1.0, "own_warmup": False}


@dataclass(frozen=True)
class Case:
    base: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    base_options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "weight_decay": 0.01})
    settings: dict[str, Any] = field(default_factory=lambda: SETTINGS)
    dtype: torch.dtype = torch.float64
    frozen_at: int | None = None


CASES = {
    "adamw": Case(),
    "adamw-float32": Case(dtype=torch.float32),
    "adamw-bfloat16": Case(base_options={"lr": 0.1, "weight_decay": 0.01, "foreach": True}, dtype=torch.bfloat16),
    "scope-group": Case(settings={**SETTINGS, "scope": "group"}),
    "frozen": Case(frozen_at=9),
    "max-scale": Case(settings={**SETTINGS, "max_scale": 0.005, "betas": (0.9, 0.999), "s_init": 1e-3}),
    "preset-paper": Case(settings={**AS_PUBLISHED, "preset": "paper", "s_init": 1e-8, "s_decay": 0.01}),
    "rule-experiments": Case(settings={**AS_PUBLISHED, "rule": "experiments", "s_init": 1e-6}),
    "rule-optax": Case(settings={**AS_PUBLISHED, "rule": "optax", "s_init": 1e-6}),
    "rule-theory": Case(settings={**AS_PUBLISHED, "rule": "theory"}),
    "sgd-momentum": Case(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-bfloat16-foreach": Case(torch.optim.SGD, {"lr": 0.1, "foreach": True}, dtype=torch.bfloat16),
    "adagrad": Case(torch.optim.Adagrad, {"lr": 0.1}),
    "adafactor": Case(torch.optim.Adafactor, {"lr": 0.1}),
    "lion": Case(Lion, {"lr": 0.1, "weight_decay": 0.01}),
}

SHARDED = {"sharded": {}, "flattened": {"flatten_optimizer_state_dict": True}}
"""The two forms in which torch.distributed.checkpoint keeps an optimizer, by the options of its state dicts."""
ZERO_STAGES = (2, 3)


class Bowl(nn.Module):
    """A quadratic whose minimum moves with the step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("first", (3, 4)), ("second", (5,)), ("third", (2, 3))):
            self.register_parameter(name, nn.Parameter(_fractions(shape, 3).to(dtype)))

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for p in self.parameters():
            target = _fractions(p.shape, int(step)).to(p.dtype)
            total = total + ((p - target) ** 2).sum()
        return total


def _fractions(shape: tuple[int, ...], step: int) -> Tensor:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return ((numbers * 7 + step * 5) % 11 - 5).reshape(shape) / 8


def build(case: Case) -> tuple[Bowl, MechanicOptimizer]:
    model = Bowl(case.dtype)
    return model, mechanize(case.base(groups_of(model, case), **case.base_options), **case.settings)


def groups_of(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, "lr": case.base_options["lr"] / 4}]


def set_lrs(groups: list[dict[str, Any]], case: Case, step: int) -> None:
    """Warms up, falls after the checkpoint, and rises above all earlier ones."""
    factor = 1.5 if step > SAVED + 6 else 0.5 if step > SAVED else min(1.0, (step + 1) / 4)
    for index, group in enumerate(groups):
        group["lr"] = case.base_options["lr"] * factor / (4 if index else 1)


def train(model: nn.Module, opt: MechanicOptimizer, case: Case, first: int, last: int) -> None:
    for step in range(first, last):
        if step == case.frozen_at:
            opt.freeze()
        set_lrs(opt.param_groups, case, step)
        opt.zero_grad()
        model(step).backward()
        opt.step()


def result(model: nn.Module, opt: MechanicOptimizer) -> dict[str, Any]:
    """Plain numbers, exact: float32 and bfloat16 are float64 too."""
    weights = {name: p.detach().double().flatten().tolist() for name, p in model.named_parameters()}
    return {"weights": weights, "scales": opt.scales.tolist(), "steps": opt.metrics()["mechanic/steps"]}


def assert_continues(found: dict[str, Any], version: str, name: str, dtype: torch.dtype) -> None:
    """To the last bit with the torch and the kind of CPU that recorded it.

    Others may add in another order, and end exp and log in another bit. 16-bit weights are within one rounding, with an
    equal scale: 0.1 let the base round its update to 16 bits, later versions step float32 copies.
    """
    recorded = json.loads((FOLDER / version / "expected.json").read_text())
    expected = recorded["cases"][name]
    assert found["steps"] == expected["steps"]
    if recorded["made_with"] == made_with() and dtype != torch.bfloat16:
        assert found == expected
        return
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for key in found["weights"]:
        rounding = torch.finfo(dtype).eps if dtype == torch.bfloat16 else tolerance
        _assert_close(found["weights"][key], expected["weights"][key], rounding)
    _assert_close(found["scales"], expected["scales"], tolerance)


def _assert_close(found: list[float], expected: list[float], tolerance: float) -> None:
    a, b = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-3 * tolerance)


def made_with() -> dict[str, str]:
    return {"torch": torch.__version__, "machine": platform.machine()}
