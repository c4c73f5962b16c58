"""What to report at the end of a run: the learned learning rate, and whether something looks wrong.

    history = ScaleHistory()
    for batch in data:
        ...
        optimizer.step()
        history.record(optimizer)  # does not wait for the device
    print(report(optimizer))  # 'Mechanic learned a learning rate of 0.00032 (rule="relative").'
    for remark in remarks(optimizer, history):
        print(remark)

Framework-independent; each plugin prints it in its framework's way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = [
    "NOTHING_LEARNED",
    "STILL_RISING",
    "ScaleHistory",
    "is_still_rising",
    "learned",
    "remarks",
    "report",
    "rules",
]

STILL_RISING = (
    "Mechanic was still looking for its scale when the run ended, so most of it was trained at too small a learning "
    "rate: train for more steps."
)
NOTHING_LEARNED = "Mechanic learned no learning rate: the run made no step, or too few."
_NO_GRADIENT = (
    "Mechanic made no step: optimizer.step() was called, but none of its weights had a gradient, so nothing was "
    "trained. Build the optimizer from the weights of the model that backward() goes through."
)
_NO_STEP = "Mechanic made no step: optimizer.step() was replaced or never called, so nothing was trained with it."
_AGREEMENT = 0.8
"""From this on, nearly all steps of the run were favourable."""
_HARDLY = 1e-3
"""A fraction of the layers' size. The rule itself changes them by five percent within ten steps."""


class ScaleHistory:
    """The scale at evenly spaced steps, kept as device tensors, so that recording never waits.

    At `limit` records, every other one is dropped and half as many steps are recorded from then on.

    Args:
        limit: An even number of records, at least 16.
    """

    def __init__(self, limit: int = 512) -> None:
        if limit < 16 or limit % 2:
            raise ValueError(f"limit must be an even number >= 16, got {limit!r}: every other record is dropped there.")
        self._limit, self._stride, self._calls = limit, 1, 0
        self._records: list[tuple[Tensor, list[float | Tensor]]] = []
        self._steps_before: Tensor | None = None

    def record(self, optimizer: MechanicOptimizer) -> None:
        """Call once after every step."""
        if self._steps_before is None:
            self._steps_before = optimizer.tuner.steps.clone() - 1
        if self._calls % self._stride == 0:
            self._records.append((optimizer.scales.clone(), optimizer.lrs))
        self._calls += 1
        if len(self._records) == self._limit:
            del self._records[1::2]
            self._stride *= 2

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_whole(self) -> bool:
        """Whether it starts with the optimizer's first step, not a resumed one. Waits for the device."""
        return self._steps_before is not None and float(self._steps_before) <= 0

    def lrs(self) -> list[list[float]]:
        """Each param group's scale * lr at each recorded step. Waits for the device once."""
        if not self._records:
            return []
        scales = iter(torch.cat([scales for scales, _ in self._records]).tolist())
        return [[next(scales) * float(lr) for lr in lrs] for _, lrs in self._records]


def report(optimizer: MechanicOptimizer) -> str:
    """One line with the learned learning rate and the rule that learned it. Waits for the device."""
    lr, rule = optimizer.learned_lr, optimizer.settings.rule
    if not lr:
        return NOTHING_LEARNED
    lrs = optimizer.effective_lrs
    return learned(lr, rule, groups=len(lrs) if len(set(lrs)) > 1 else 1)


def learned(lr: float, rule: str, *, groups: int = 1) -> str:
    """The line of `report`, for an optimizer that is gone. `lr` is the largest of so many groups' that differ."""
    largest = f", the largest of {groups} param groups" if groups > 1 else ""
    return f'Mechanic learned a learning rate of {lr:.3g}{largest} (rule="{rule}").'


def rules(optimizers: Iterable[MechanicOptimizer]) -> dict[str, str]:
    """Which rule each optimizer trains by, for a run's hyper-parameters: `mechanic/rule`, `mechanic/rule-1`, ..."""
    return {f"mechanic/rule{f'-{i}' if i else ''}": each.settings.rule for i, each in enumerate(optimizers)}


def remarks(optimizer: MechanicOptimizer, history: ScaleHistory | None) -> list[str]:
    """Remarks on what looks wrong at the end of a run. Waits for the device."""
    found = []
    if history is not None and (is_still_rising(history) or (history.is_whole and optimizer.agreement > _AGREEMENT)):
        found.append(STILL_RISING)
    metrics = optimizer.metrics()
    steps, skipped = (int(metrics[f"mechanic/{name}"]) for name in ("steps", "skipped_steps"))
    if not steps + skipped:
        return [_NO_GRADIENT if history is not None and len(history) else _NO_STEP]
    path = optimizer.path
    if steps >= 10 and path < _HARDLY and "mechanic/moved" in metrics:
        found.append(
            f"Mechanic moved the weights by {path:.2g} of their size in {steps} steps, so hardly anything was "
            "trained: the gradients or the learning rate were 0, or max_scale is too small. On a GPU, float32 "
            "gradients below 1e-22 count as 0, as their squares are: multiply the loss by a constant."
        )
    if skipped > 0.01 * (steps + skipped):
        found.append(
            f"Mechanic skipped {skipped} of {steps + skipped} steps, whose gradients were not finite or far larger "
            "than all before them."
        )
    return found


def is_still_rising(history: ScaleHistory) -> bool:
    """Whether the learning rate in force grew nearly as fast in the last quarter of the run as it ever did.

    The rate rises fast until it is found and drifts little after that, so the run's own fastest quarter is the measure.
    The first three steps, which measure the length of an update, are left out. A resumed run has missed the rise and
    never counts. Waits for the device.
    """
    logs = [math.log(max(lrs)) for lrs in history.lrs() if max(lrs) > 0]
    quarter = max(len(logs) // 4, 1)
    logs = logs[3:]
    if len(logs) <= quarter or not history.is_whole:
        return False
    growth = [later - earlier for earlier, later in zip(logs, logs[quarter:], strict=False)]
    return growth[-1] > max(min(0.025 * quarter, 0.1), 0.5 * max(growth))
