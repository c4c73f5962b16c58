"""Lets the tuner take its step, by torch operations or on a GPU in one launch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases, tuner
from mechanic_plugins.core.schedule import Schedule
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import TunerState, column
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.kernels.cuda import Habit, is_capturing
from mechanic_plugins.kernels.recorded_tuner import RecordedTuner
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.plan import Decision

__all__ = ["Decider", "Inputs", "counters_of", "has_lr_zero"]

_log = logging.getLogger(__name__)


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
        self._habit, self._can_record = Habit(), True
        self._recorded: RecordedTuner | None = None

    def decide(
        self, sums: Tensor, progress: Progress, *, by_kernel: bool, max_grad_norm: float | None = None
    ) -> Decision:
        """Moves `progress` on. `Decision.applied` is a tensor: nothing here synchronises with the device."""
        before, known = progress.tuner.played, (dict(progress.lr_refs), progress.unit, progress.unit_since)
        inputs, table = self.inputs(progress), None
        state, counters = progress.tuner, counters_of(progress)
        if by_kernel:
            outcome, table = self.launch(state, sums, counters, inputs, inputs.lrs, max_grad_norm=max_grad_norm)
        else:
            outcome = self._by_operations(state, sums, counters, inputs, max_grad_norm=max_grad_norm)
        progress.tuner = outcome.state
        progress.steps, progress.skipped = outcome.counters.unbind()
        if sums.device.type == "cpu" and not outcome.applied:  # a skipped step leaves no trace
            progress.lr_refs, progress.unit, progress.unit_since = known
        if table is not None:
            return Decision(outcome.applied, table[:, 0], table[:, 1], table[:, 3], outcome.clip, packed=table)
        after, factor = outcome.state.played[:, 0], outcome.delta_factor[:, 0]
        return Decision(outcome.applied, before[:, 0], after, factor, outcome.clip, progress.steps)

    def _by_operations(
        self, state: TunerState, sums: Tensor, counters: Tensor, inputs: Inputs, *, max_grad_norm: float | None
    ) -> tuner.Outcome:
        settings, lrs, hold = inputs
        how: dict[str, Any] = {"settings": settings, "hold": hold, "max_grad_norm": max_grad_norm}
        how["betas"] = self._constant(settings.betas, sums.device)
        recorded = self._recorded_tuner(state, sums, counters, inputs, how)
        if recorded is not None:
            return recorded.decide(state, sums, counters, [float(lr) for lr in lrs])
        return tuner.decide(state, sums, counters, lr=column(lrs, sums.device), **how)

    def _recorded_tuner(
        self, state: TunerState, sums: Tensor, counters: Tensor, inputs: Inputs, how: dict[str, Any]
    ) -> RecordedTuner | None:
        """On a GPU, once nothing but data has changed for some steps."""
        device = sums.device
        if device.type != "cuda" or is_capturing(device) or any(isinstance(lr, Tensor) for lr in inputs.lrs):
            return None
        key = inputs.settings, inputs.hold, how["max_grad_norm"], len(inputs.lrs), device
        if self._recorded is None or self._recorded.key != key:
            self._recorded = None
            if self._can_record and self._habit.has(key):
                try:
                    self._recorded = RecordedTuner(key, state, sums, counters, **how)
                except RuntimeError as error:
                    _log.info("the tuner is not recorded as a CUDA graph: %s", error)
                    self._can_record = False
        return self._recorded

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
    ) -> tuple[tuner.Outcome, Tensor]:
        """See `gpu_tuner.decide`."""
        return gpu_tuner.decide(
            state,
            sums,
            counters,
            settings=inputs.settings,
            betas=self._constant(inputs.settings.betas, sums.device),
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
        obeys = self.settings.rule in ("optimistic", "paper", "theory")
        return obeys and not known_bases.ignores_a_schedule(self.base) and has_lr_zero(self.base)

    def _lrs(self, progress: Progress) -> list[float | Tensor]:
        """For each tuner where its groups' schedule stands, as a learning rate; 0 for a base that ignores one."""
        schedules = [Schedule(progress.lr_refs) for _ in range(len(progress.tuner.s))]
        if not known_bases.ignores_a_schedule(self.base):
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
