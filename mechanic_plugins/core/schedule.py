"""The current position of a schedule, as one learning rate for all param groups that share a tuner."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["scheduled_lr"]


def scheduled_lr(
    groups: Iterable[tuple[int, dict[str, Any]]], refs: MutableMapping[int, float], ceiling: float
) -> float | Tensor:
    """The highest learning rate, or what it would be if all groups had followed the schedule.

    A schedule multiplies all groups alike, so the highest lr represents them. If a single group was raised, by hand or
    because it was added late, the other groups tell where the schedule is: their scale must not drop because of it.

    Args:
        groups: The groups of one tuner, each with its index.
        refs: Each group's first learning rate above 0, by index. Updated in place.
        ceiling: The highest of these in earlier steps; later entries are capped at it.
    """
    highest: float | Tensor = 0.0
    ratios: dict[int, float] = {}
    for index, group in groups:
        lr = group.get("lr")
        if lr is None:
            continue
        if isinstance(lr, Tensor) and lr.device.type != "cpu":  # reading it would wait for the device
            highest = _higher(highest, lr)
            continue
        highest = _higher(highest, float(lr))
        if index not in refs and (first := float(group.get("initial_lr", lr))) > 0:
            refs[index] = min(first, ceiling)
        if index in refs:
            ratios[index] = float(lr) / refs[index]
    if not ratios or isinstance(highest, Tensor):
        return highest
    low, high = min(ratios.values()), max(ratios.values())
    return highest if low >= high * (1 - 1e-9) else low * max(refs[index] for index in ratios)


def _higher(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """The higher of two learning rates, without waiting for a device."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return a.clamp(min=b) if isinstance(a, Tensor) else max(a, b)
