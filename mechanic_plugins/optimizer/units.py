"""The learning rate that a scale of 1 stands for.

With `normalize_lr`, a base with lr 1e-3 and one with lr 10 train identically: constants are stated for an lr of 1, and
the unit is the base's peak learning rate at the first applied step. The base is stepped at scale * lr / unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.row import Row
from mechanic_plugins.core.settings import Settings

__all__ = ["Units"]

Group = dict[str, Any]


class Units:
    """Unit conversions for one base. The unit itself is in `Progress`, and therefore in checkpoints."""

    def __init__(self, base: Optimizer, settings: Settings) -> None:
        self.base, self.settings = base, settings
        self._is_linear = known_bases.is_linear_in_lr(type(base))
        self._constants: tuple[float, Settings] = (0.0, settings)

    def resolve(self, progress: Progress, rows: Sequence[Row]) -> bool:
        """Fixes the unit at the first learning rate above 0; False before that.

        The rows also get the schedule's highest lr if the groups know it, so that a warm-up is recognised as one.
        """
        if progress.unit > 0:
            return True
        progress.unit = max(map(_peak_lr, self.base.param_groups)) if self.settings.normalize_lr else 1.0
        if progress.unit == 0:
            return False
        for group in self.base.param_groups:
            row = rows[progress.tuner_of(group)]
            row.lr = max(row.lr, _highest_lr(group))
        return True

    def of_scale(self, progress: Progress) -> float:
        """How many of the base's own updates a scale of 1 is worth."""
        return (progress.unit or 1.0) if self._is_linear else 1.0

    def constants(self, progress: Progress) -> Settings:
        """The settings, stated for a base lr of 1, converted to units of the scale."""
        unit = progress.unit or 1.0
        if self._constants[0] != unit:
            self._constants = unit, _at_unit(self.settings, unit, self.of_scale(progress))
        return self._constants[1]


def _at_unit(settings: Settings, unit: float, of_scale: float) -> Settings:
    if of_scale != unit:
        settings = settings.at_lr(unit)
    return settings if settings.max_scale is None else replace(settings, max_scale=settings.max_scale * of_scale)


def _peak_lr(group: Group) -> float:
    lr = group.get("initial_lr", group.get("lr"))
    return 1.0 if lr is None else float(lr)


def _highest_lr(group: Group) -> float:
    lrs = [group[key] for key in ("lr", "initial_lr", "max_lr") if group.get(key) is not None]
    return max(map(float, lrs)) if lrs else 1.0
