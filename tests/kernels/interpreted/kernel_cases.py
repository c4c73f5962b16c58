"""Shared by the tests in this folder: bases with kernels, and one training loop for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion

# The relative rounding error of a product or sum.
EPS = {torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float64: 1.2e-16, torch.float16: 5e-4}


BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "adam maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


def train(base: str, steps: int, dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Steps with gradients that depend on the weights; one parameter sometimes has none.

    The targets swing, because at rest Adam would take whole steps along gradients that are rounding errors.
    """
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(5, 7), (9,), ()]]
    targets = [torch.randn_like(p) for p in params]
    sign = -1 if "maximize" in base else 1
    warm_up = options.pop("warm_up", 1)
    optimizer = mechanize(BASES[base](params), **options)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warm_up)
        optimizer.zero_grad()
        swing = 0.5 * math.cos(step)
        loss = sum(((p - t - swing).float() ** 2).sum() for p, t in zip(params[: 2 + step % 2], targets, strict=False))
        (sign * loss).backward()  # type: ignore[attr-defined]
        if options.pop("poison", None) == step:
            params[0].grad[0, 0] = float("inf")  # type: ignore[index]
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer
