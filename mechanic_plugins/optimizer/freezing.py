"""Holding the scale, with delta or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.distributed.sharding import Counting
from mechanic_plugins.optimizer.readout import Readout
from mechanic_plugins.optimizer.refusals import refuse_release
from mechanic_plugins.passes.planner import Passes
from mechanic_plugins.passes.released import ReleasedPlan

__all__ = ["Freezing"]


class Freezing(Readout):
    """`freeze` and `unfreeze`, and the plan of a step after delta was given back."""

    def _start(self) -> None:
        super()._start()
        self._passes = Passes(self.base, self.backend)
        self._released: tuple[Sequence[Tensor], ReleasedPlan] | None = None
        self.count: Callable[[Sequence[Tensor]], Counting] | None = None
        """How an engine that has cut the parameters up adds its batches up."""

    def freeze(self, *, release: bool = False) -> None:
        """Holds the scale where it is; training goes on with it.

        Args:
            release: Give the memory of delta back: from now on a step is the base's own, at scale * lr. Weights in 16
                bits are then rounded as the base alone rounds them. `unfreeze` begins a new delta.

        Raises:
            ValueError: The base's updates are not proportional to lr, or an engine has views of its state.
            RuntimeError: Nothing was learned yet.
        """
        if release:
            refuse_release(self.base, by_engine=self.count is not None)
        progress = self._progress
        if not (release and progress.steps == 0):  # a new one is about to load what a released one has saved
            _refuse_scale_of_zero(progress)
        progress.frozen, progress.released = True, release or progress.released
        if release:
            progress.tuner.column("path").zero_()  # a new delta begins a new path
            checkpoint.strip((), self.state)
            self._passes = Passes(self.base, self.backend)  # the plans hold what was dropped
            self._write_tuner()

    def unfreeze(self) -> None:
        """Tunes again, from where the tuner was."""
        progress, self._released = self._progress, None
        was_released, progress.frozen, progress.released = progress.released, False, False
        if was_released:
            self._write_tuner()

    def _released_plan(self, progress: Progress, params: Sequence[Tensor], counting: Counting) -> ReleasedPlan:
        those, plan = self._released or ((), None)
        if plan is None or those is not params or not plan.is_current():
            _refuse_scale_of_zero(progress)
            plan = ReleasedPlan(self.base, list(map(progress.tuner_of, self.param_groups)), counting.weights)
            self._released = params, plan
        return plan


def _refuse_scale_of_zero(progress: Progress) -> None:
    if not bool((progress.tuner.played > 0).any()):
        raise RuntimeError(
            "freeze() would hold a scale of 0, at which nothing trains: no scale was learned yet. Call it after the "
            "first three steps with a gradient."
        )
