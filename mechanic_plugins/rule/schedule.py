"""The current position of a schedule, as one learning rate for all param groups that share a tuner."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.rule.tuner import Tuner

__all__ = ["begin", "has_lr_zero", "peak_lr", "scheduled_lr"]

Group = dict[str, Any]


def peak_lr(group: Group) -> float:
    """The highest lr of a group's schedule. Schedulers note their initial lr or, like OneCycleLR, their maximum."""
    lrs = (group.get(key) for key in ("max_lr", "initial_lr", "lr"))
    return float(next((lr for lr in lrs if lr is not None), 1.0))


def begin(tuners: Sequence[Tuner], placed: Iterable[tuple[int, Group]], *, normalize: bool) -> list[Tuner]:
    """The tuners with the peak lr that the groups announce; without a unit if every lr is still 0.

    Args:
        tuners: Left as they are.
        placed: The groups, each with the index of its tuner.
        normalize: State constants for an lr of 1, rather than for the base's own.
    """
    new, placed = [tuner.copy() for tuner in tuners], list(placed)
    firsts = [group.get("initial_lr", group.get("lr")) for _, group in placed]
    unit = max((1.0 if first is None else float(first) for first in firsts), default=0.0) if normalize else 1.0
    if unit == 0:
        return new
    for index, group in placed:
        announced = [float(group[key]) for key in ("lr", "initial_lr", "max_lr") if group.get(key) is not None]
        new[index].top_lr = max(new[index].top_lr, *(announced or [1.0]))
    for tuner in new:
        tuner.unit = unit
    return new


def has_lr_zero(groups: Sequence[Group]) -> bool:
    """Whether every group's lr is 0. A tensor on a GPU is not read, and counts as not 0."""
    lrs = [lr for group in groups if (lr := group.get("lr")) is not None]
    if lrs and type(lrs[0]) is float and lrs[0] > 0:
        return False
    known = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in lrs)
    return bool(lrs) and known and all(float(lr) == 0 for lr in lrs)


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
