"""The learning rate that delta is measured in.

With `normalize_lr` a base of lr 1e-3 and one of lr 10 learn the same run: constants are stated for an lr of 1, and the
base is stepped at lr / unit, where the unit is its peak learning rate at the first applied step.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.kernels.cuda import is_capturing

__all__ = ["Units"]

Group = dict[str, Any]


class Units:
    """Of one base with its settings. The unit itself is in `Progress`, and so in checkpoints."""

    def __init__(self, base: Optimizer, settings: Settings) -> None:
        self.base, self.settings = base, settings
        self._is_linear = known_bases.is_linear_in_lr(base)

    def resolve(self, progress: Progress) -> bool:
        """Fixes the unit at the first applied step with a learning rate above 0; False before that.

        A GPU decides by itself whether a step is applied. The unit therefore stands until the learning rate turns out
        to be another one in the next step, and is only then checked. An lr that is a tensor on a GPU is read once.
        """
        is_settled = progress.unit_since is None or is_capturing(progress.steps.device)
        if progress.unit > 0 and (is_settled or any(map(_has_lr_on_device, self.base.param_groups))):
            return True
        peak = max(map(_peak_lr, self.base.param_groups)) if self.settings.normalize_lr else 1.0
        if progress.unit != peak:
            self.settle(progress)
        if progress.unit == 0 and peak > 0:
            progress.unit, progress.unit_since = peak, progress.steps.clone()
            self._note_peaks(progress)
        return progress.unit > 0

    def _note_peaks(self, progress: Progress) -> None:
        """The highest lr of a schedule, where its groups say so: a warm-up is then a warm-up."""
        highest = progress.tuner.column("lr")
        for group in self.base.param_groups:
            lrs = [group.get(key) for key in ("lr", "initial_lr", "max_lr")]
            known = max(float(lr) for lr in lrs if lr is not None) if any(lr is not None for lr in lrs) else 1.0
            highest[progress.tuner_of(group)].clamp_(min=known)

    def settle(self, progress: Progress) -> None:
        """Takes the unit back if no step was applied with it. Synchronises with the device, once in a run."""
        since, progress.unit_since = progress.unit_since, None
        if since is not None and not bool(progress.steps > since):
            progress.unit = 0.0
            progress.tuner.column("lr").zero_()

    def of_delta(self, progress: Progress) -> float:
        """What one unit of delta is worth in the base's own updates."""
        return (progress.unit or 1.0) if self._is_linear else 1.0

    def constants(self, progress: Progress) -> Settings:
        """The settings, which are stated for a base lr of 1, in the units of delta."""
        return _at_unit(self.settings, progress.unit or 1.0, self.of_delta(progress))


@functools.lru_cache(maxsize=64)
def _at_unit(settings: Settings, unit: float, delta_unit: float) -> Settings:
    if delta_unit != unit:
        settings = settings.at_lr(unit)
    return settings if settings.max_scale is None else replace(settings, max_scale=settings.max_scale * delta_unit)


def _has_lr_on_device(group: Group) -> bool:
    lr = group.get("initial_lr", group.get("lr"))
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _peak_lr(group: Group) -> float:
    lr = group.get("initial_lr", group.get("lr"))
    return 1.0 if lr is None else float(lr)
