"""Warnings about skipped steps: which tensors are to blame, and how many steps in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.distributed.sharding import local

__all__ = ["Skips"]

_NOWHERE = "a gradient was not finite, or so large that its square was not (1.8e19 in float32), on this rank or another"
_BAD_WEIGHTS = (
    "Every step will be skipped until those weights are finite: load them from a checkpoint. Store masks of "
    "-inf as buffers, not as parameters."
)


class Skips:
    """Decides when to warn: at the first skipped step, then at 10, 100, 1000 in a row."""

    def __init__(self) -> None:
        self._steps = -1
        self._skipped = 0
        self._in_a_row = 0
        self._was_told = False

    def warning(self, groups: Sequence[dict[str, Any]], *, steps: int, skipped: int) -> str | None:
        """The text of a warning, or None if there is nothing new to say.

        Args:
            groups: The param groups, whose weights and gradients are looked at.
            steps: How many steps were made so far.
            skipped: How many were skipped.
        """
        if steps != self._steps:
            self._steps, self._in_a_row = steps, 0
        before, more = self._in_a_row, skipped - self._skipped
        self._skipped = skipped
        if more <= 0:
            return None
        self._in_a_row = before + (more if before else 1)  # a GPU's count, read for the first time, has no order
        is_due = not self._was_told or len(str(self._in_a_row)) > len(str(before))
        self._was_told = True
        return _text(groups, self._in_a_row) if is_due else None


def _text(groups: Sequence[dict[str, Any]], in_a_row: int) -> str:
    weights, gradients = next(_not_finite(groups), None), next(_not_finite(groups, of_gradients=True), None)
    reason = f"the weights of {weights} are not finite" if weights else _NOWHERE
    if gradients and not weights:
        reason = f"the gradient of {gradients} was not finite"
    many = f" {in_a_row} steps in a row were skipped: nothing is trained." if in_a_row > 1 else ""
    return (
        f"{reason}: the step was skipped; weights, optimizer state and tuner are unchanged.{many} "
        f"{_BAD_WEIGHTS + ' ' if weights else ''}metrics()['mechanic/skipped_steps'] counts such steps."
    )


def _not_finite(groups: Sequence[dict[str, Any]], *, of_gradients: bool = False) -> Iterator[str]:
    for index, group in enumerate(groups):
        names = group.get("param_names") or ()
        for place, p in enumerate(group["params"]):
            tensor: Tensor | None = p.grad if of_gradients else p
            if tensor is not None and not torch.isfinite(local(tensor.detach())).all():
                name = f" ({names[place]})" if place < len(names) else ""
                yield f"parameter {place}{name} of group {index}, of shape {tuple(p.shape)},"
