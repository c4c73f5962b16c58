"""Keeps an optimizer's tuner, both live and in the base's param groups, where loaders look for it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.format import holds_tuner
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core.param_state import DELTA, MASTER, REF
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import initial_state
from mechanic_plugins.distributed.sharding import local, with_real_tensors
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.slots import Slots

__all__ = ["Keeper"]

_LIVE = "_mechanic_live"
"""The base's attribute that holds the settings and tuner of the last wrapper around it."""


class Keeper:
    """The tuner of one base.

    `has_history`: whether the base had state before Mechanic's first step, created by its constructor or loaded from a
    plain run.
    """

    def __init__(
        self, base: Optimizer, settings: Settings, units: Units, slots: Slots, *, has_history: bool = True
    ) -> None:
        self.base, self.settings, self.units, self.slots = base, settings, units, slots
        self.has_history = has_history
        self.is_plain = False
        """Whether Mechanic's keys are hidden for now: see `loading_plain`."""
        self._live: Progress | None = None

    def begin(self) -> None:
        """If the base was mechanized before, continues from its live tuner, not from what was last written."""
        settings, live = vars(self.base).get(_LIVE) or (self.settings, None)
        if live is not None and live.row_of(self.base.param_groups[0]) is not None:
            checkpoint.write(self.base.param_groups, live, settings, delta_unit=self.units.of_scale(live))
        self.hold()

    def hold(self) -> None:
        """Makes the groups hold the tuner's keys, where loaders look for them."""
        groups = self.base.param_groups
        if holds_tuner(groups):  # the base has loaded a mechanized checkpoint
            checkpoint.check_tuner(groups, self.settings)
            self.write()
        else:
            self.has_history = bool(self.base.state)
            with with_real_tensors():
                self.write(Progress(initial_state(self.settings, tuners=self._tuners(), device=torch.device("cpu"))))
        self.create_eager_state()

    def forget(self) -> None:
        """Has the next use read the tuner from the param groups."""
        self._live = None

    @property
    def progress(self) -> Progress:
        """The live tuner, on the parameters' device. Reread after a load, or when the model was moved."""
        live, device = self._live, self._device()
        if live is not None and live.tuner.device != device:
            self.write(live)
            live = None
        if live is None or live.row_of(self.base.param_groups[0]) is None:
            self._live = live = self._read(device)
            vars(self.base)[_LIVE] = self.settings, live
        return live

    @property
    def unit(self) -> float:
        """What a scale of 1 is worth in the base's own updates."""
        return self.units.of_scale(self.progress)

    def _read(self, device: torch.device) -> Progress:
        """Reads the tuner. Writes it back if the settings differed, so that the warning appears once."""
        groups = self.base.param_groups
        progress, notice = checkpoint.read(groups, self.settings, tuners=self._tuners(), device=device)
        if notice is not None:
            warnings.warn(notice, stacklevel=4)
        if not progress.seen:
            self.has_history = bool(self.base.state)
        if notice is not None or not progress.seen:
            self.write(progress)
        return progress

    def write(self, progress: Progress | None = None) -> None:
        """Writes the tuner into the param groups. Synchronises with the device."""
        progress = progress or self.progress
        if not self.is_plain:
            unit = self.units.of_scale(progress)
            checkpoint.write(self.base.param_groups, progress, self.settings, delta_unit=unit)

    def _tuners(self) -> int:
        return len(self.base.param_groups) if self.settings.scope == "group" else 1

    def _device(self) -> torch.device:
        """The parameters' device, or the CPU if that one has no float64 or no data."""
        for group in self.base.param_groups:
            if group["params"]:
                device: torch.device = local(group["params"][0]).device
                return torch.device("cpu") if device.type in ("meta", "mps") else device
        return self._live.tuner.device if self._live else torch.device("cpu")  # an engine has taken the parameters out

    def create_eager_state(self) -> None:
        """For bases that fill their state when built: without DCP's dry run, a load would find no slots."""
        groups = self.base.param_groups
        if checkpoint.is_released(groups):
            return
        rows = self.progress.tuner.rows if holds_tuner(groups) else []
        for group in groups:
            for p in group["params"]:
                state = self.base.state.get(p)
                if isinstance(state, dict) and state and not {REF, DELTA} & state.keys():
                    self.slots.begin(p, state, has_master=False)
                    if rows and rows[self.progress.tuner_of(group)].played > 0 and self.slots.is_default:
                        self.slots.put(p, state, REF, local(p))

    def return_to_start(self, tuners: Collection[int]) -> None:
        """Resets the parameters of these tuners to the weights they started from."""
        for group in self.base.param_groups:
            for p in group["params"] if self.progress.tuner_of(group) in tuners else ():
                kept = self.base.state.get(p, {})
                for weights in (p, kept.get(MASTER, p)) if REF in kept else ():
                    local(weights).detach().copy_(local(kept[REF]))

    @contextmanager
    def loading_plain(self) -> Iterator[None]:
        """Hides Mechanic's state within the block. Mechanic starts over afterwards."""
        checkpoint.strip(self.base.param_groups, self.base.state)
        self.is_plain = True
        try:
            yield
        finally:
            self.is_plain = False
            self.forget()
            self.hold()

    @contextmanager
    def loading_old(self) -> Iterator[None]:
        """Gives the state the keys of version 0.1 within the block."""
        slots, self.slots = self.slots, Slots("paper", None)
        checkpoint.strip((), self.base.state)
        self.create_eager_state()
        try:
            yield
        finally:
            self.slots = slots
