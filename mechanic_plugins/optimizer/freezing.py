"""Holding the scale, with the references or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.distributed.sharding import Counting
from mechanic_plugins.optimizer.readout import Readout
from mechanic_plugins.optimizer.refusals import refuse_release
from mechanic_plugins.passes.planner import Planner

__all__ = ["Freezing", "refuse_scale_of_zero"]


class Freezing(Readout):
    """`freeze` and `unfreeze`."""

    def _start(self) -> None:
        super()._start()
        self._forget_plans()
        self.count: Callable[[Sequence[Tensor]], Counting] | None = None
        """How an engine that has cut the parameters up adds its batches up."""

    def freeze(self, *, release: bool = False) -> None:
        """Holds the scale where it is; training goes on with it.

        Args:
            release: Give the memory of the references back: from now on a step is the base's own, at scale * lr, and
                weights in 16 bits are rounded as the base alone rounds them. `unfreeze` begins with new references.

        Raises:
            ValueError: The base's updates are not proportional to lr, or an engine has views of its state.
            RuntimeError: Nothing was learned yet.
        """
        if release:
            refuse_release(self.base, by_engine=self.count is not None)
        progress = self._progress
        if not (release and progress.tuner.counts[0] == 0):  # a new one is about to load what a released one has saved
            refuse_scale_of_zero(progress)
        progress.frozen, progress.released = True, release or progress.released
        if release:
            self._begin_new_path(progress)
            checkpoint.strip((), self.state)
            self._forget_plans()  # they hold what was dropped
            self._write_tuner()

    def unfreeze(self) -> None:
        """Tunes again, from where the tuner was."""
        progress = self._progress
        was_released, progress.frozen, progress.released = progress.released, False, False
        if was_released:
            self._write_tuner()

    def _forget_plans(self) -> None:
        self._planner = Planner(self.base, self.backend, self.settings, self._slots)

    def _begin_new_path(self, progress: Progress) -> None:
        rows = progress.tuner.copied_rows()
        for row in rows:
            row.path = 0.0
        progress.tuner = progress.tuner.with_rows(rows)


def refuse_scale_of_zero(progress: Progress) -> None:
    """Nothing would train."""
    if not any(row.played > 0 for row in progress.tuner.rows):
        raise RuntimeError(
            "freeze() would hold a scale of 0, at which nothing trains: no scale was learned yet. Call it after the "
            "first three steps with a gradient."
        )
