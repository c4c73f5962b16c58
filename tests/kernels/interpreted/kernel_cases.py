"""Shared by the tests in this folder: rules, bases with kernels, and one training loop for all backends."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lion import Lion

Build = Callable[[Any], torch.optim.Optimizer]

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"settings": Settings(rule="paper", s_init=0.1)},  # moves the weights within a few steps
}
BASES: dict[str, Build] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "adam maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}
TOLD: dict[str, Build] = {
    "told adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "told adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, fused=True),
    "told sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "told adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}
"""torch's fused kernels skip a step if a tensor says so."""
KERNELS = ("triton_passes", "triton_fused", "triton_move", "triton_decide")


class Launched:
    """Wraps a kernel and calls `before` at every launch."""

    def __init__(self, kernel: Any, before: Callable[[], object]) -> None:
        self.kernel, self.before = kernel, before

    def __getitem__(self, grid: Any) -> Any:
        self.before()
        return self.kernel[grid]


def watch_launches(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], object]) -> None:
    """Calls `before` with the name of every kernel that is launched."""
    for module in (importlib.import_module(f"mechanic_plugins.kernels.{name}") for name in KERNELS):
        for name in [name for name in dir(module) if name.endswith("_kernel")]:
            kernel = Launched(getattr(module, name), lambda name=name: before(name))  # type: ignore[misc]
            monkeypatch.setattr(module, name, kernel)


def three_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(5, 7), (9,), ()]]


def train(base: str, steps: int, dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Steps with gradients that depend on the weights; one parameter sometimes has none, at first unless `late=False`.

    The targets swing, because at rest Adam would take whole steps along gradients that are rounding errors.
    """
    params = three_params(dtype)
    targets = [torch.randn_like(p) for p in params]
    sign = -1 if "maximize" in base else 1
    warm_up, poison, late = options.pop("warm_up", 1), options.pop("poison", None), options.pop("late", True)
    optimizer = mechanize((BASES | TOLD)[base](params), **options)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warm_up)
        optimizer.zero_grad()
        swing, count = 0.5 * math.cos(step), 2 + (step + (not late)) % 2
        loss = sum(((p - t - swing).float() ** 2).sum() for p, t in zip(params[:count], targets, strict=False))
        (sign * loss).backward()  # type: ignore[attr-defined]
        if step == poison:
            params[0].grad[0, 0] = float("inf")  # type: ignore[index]
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer
