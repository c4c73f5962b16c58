"""The current position of a schedule, as one learning rate for all param groups that share a tuner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.rule.default import DefaultTuner
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["Course", "begin", "follow", "has_lr_zero", "peak_lr", "scheduled_lr", "with_new_top"]

Group = dict[str, Any]
Course = dict[int, tuple[float, float]]
"""By group, for those above 0 at least once: the last lr, schedules at 0 left out, and the lr at the schedule's top.
Both are 0 while a group is held at 0 and others are not."""
_JUMP = 3.0
"""By what factor a group that a scheduler knows must part from the others, in one step, to count as changed by hand."""


def peak_lr(group: Group) -> float:
    """The highest lr of a group's schedule. Schedulers note their initial lr or, like OneCycleLR, their maximum."""
    lrs = (group.get(key) for key in ("max_lr", "initial_lr", "lr"))
    return float(next((lr for lr in lrs if lr is not None), 1.0))


def begin(tuners: Sequence[Tuner], placed: Iterable[tuple[int, Group]], *, normalize: bool) -> list[Tuner]:
    """The tuners with their unit: what the groups announce or, by the default rule, the lr in force.

    Without one if every lr is still 0.

    Args:
        tuners: Left as they are.
        placed: The groups, each with the index of its tuner.
        normalize: State constants for an lr of 1, rather than for the base's own.
    """
    new, placed = [tuner.copy() for tuner in tuners], list(placed)
    firsts = [group.get("lr") for _, group in placed]
    if not isinstance(new[0], DefaultTuner):  # whose runs do not depend on what only a scheduler announces
        firsts = [group.get("initial_lr", lr) for (_, group), lr in zip(placed, firsts, strict=True)]
    unit = max((1.0 if first is None else float(first) for first in firsts), default=0.0) if normalize else 1.0
    if unit == 0:
        return new
    for tuner in new:
        tuner.unit = unit
    return new


def has_lr_zero(groups: Sequence[Group]) -> bool:
    """Whether every group's lr is 0. A tensor on a GPU is not read, and counts as not 0."""
    lrs = [lr for group in groups if (lr := group.get("lr")) is not None]
    if lrs and type(lrs[0]) is float and lrs[0] > 0:
        return False
    return bool(lrs) and all(map(_is_known, lrs)) and all(float(lr) == 0 for lr in lrs)


def follow(placed: Sequence[tuple[int, Group]], course: Course) -> Course:
    """The course after these learning rates, those in a GPU's memory left out.

    A schedule moves all groups alike. A group that moves otherwise was changed by hand, and has another lr at the top
    from now on. The group that moved least tells what the schedule did; a group that is 0 alone is held there. Where a
    scheduler is at work, which may give each group a curve of its own, only a jump counts as made by hand.

    Args:
        placed: The groups, each with its index.
        course: That of the step before. Left as it is.
    """
    lrs = {i: float(lr) for i, group in placed if (lr := group.get("lr")) is not None and _is_known(lr)}
    if not any(lrs.values()):
        return course
    moves = [lrs[i] / was for i, (was, _) in course.items() if was > 0 and lrs.get(i)]
    move = min(moves, key=lambda factor: abs(math.log(factor)), default=1.0)
    new: Course = {}
    for i, group in placed:
        was, peak = course.get(i, (0.0, 0.0))
        if was > 0 and i in lrs:
            by_hand, tolerance = lrs[i] / (was * move), _JUMP if "initial_lr" in group else 1 + 1e-9
            new[i] = lrs[i], peak if 1 / tolerance < by_hand < tolerance else peak * by_hand
    place = min((lr / peak for lr, peak in new.values() if lr > 0), default=None)
    for i, _ in placed:
        if i not in new and lrs.get(i):
            new[i] = lrs[i], lrs[i] if place is None else lrs[i] / place
    return {**course, **new}


def with_new_top(course: Course) -> Course:
    """The course with the current place as its top, if it is above the one so far."""
    place = min((lr / peak for lr, peak in course.values() if lr > 0), default=0.0)
    return {i: (lr, peak * place) for i, (lr, peak) in course.items()} if place > 1 else course


def scheduled_lr(groups: Sequence[tuple[int, Group]], course: Course, top_lr: float) -> float | Tensor:
    """The highest learning rate, or what it would be if no single group had been changed by hand or added late.

    The scale of the others must not drop because of it.

    Args:
        groups: The groups of one tuner, each with its index.
        course: What `follow` returned for them.
        top_lr: The highest of these so far.
    """
    highest: float | Tensor = 0.0
    for lr in [group["lr"] for _, group in groups if group.get("lr") is not None]:
        highest = _higher(highest, float(lr) if _is_known(lr) else lr)
    known = [course[i] for i, _ in groups if i in course and course[i][0] > 0]
    if len(groups) == 1 or not known or isinstance(highest, Tensor) or highest == 0 or top_lr == 0:
        return highest
    places = [lr / peak for lr, peak in known]
    is_ordinary = min(places) >= max(places) * (1 - 1e-9) and math.isclose(max(peak for _, peak in known), top_lr)
    return highest if is_ordinary else min(places) * top_lr


def _is_known(lr: float | Tensor) -> bool:
    """Whether reading it does not wait for a device."""
    return not isinstance(lr, Tensor) or lr.device.type == "cpu"


def _higher(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """The higher of two learning rates, without waiting for a device."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return a.clamp(min=b) if isinstance(a, Tensor) else max(a, b)
