"""Advances the tuner: in plain floats, or in one launch on a GPU with Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.relative import BEGINNING
from mechanic_plugins.core.row import Row
from mechanic_plugins.core.schedule import scheduled_lr
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import Decision, decide
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.optimizer.units import Units

__all__ = ["Inputs", "Tuning", "has_lr_zero"]


class Inputs(NamedTuple):
    """What the host knows before a step is decided: the constants in units of the scale, and the schedule."""

    settings: Settings
    lrs: Sequence[float | Tensor] | Tensor
    """One per tuner."""
    hold: bool
    """Whether the scale stays as it is."""


class Tuning:
    """Advances the tuners of one base. Holds nothing that belongs in a checkpoint."""

    def __init__(self, base: Optimizer, settings: Settings, units: Units) -> None:
        self.base, self.settings, self.units = base, settings, units
        self._ignores_schedule = known_bases.ignores_a_schedule(base)
        self._heeds_zero = not self._ignores_schedule and settings.rule not in ("experiments", "optax")
        """Whether the scale is held while the learning rate is 0, at which nothing must move.

        The two rules that start with a scale above 0 do take such steps, as published: their warm-ups depend on it.
        """

        self._watched = known_bases.watched_steps(base) if settings.rule == "relative" else 0
        self.before_kernels = max(BEGINNING, self._watched)

    def beginning(self, rows: Sequence[Row]) -> dict[int, bool]:
        """The tuners whose first gradients measure the weights, and whether this is their very first one."""
        if self.settings.rule != "relative":
            return {}
        return {index: row.size == 0 for index, row in enumerate(rows) if row.gradients < BEGINNING}

    def may_jump(self, progress: Progress) -> bool:
        """Whether an update far longer than those before it is still to be expected."""
        is_learning = self._watched > 0 and not progress.frozen
        return is_learning and any(row.gradients <= self._watched for row in progress.tuner.rows)

    def by_floats(self, sums: Sequence[float], progress: Progress, max_grad_norm: float | None) -> Decision:
        """Advances `progress`. A skipped step changes only its count and the longest gradient."""
        lr_refs, unit = dict(progress.lr_refs), progress.unit
        state, rows = progress.tuner, [row.copy() for row in progress.tuner.rows]
        inputs = self.inputs(progress, rows)
        lrs = list(map(float, inputs.lrs))
        decision = decide(rows, sums, lrs, inputs.settings, hold=inputs.hold, max_grad_norm=max_grad_norm)
        if not decision.applied:
            progress.lr_refs, progress.unit = lr_refs, unit
            longest, rows = [row.longest for row in rows], [row.copy() for row in state.rows]
            for row, norm in zip(rows, longest, strict=True):
                row.longest = norm
        steps, skipped = state.counts
        progress.tuner = state.with_rows(rows, (steps + bool(decision.applied), skipped + decision.skipped))
        if state.device.type == "cuda":  # the next step may be captured, and reads them there
            gpu_tuner.constants_on(progress.tuner.flat.device, inputs.settings.max_scale, max_grad_norm)
        return decision

    def can_leave_to_device(self, progress: Progress) -> bool:
        """Whether a kernel may decide: every tuner with trained weights has begun. Waits for the GPU until then.

        The answer is the same on all ranks, even if one of them has no gradient.
        """
        if progress.unit == 0 or self.settings.rule != "relative":
            return False
        groups = self.base.param_groups
        if len(progress.tuner) == 1:
            needed = {0}
        else:
            active = [group for group in groups if any(p.requires_grad for p in group["params"])]
            needed = {progress.tuner_of(group) for group in active}
        if not needed <= progress.begun:
            rows = progress.tuner.rows
            progress.begun = {
                i for i, row in enumerate(rows) if row.gradients >= self.before_kernels and row.played > 0
            }
        return needed <= progress.begun

    def by_kernel(self, sums: Tensor, progress: Progress, max_grad_norm: float | None) -> Decision:
        """`by_floats` on a GPU, without waiting for it."""
        inputs = self.inputs(progress, ())._asdict()
        progress.tuner, scales = gpu_tuner.launch(progress.tuner, sums, **inputs, max_grad_norm=max_grad_norm)
        return Decision.on_device(scales)

    def inputs(self, progress: Progress, rows: Sequence[Row]) -> Inputs:
        """Fixes the unit when it becomes known, and reads the learning rates."""
        has_unit = self.units.resolve(progress, rows)
        hold = not has_unit or progress.frozen or (self._heeds_zero and has_lr_zero(self.base))
        return Inputs(self.units.constants(progress), self._lrs(progress), hold)

    def _lrs(self, progress: Progress) -> list[float | Tensor]:
        """Per tuner, the position of its groups' schedule as a learning rate; 1 if the base has none."""
        tuners, groups, refs = len(progress.tuner), self.base.param_groups, progress.lr_refs
        if len(groups) == 1 and 0 in refs and type(dict.get(groups[0], "lr")) is float and not self._ignores_schedule:
            return [groups[0]["lr"]]
        if self._ignores_schedule or not any("lr" in group for group in groups):
            return [1.0] * tuners
        ceiling = max(refs.values(), default=math.inf)
        placed = [(progress.row_of(group) or 0, group) for group in groups]
        parts = [[each for each in placed if tuners == 1 or each[0] == tuner] for tuner in range(tuners)]
        return [scheduled_lr(part, refs, ceiling) for part in parts]


def has_lr_zero(base: Optimizer) -> bool:
    """Whether every group's lr is 0. A tensor on a GPU is not read, and counts as not 0."""
    lrs = [lr for group in base.param_groups if (lr := dict.get(group, "lr")) is not None]
    if lrs and type(lrs[0]) is float and lrs[0] > 0:
        return False
    known = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in lrs)
    return bool(lrs) and known and all(float(lr) == 0 for lr in lrs)
