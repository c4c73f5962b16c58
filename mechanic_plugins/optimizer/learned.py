"""What an optimizer has learned: one copy, replaced once the weights have moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mechanic_plugins.rule.decide import new_tuners
from mechanic_plugins.rule.schedule import Course
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["Learned", "on"]


@dataclass
class Learned:
    """The tuners, and what goes into a checkpoint with them."""

    settings: Settings
    tuners: list[Tuner]
    """Out of date while `flat` is set, but for `top_lr`: ask `wait_for_tuners`."""
    course: Course = field(default_factory=dict)
    calls: int = 0
    """How many steps were made since the run began or started over, which says which ones are measured.

    Those at a learning rate of 0 are left out, and those that were skipped unless a GPU has decided about them.
    """
    frozen: bool = False
    released: bool = False
    """Frozen for good: nothing of a parameter's shape is kept."""
    flat: Tensor | None = None
    """The tuners' numbers in a GPU's memory, if that has decided the last step."""
    captured: Tensor | None = None
    """Where a step that the user captured in a CUDA graph reads and writes `flat`: later steps leave it there."""
    entry: str | None = None
    """What the first param group must have under `saving.KEY`: something else means that state was loaded since."""
    last_sums: Sequence[float] | Tensor | None = None
    last_lrs: list[float | Tensor | None] = field(default_factory=list)
    """The sums and the groups' learning rates of the last step."""

    @classmethod
    def nothing(cls, settings: Settings, tuners: int) -> Learned:
        """Before the first step."""
        return cls(settings, new_tuners(settings, tuners))

    def wait_for_tuners(self) -> list[Tuner]:
        """The tuners as floats. Waits for the GPU if that has decided.

        Read from there each time, since a CUDA graph may have changed them.
        """
        if self.flat is not None:
            kind, n = type(self.tuners[0]), self.settings.n
            numbers, width = self.flat.tolist(), kind.width(n)
            self.tuners = [kind.of(numbers[at : at + width], n) for at in range(0, len(numbers), width)]
        return self.tuners

    def on_device(self, device: torch.device) -> Tensor:
        """The tuners' numbers in that device's memory."""
        if self.flat is None or self.flat.device != device:
            numbers = [number for tuner in self.wait_for_tuners() for number in tuner.numbers()]
            self.flat = self.placed(torch.tensor(numbers, dtype=torch.float64, device=device))
        return self.flat

    def placed(self, flat: Tensor) -> Tensor:
        """The numbers where a captured step expects them, if there is one."""
        if self.captured is None or flat is self.captured or flat.device != self.captured.device:
            return flat
        return self.captured.copy_(flat)

    def column(self, name: str, device: torch.device) -> Tensor:
        """One number of each tuner, as a float64 tensor there. Does not wait for the GPU."""
        if self.flat is None:
            return on(device, [getattr(tuner, name) for tuner in self.tuners])
        kind = type(self.tuners[0])
        return self.flat.view(-1, kind.width(self.settings.n))[:, kind.floats().index(name)]

    def lists(self, name: str, device: torch.device) -> Tensor:
        """One of a published tuner's lists, of shape (tuners, betas). Does not wait for the GPU."""
        kind, n = type(self.tuners[0]), self.settings.n
        if self.flat is None:
            numbers = [number for tuner in self.tuners for number in getattr(tuner, name)]
            return on(device, numbers).view(-1, n)
        at = len(kind.floats()) + kind.lists().index(name) * n
        return self.flat.view(-1, kind.width(n))[:, at : at + n]

    def add_tuner(self) -> None:
        """Adds a tuner for a new param group."""
        [new], tuners = new_tuners(self.settings, 1), self.wait_for_tuners()
        new.unit, new.steps, new.skipped = tuners[0].unit, tuners[0].steps, tuners[0].skipped
        self.tuners = [*tuners, new]
        self.flat = None


def on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """A few numbers as a float64 tensor on a device, without the wait that copying them there takes."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])
