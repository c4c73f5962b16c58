"""Lets the tuner take its step: in plain floats, or on a GPU with Triton in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases, tuner
from mechanic_plugins.core.relative import BEGINNING
from mechanic_plugins.core.row import Row
from mechanic_plugins.core.schedule import Schedule
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.plan import Decision

__all__ = ["Inputs", "Tuning", "has_lr_zero"]


class Inputs(NamedTuple):
    """What the host knows of a step before it is decided: the constants in the units of the scale, and the schedule."""

    settings: Settings
    lrs: list[float | Tensor]
    """For each tuner."""
    hold: bool
    """Whether the scale stays."""


class Tuning:
    """For one base with its settings. Holds nothing that a checkpoint needs."""

    def __init__(self, base: Optimizer, settings: Settings, units: Units) -> None:
        self.base, self.settings, self.units = base, settings, units
        self._ignores_schedule = known_bases.ignores_a_schedule(base)

    def beginning(self, progress: Progress) -> dict[int, bool]:
        """The tuners that begin, and whether they have seen no gradient yet: the default rule measures with those."""
        if self.settings.rule != "relative":
            return {}
        rows = progress.tuner.rows
        return {index: row.size == 0 for index, row in enumerate(rows) if row.gradients < BEGINNING}

    def by_floats(self, sums: Sequence[float], progress: Progress, max_grad_norm: float | None) -> Decision:
        """Moves `progress` on. A skipped step leaves no trace there but the count, and the longest gradient."""
        lr_refs, unit = dict(progress.lr_refs), progress.unit
        state, rows = progress.tuner, progress.tuner.copied_rows()
        inputs = self.inputs(progress, rows)
        outcome = tuner.decide(
            rows,
            sums,
            [float(lr) for lr in inputs.lrs],
            inputs.settings,
            hold=inputs.hold,
            max_grad_norm=max_grad_norm,
        )
        if not outcome.applied:
            progress.lr_refs, progress.unit = lr_refs, unit
            longest, rows = [row.longest for row in rows], state.copied_rows()
            for row, norm in zip(rows, longest, strict=True):
                row.longest = norm
        steps, skipped = state.counts
        progress.tuner = state.with_rows(rows, (steps + outcome.applied, skipped + outcome.skipped))
        return Decision(outcome.applied, outcome.befores, outcome.afters, outcome.clip)

    def inputs(self, progress: Progress, rows: Sequence[Row]) -> Inputs:
        """Fixes the unit, if it is time for it, and looks at the learning rates."""
        hold = not self.units.resolve(progress, rows) or self._holds(progress)
        return Inputs(self.units.constants(progress), self._lrs(progress), hold)

    def _holds(self, progress: Progress) -> bool:
        """Whether the scale stays: frozen, or at a learning rate of 0, which must move nothing.

        The two rules that start with a scale above 0 take such a step as published: their warm-ups would differ.
        """
        if progress.frozen:
            return True
        obeys = self.settings.rule not in ("experiments", "optax")
        return obeys and not self._ignores_schedule and has_lr_zero(self.base)

    def _lrs(self, progress: Progress) -> list[float | Tensor]:
        """For each tuner where its groups' schedule stands, as a learning rate; 1 for a base without any."""
        tuners = len(progress.tuner)
        if self._ignores_schedule or not any("lr" in group for group in self.base.param_groups):
            return [1.0] * tuners
        schedules = [Schedule(progress.lr_refs) for _ in range(tuners)]
        for group in self.base.param_groups:
            index = progress.row_of(group) or 0
            schedules[index if tuners > 1 else 0].add(group, progress.lr_refs, index)
        return [schedule.lr() for schedule in schedules]


def has_lr_zero(base: Optimizer) -> bool:
    """Whether every group has an lr of 0. One that is a tensor on a GPU is not looked at."""
    lrs = [group["lr"] for group in base.param_groups if group.get("lr") is not None]
    if any(lr for lr in lrs if not isinstance(lr, Tensor)):
        return False
    known = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in lrs)
    return bool(lrs) and known and all(float(lr) == 0 for lr in lrs)
