"""What to tell a person at the end of a run: the learning rate that was found, and whether the run was too short.

    history = ScaleHistory()
    for batch in data:
        ...
        optimizer.step()
        history.record(optimizer)  # does not wait for the device
    print(report(optimizer, history))  # "Mechanic learned a peak learning rate of 3.2e-04 (scale 6.4 x lr 5e-05)."
    if is_still_rising(history):
        print(TOO_SHORT)

No framework is needed here; each plugin says it in its framework's own way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.groups import names_of
from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = [
    "TOO_SHORT",
    "ScaleHistory",
    "described",
    "group_names",
    "is_still_rising",
    "learned_lr",
    "peak_lr",
    "report",
]

TOO_SHORT = (
    "Mechanic's scale was still rising as fast as ever when the run ended, so most of it was trained at too small a "
    "learning rate. Train for more steps, or start further out with first_move=1e-2."
)


class _Record(NamedTuple):
    scales: Tensor
    lrs: list[float | Tensor]


class ScaleHistory:
    """The scale at evenly spaced steps, as device tensors: recording never waits.

    Memory is bounded: when `limit` records are there, every other one goes, and from then on only half as many steps
    are recorded.

    Args:
        limit: An even number of records, at least 16.
    """

    def __init__(self, limit: int = 512) -> None:
        if limit < 16 or limit % 2:
            raise ValueError(f"limit must be an even number >= 16, got {limit!r}: every other record is dropped there.")
        self._limit = limit
        self._records: list[_Record] = []
        self._stride = 1
        self._calls = 0
        self._steps_before: Tensor | None = None

    def record(self, optimizer: MechanicOptimizer) -> None:
        """To be called once after every step of the optimizer."""
        if self._steps_before is None:
            self._steps_before = optimizer.tuner.steps.clone() - 1
        if self._calls % self._stride == 0:
            self._records.append(_Record(optimizer.scales.clone(), optimizer.lrs))
        self._calls += 1
        if len(self._records) == self._limit:
            del self._records[1::2]
            self._stride *= 2

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_whole(self) -> bool:
        """Whether it began with the optimizer's first step, not with a resumed one. Waits for the device."""
        return self._steps_before is not None and float(self._steps_before) <= 0

    def scales(self) -> list[float]:
        """The recorded scales, the largest group's of each step. Waits for the device once."""
        return [max(row) for row in self._rows()]

    def pairs(self) -> list[list[tuple[float, float]]]:
        """For each recorded step, each param group's scale and lr. Synchronises with the device once."""
        return [
            list(zip(scales, map(float, record.lrs), strict=True))
            for scales, record in zip(self._rows(), self._records, strict=True)
        ]

    def peaks(self) -> list[tuple[float, float]]:
        """For each param group the scale and the lr of the step whose lr in force, their product, was the highest."""
        steps = self.pairs()
        groups = max(map(len, steps), default=0)
        return [max((step[g] for step in steps if g < len(step)), key=math.prod) for g in range(groups)]

    def _rows(self) -> list[list[float]]:
        if not self._records:
            return []
        numbers = iter(torch.cat([record.scales for record in self._records]).tolist())
        return [[next(numbers) for _ in record.lrs] for record in self._records]


def learned_lr(optimizer: MechanicOptimizer) -> list[float]:
    """For each param group the scale as it is now times the peak of the base's lr. Waits for the device.

    What a plain optimizer's lr would be if its schedule began again.
    """
    return [s * peak_lr(group) for s, group in zip(optimizer.scales.tolist(), optimizer.param_groups, strict=True)]


def is_still_rising(history: ScaleHistory) -> bool:
    """Whether the scale grew nearly as fast in the last quarter of the run as it ever did. Waits for the device.

    A scale rises by a constant factor a step until it has found its place. In a run that is long enough the first
    quarters have most of the rise, and a slow drift afterwards, or the rise with which the scale answers a falling
    schedule, is small beside it. So the measure is the run's own fastest quarter, and schedules need no care. A resumed
    run has not seen the rise and never counts as too short, nor does one of fewer than 16 steps.
    """
    logs = [math.log(scale) for scale in history.scales() if scale > 0]
    quarter = len(logs) // 4
    if quarter < 4 or not history.is_whole:
        return False
    growth = [later - earlier for earlier, later in zip(logs, logs[quarter:], strict=False)]
    return growth[-1] > max(math.log(1.1), 0.5 * max(growth))


def report(optimizer: MechanicOptimizer, history: ScaleHistory | None = None) -> str:
    """One line on the learning rate that was found. Waits for the device.

    Args:
        optimizer: At the end of its run.
        history: Of the same run; the peak is then the highest lr that was in force. Without, it is the learned one.
    """
    pairs = history.peaks() if history is not None and len(history) else _final(optimizer)
    return described(pairs, group_names(optimizer))


def described(pairs: Sequence[tuple[float, float]], names: Sequence[str]) -> str:
    """The same line from each group's scale and lr."""
    if not any(math.prod(pair) for pair in pairs):
        return "Mechanic learned no learning rate: the run made no step, or too few."
    if len({math.prod(pair) for pair in pairs}) == 1:
        scale, lr = pairs[0]
        return f"Mechanic learned a peak learning rate of {scale * lr:.3g} (scale {scale:.3g} x lr {lr:.3g})."
    named = zip(names, pairs, strict=False)
    listed = ", ".join(f"{name} {s * lr:.3g} ({s:.3g} x {lr:.3g})" for name, (s, lr) in named)
    return f"Mechanic learned these peak learning rates (scale x lr): {listed}."


def _final(optimizer: MechanicOptimizer) -> list[tuple[float, float]]:
    return list(zip(optimizer.scales.tolist(), map(peak_lr, optimizer.param_groups), strict=True))


def group_names(optimizer: MechanicOptimizer) -> list[str]:
    """A group's own name, or `pg1` and so on, as in the logs."""
    return names_of(optimizer.param_groups)


def peak_lr(group: dict[str, Any]) -> float:
    """The highest lr that the group's schedule reaches.

    A scheduler notes where it began; one that climbs from there, as OneCycleLR, also how high it goes.
    """
    lrs = (group.get(key) for key in ("max_lr", "initial_lr", "lr"))
    lr = next((lr for lr in lrs if lr is not None), 1.0)
    return float(lr)
