"""A small model to train, and functions that tell whether anything about it has changed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def perceptron(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def backward(model: nn.Module, step: int) -> Tensor:
    """Computes the gradients of this step's batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator)
    y = (x @ torch.linspace(-1, 1, 12).view(4, 3)).argmax(1)
    dtype = next(model.parameters()).dtype
    loss = F.cross_entropy(model(x.to(dtype)), y)
    model.zero_grad()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        losses.append(float(backward(model, step)))
        optimizer.step()
    return losses


def everything(optimizer: torch.optim.Optimizer, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of weights and state for `differences`, Mechanic's too; `without` these of the tuner's numbers."""
    state_dict = optimizer.state_dict()
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        entry = json.loads(group.pop("mechanic_tuner", "{}"))
        numbers = {name: number for name, number in entry.pop("tuner", {}).items() if name not in without}
        group["mechanic"] = {**entry, **numbers}
    weights = [p.detach() for g in optimizer.param_groups for p in g["params"]]
    return copy.deepcopy({"weights": weights, "state": state_dict["state"], "groups": groups})


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places where two nested structures differ, bit for bit."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        return [] if same else [f"{where}: {a} and {b}"]
    if isinstance(a, dict):
        missing = [f"{where}: only one has {key!r}" for key in a.keys() ^ b.keys()]
        return missing + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{i}")]
    return [] if a == b else [f"{where}: {a} and {b}"]


def two_groups(model: nn.Sequential, *, lr: float = 0.5) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": lr}, {"params": list(model[2].parameters()), "lr": lr / 10}]


def filled(params: Iterable[Tensor], value: float = 1.0) -> None:
    for p in params:
        p.grad = torch.full_like(p, value)


def descend(opt: Any, p: Tensor, steps: int) -> None:
    """Trains one parameter towards swinging targets; at rest, its gradients would be rounding errors."""
    target = torch.linspace(-1, 1, p.numel()).view(p.shape)
    for step in range(steps):
        p.grad = (p.detach().float() - target - 0.1 * math.cos(step)).to(p.dtype)
        opt.step()
