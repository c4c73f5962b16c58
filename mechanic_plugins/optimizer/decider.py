"""Lets the tuner take its step: in plain floats, or on a GPU with Triton in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases, tuner
from mechanic_plugins.core.row import Row
from mechanic_plugins.core.schedule import Schedule
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import TunerState
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.plan import Decision

__all__ = ["Decider", "Inputs", "counters_of", "has_lr_zero"]


class Inputs(NamedTuple):
    """What the host knows of a step before it is decided: the constants in the units of delta, and the schedule."""

    settings: Settings
    lrs: list[float | Tensor]
    """For each tuner."""
    hold: bool
    """Whether the scale stays."""


class Decider:
    """For one base with its settings. Holds nothing that a checkpoint needs."""

    def __init__(self, base: Optimizer, settings: Settings, units: Units) -> None:
        self.base, self.settings, self.units = base, settings, units
        self._on_device: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}

    def decide(
        self, sums: Tensor, progress: Progress, *, by_kernel: bool, max_grad_norm: float | None = None
    ) -> Decision:
        """Moves `progress` on. With a kernel nothing waits for the device, and `Decision.applied` is a tensor."""
        known = dict(progress.lr_refs), progress.unit, progress.unit_since
        inputs = self.inputs(progress)
        if by_kernel:
            state, counters, table = self.launch(
                progress.tuner, sums, counters_of(progress), inputs, inputs.lrs, max_grad_norm=max_grad_norm
            )
            progress.tuner, (progress.steps, progress.skipped) = state, counters.unbind()
            return Decision(table[0, 2], table, has_clip=max_grad_norm is not None)
        outcome = self._in_floats(sums, progress, inputs, max_grad_norm)
        if not outcome.applied:  # a skipped step leaves no trace
            progress.lr_refs, progress.unit, progress.unit_since = known
            if progress.unit == 0:
                progress.tuner.column("lr").zero_()
        steps = float(progress.steps)
        rows = zip(outcome.befores, outcome.afters, outcome.delta_factors, strict=True)
        made = float(outcome.applied)
        scales = [[before, after, made, factor, outcome.clip, steps] for before, after, factor in rows]
        table = torch.tensor(scales, dtype=torch.float64, device=sums.device)
        return Decision(outcome.applied, table, has_clip=outcome.clip < 1)

    def _in_floats(
        self, sums: Tensor, progress: Progress, inputs: Inputs, max_grad_norm: float | None
    ) -> tuner.Outcome:
        """Waits for the device, where that is not the CPU."""
        table = progress.tuner.table
        numbers = torch.cat([sums, table.flatten()]).tolist()  # one copy, one wait
        rows = [Row.of(numbers[at : at + table.shape[1]]) for at in range(len(sums), len(numbers), table.shape[1])]
        outcome = tuner.decide(
            rows,
            numbers[: len(sums)],
            [float(lr) for lr in inputs.lrs],
            inputs.settings,
            hold=inputs.hold,
            max_grad_norm=max_grad_norm,
        )
        progress.tuner = TunerState.of_rows(rows, progress.tuner.device)
        progress.steps, progress.skipped = progress.steps + outcome.applied, progress.skipped + outcome.skipped
        return outcome

    def inputs(self, progress: Progress) -> Inputs:
        """Fixes the unit, if it is time for it, and looks at the learning rates."""
        hold = not self.units.resolve(progress) or self._holds(progress)
        return Inputs(self.units.constants(progress), self._lrs(progress), hold)

    def launch(
        self,
        state: TunerState,
        sums: Tensor,
        counters: Tensor,
        inputs: Inputs,
        lrs: Sequence[float | Tensor] | Tensor,
        *,
        max_grad_norm: float | None,
    ) -> tuple[TunerState, Tensor, Tensor]:
        """See `gpu_tuner.decide`."""
        return gpu_tuner.decide(
            state,
            sums,
            counters,
            settings=inputs.settings,
            constants=self._constant(gpu_tuner.constants_of(inputs.settings), sums.device),
            lrs=lrs,
            hold=inputs.hold,
            max_grad_norm=max_grad_norm,
        )

    def _holds(self, progress: Progress) -> bool:
        """Whether the scale stays: frozen, or at a learning rate of 0, which must move nothing.

        The two rules that start with a scale above 0 take such a step as published: their warm-ups would differ.
        """
        if progress.frozen:
            return True
        obeys = self.settings.rule not in ("experiments", "optax")
        return obeys and not known_bases.ignores_a_schedule(self.base) and has_lr_zero(self.base)

    def _lrs(self, progress: Progress) -> list[float | Tensor]:
        """For each tuner where its groups' schedule stands, as a learning rate; 1 for a base without any."""
        if known_bases.ignores_a_schedule(self.base) or not any("lr" in group for group in self.base.param_groups):
            return [1.0] * len(progress.tuner)
        schedules = [Schedule(progress.lr_refs) for _ in range(len(progress.tuner))]
        for group in self.base.param_groups:
            index = progress.row_of(group) or 0
            schedules[progress.tuner_of(group)].add(group, progress.lr_refs, index)
        return [schedule.lr() for schedule in schedules]

    def _constant(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Copied to the device once."""
        key = tuple(numbers), device
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(key[0], dtype=torch.float64, device=key[1])
        return self._on_device[key]


def has_lr_zero(base: Optimizer) -> bool:
    """Whether every group has an lr of 0. One that is a tensor on a GPU is not looked at."""
    lrs = [group["lr"] for group in base.param_groups if group.get("lr") is not None]
    known = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in lrs)
    return bool(lrs) and known and all(float(lr) == 0 for lr in lrs)


def counters_of(progress: Progress) -> Tensor:
    """Steps and skipped side by side; the tuner leaves them so."""
    steps, skipped = progress.steps, progress.skipped
    if steps._base is not None and steps._base is skipped._base:
        return steps.as_strided((2,), (1,))
    return torch.stack([steps, skipped])
