"""Where a schedule stands, as one learning rate for all param groups that share a tuner."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Schedule"]


class Schedule:
    """The groups' learning rates, each beside the first one it had.

    A schedule multiplies all of them alike, so the highest stands for all. Where one group alone was raised, by hand
    or because it was added late, the others tell where the schedule is: their scale must not fall for it.
    """

    def __init__(self, known: Mapping[int, float]) -> None:
        """`known` has the first learning rates of the groups that were there before: none counts for more later."""
        self._ceiling = max(known.values(), default=math.inf)
        self._highest: float | Tensor = 0.0
        self._highest_ref = 0.0
        self._ratios: list[float] = []

    def add(self, group: dict[str, Any], refs: MutableMapping[int, float], index: int) -> None:
        """Counts a group in; `refs` keeps its first learning rate above 0 under its index."""
        lr = group.get("lr")
        if lr is None:
            return
        if isinstance(lr, Tensor) and lr.device.type != "cpu":  # not looked at: that would wait for the device
            self._highest = _higher(self._highest, lr)
            return
        lr = float(lr)
        self._highest = _higher(self._highest, lr)
        if index not in refs and (first := float(group.get("initial_lr", lr))) > 0:
            refs[index] = min(first, self._ceiling)
        if index in refs:
            self._highest_ref = max(self._highest_ref, refs[index])
            self._ratios.append(lr / refs[index])

    def lr(self) -> float | Tensor:
        """The highest learning rate, or what it would be if all groups had followed the schedule."""
        if not self._ratios or isinstance(self._highest, Tensor):
            return self._highest
        low, high = min(self._ratios), max(self._ratios)
        return self._highest if low >= high * (1 - 1e-9) else low * self._highest_ref


def _higher(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """Of two learning rates, without waiting for a device."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return a.clamp(min=b) if isinstance(a, Tensor) else max(a, b)
