"""Records a step's launches as CUDA graphs and replays them while nothing but data changes.

The host then launches one graph per step instead of several kernels; two if ranks reduce their sums in between.
Everything the launches read is on the device: a table with the addresses of the tensors, cells with the learning
rates, and the tuner's row. Everything else they depend on is in a key; a step with another key is launched kernel by
kernel, as the first steps are.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.kernels.cuda import Habit, captured, is_capturing
from mechanic_plugins.kernels.table import Mailbox
from mechanic_plugins.optimizer.tuning import Inputs, Tuning
from mechanic_plugins.passes.fused import FusedPlan
from mechanic_plugins.passes.plan import Plan

__all__ = ["Recorder", "Recording"]

_log = logging.getLogger(__name__)


class Recorder:
    """Records the steps of one optimizer, plan by plan."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._habit = Habit()
        self._can_record = True

    def find(
        self, plan: Plan, progress: Progress, *, max_grad_norm: float | None, spans_ranks: bool
    ) -> Recording | None:
        """The recording for this step, ready to be played, or None if the kernels have to be launched."""
        if not (self._can_record and isinstance(plan, FusedPlan) and _is_on_one_gpu(plan, progress)):
            return None
        inputs, unit = self._tuning.inputs(progress, ()), self._tuning.units.of_scale(progress)
        lrs = _numbers([*inputs.lrs, *(batch.group["lr"] for batch in plan.batches)])
        if lrs is None:
            return None
        key = plan.launch_key(), inputs.settings, inputs.hold, unit, len(inputs.lrs), max_grad_norm, spans_ranks
        recording = plan.recording if isinstance(plan.recording, Recording) else None
        if recording is None or recording.key != key:
            if not self._habit.has((id(plan), key)):
                return None
            recording = plan.recording = self._record(plan, key, inputs, progress, max_grad_norm, spans_ranks)
        if recording is not None:
            tuners = len(inputs.lrs)
            recording.lrs.write([*lrs[:tuners], *(lr / unit for lr in lrs[tuners:])])
        return recording

    def _record(self, plan: FusedPlan, key: Any, *made_with: Any) -> Recording | None:
        try:
            return Recording(plan, key, *made_with)
        except RuntimeError as error:
            _log.info("steps are not recorded as CUDA graphs: %s", error)
            self._can_record = False
            return None


class LearningRates:
    """The learning rates of the tuners and of the batches, on the device.

    Each batch's cell is aligned to 16 bytes, like a tensor of its own: the kernels were compiled for that.
    """

    def __init__(self, tuners: int, batches: int, device: torch.device) -> None:
        odd = tuners % 2
        self._packed = struct.Struct(f"{tuners}d{8 * odd}x" + "d8x" * batches).pack
        cells = torch.zeros(tuners + odd + 2 * batches, dtype=torch.float64, device=device)
        self.of_tuners, self.of_batches = cells[:tuners], cells[tuners + odd :: 2].unbind()
        self._mailbox = Mailbox(cells)
        self._there: Sequence[float] = ()

    def write(self, lrs: Sequence[float]) -> None:
        """Sends the learning rates, the tuners' first."""
        if lrs != self._there:
            self._mailbox.send(self._packed(*lrs))
            self._there = lrs


class Recording:
    """The recorded launches of a plan's step, valid for one key."""

    def __init__(
        self,
        plan: FusedPlan,
        key: Any,
        inputs: Inputs,
        progress: Progress,
        max_grad_norm: float | None,
        spans_ranks: bool,
    ) -> None:
        self.key, self._plan = key, weakref.ref(plan)
        device, tuners = progress.tuner.device, len(inputs.lrs)
        self._row = progress.tuner.flat.clone()
        """The tuner's memory, which the graph reads and writes."""
        self.lrs = LearningRates(tuners, len(plan.batches), device)

        def sum_up() -> Tensor:
            return plan.device_sums(tuners, device)

        def move(sums: Tensor) -> Tensor:
            given = inputs._replace(lrs=self.lrs.of_tuners)._asdict()
            state, scales = gpu_tuner.launch(
                progress.tuner.with_flat(self._row), sums, **given, max_grad_norm=max_grad_norm
            )
            for batch, lr in zip(plan.batches, self.lrs.of_batches, strict=True):
                batch.apply(scales, lr)
            if state.flat is not self._row:
                self._row.copy_(state.flat)
            return sums

        self._before: torch.cuda.CUDAGraph | None = None
        """Computes the sums, if ranks have to reduce them; otherwise they are part of the other graph."""
        if spans_ranks:
            self._before, self._sums = captured(sum_up, device)
            self._after, _ = captured(lambda: move(self._sums), device)
        else:
            self._after, self._sums = captured(lambda: move(sum_up()), device)

    def sums(self) -> Tensor:
        """This rank's sums, valid until the next step. Pass them to `play`, which may still have to compute them."""
        if self._before is not None:
            self._before.replay()
        return self._sums

    def play(self, sums: Tensor, progress: Progress) -> None:
        """Decides and moves the weights."""
        if sums is not self._sums:
            self._sums.copy_(sums)
        if progress.tuner.flat is not self._row:
            self._row.copy_(progress.tuner.flat)
        self._after.replay()
        progress.tuner = progress.tuner.with_flat(self._row)
        plan = self._plan()
        assert plan is not None
        plan.finish()


def _is_on_one_gpu(plan: FusedPlan, progress: Progress) -> bool:
    device = progress.tuner.device
    if device.type != "cuda" or is_capturing(device):
        return False
    return all(batch.device == device for batch in plan.batches)


def _numbers(lrs: Sequence[float | Tensor]) -> list[float] | None:
    """The learning rates as floats, or None if one is a tensor, which its owner may replace."""
    return None if any(isinstance(lr, Tensor) for lr in lrs) else [float(lr) for lr in lrs]
