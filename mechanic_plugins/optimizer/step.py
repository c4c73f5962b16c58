"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the algorithm: the sums over all parameters of all ranks, the tuner's decision, and
the base's step at the learned scale.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core.param_state import is_16_bit
from mechanic_plugins.core.relative import OUTLIER
from mechanic_plugins.core.tuner import SUMS, clip_factor
from mechanic_plugins.core.tuner_state import TunerState, initial_state
from mechanic_plugins.distributed.engines import refuse_unattached
from mechanic_plugins.distributed.reduction import Reduction
from mechanic_plugins.distributed.sharding import Counting, align_gradients, is_fake, reduction_for
from mechanic_plugins.kernels.cuda import is_capturing
from mechanic_plugins.optimizer.delegate import Group, hooked
from mechanic_plugins.optimizer.freezing import Freezing, refuse_scale_of_zero
from mechanic_plugins.optimizer.overlaps import refuse_overlaps
from mechanic_plugins.optimizer.recording import Recorder
from mechanic_plugins.optimizer.refusals import refuse_foreign, refuse_mixed_groups, refuse_sparse
from mechanic_plugins.optimizer.tuning import Tuning, has_lr_zero
from mechanic_plugins.passes.masters import are_usable
from mechanic_plugins.passes.plan import Closure, Decision, Entry, Part, Plan, Sums, add_sizes, batches_of_parts

__all__ = ["MechanicOptimizer"]


class MechanicOptimizer(Freezing):
    """What `mechanize` returns: build it there."""

    def _start(self) -> None:
        super()._start()
        self._counted: tuple[Sequence[Tensor], Counting] | None = None
        self._tuning = Tuning(self.base, self.settings, self._units)
        self._recorder = Recorder(self._tuning)
        self._decision: Decision | None = None

    @_disable_dynamo  # torch.compile leaves the step as it is: the passes are compiled already, or the base's
    @hooked
    def step(self, closure: Closure | None = None) -> Any:
        """Steps the base at the learned scale. Outliers, gradients that are not finite, or none change nothing.

        With `max_grad_norm` base and tuner see the gradients clipped, as if `torch.nn.utils.clip_grad_norm_` had come
        before. The gradients themselves are left in either state: the step scales them in place where it has to.

        At a learning rate of 0 in every group the weights and the scale stay where they are. With a published rule, a
        parameter without a gradient still follows the scale, unless its `requires_grad` is False.
        """
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad(), which takes ten calls
        try:
            return self._step(closure)
        finally:
            torch._C._set_grad_enabled(had_grad)

    def _step(self, closure: Closure | None) -> Any:
        self._leave_dry_run()
        if closure is None and self._is_dry_run():
            return self._make_dry_run()
        closure, loss = _evaluated(closure, self._refuse_second_evaluation if self.max_grad_norm is not None else None)
        params = self._params()
        if is_fake(params):  # nothing can be learned from tensors without data; what a step allocates can be counted
            self._make_dry_run()
            return loss
        result = self._train(closure, params)
        return result if loss is None else loss

    def _refuse_second_evaluation(self) -> None:
        raise RuntimeError(
            f"max_grad_norm={self.max_grad_norm} clips the gradients that a step starts from, but "
            f"{type(self.base).__name__} evaluates the closure again within its step, and those gradients would not be "
            "clipped: leave max_grad_norm out and call torch.nn.utils.clip_grad_norm_ in the closure."
        )

    def _train(self, closure: Closure | None, params: Sequence[Tensor]) -> Any:
        progress = self._progress
        by_kernel = self._leaves_to_device(progress)
        plan = self._plan(progress, params, by_kernel)
        if self._decision is not None:
            return plan.apply(self._decision, unit=self._units.of_scale(progress), closure=closure)
        reduction = self._counting(params).reduction
        if by_kernel:
            return self._train_on_device(plan, progress, reduction, closure)
        sums = self._reduced(self._sums(plan, progress), reduction)
        if self._was_false_start(sums, progress):
            self._forget_start(progress)
            return self._train(closure, params)
        before = progress.tuner
        decision = self._decide(sums, progress)
        if not decision.applied:
            return None
        with nullcontext() if reduction.spans_ranks else _restored_on_error(progress, before):
            return plan.apply(decision, unit=self._units.of_scale(progress), closure=closure)

    def _train_on_device(self, plan: Plan, progress: Progress, reduction: Reduction, closure: Closure | None) -> Any:
        """The same without waiting for it, where the base can be told there."""
        recording = self._recorder.find(
            plan, progress, max_grad_norm=self.max_grad_norm, spans_ranks=reduction.spans_ranks
        )
        is_told = plan.decides_on_device()
        sums = self._device_sums(plan, progress, is_told) if recording is None else recording.sums()
        self._last["sums"] = sums = reduction.start(sums)()
        self._note_lrs()
        if recording is not None:
            recording.play(sums, progress)
            return None
        before = progress.tuner
        decision = self._tuning.by_kernel(sums, progress, self.max_grad_norm)
        decision = decision if is_told else decision.on_host()
        is_seen = not isinstance(decision.applied, Tensor) or decision.applied.device.type == "cpu"
        if is_seen and not decision.applied and progress.tuner.counts[1] > 0:
            self._warn_of_skips(progress)
        if decision.applied is False:
            return None
        with nullcontext() if reduction.spans_ranks else _restored_on_error(progress, before):
            return plan.apply(decision, unit=self._units.of_scale(progress), closure=closure)

    def _device_sums(self, plan: Plan, progress: Progress, is_told: bool) -> Tensor:
        tuners, device = len(progress.tuner), progress.tuner.device
        if is_told:
            return plan.device_sums(tuners, device)
        return torch.tensor(plan.sums(tuners, [False] * tuners), dtype=torch.float64, device=device)

    def _leaves_to_device(self, progress: Progress) -> bool:
        device, is_free = progress.tuner.device, not progress.released
        by_kernel = is_free and self._planner.uses_kernels(device) and self._tuning.can_leave_to_device(progress)
        if is_free and not by_kernel and is_capturing(device):
            raise RuntimeError(
                "a CUDA graph of the step can be captured once the scale is known: make three steps with a gradient "
                "first, without a graph."
            )
        return by_kernel

    def _plan(self, progress: Progress, params: Sequence[Tensor], by_kernel: bool) -> Plan:
        if progress.released:
            refuse_scale_of_zero(progress)
        return self._planner.plan(
            params,
            lambda: self._entries(progress, params),
            lambda: [progress.tuner_of(group) for group in self.param_groups],
            is_released=progress.released,
            has_begun=by_kernel,
        )

    def _sums(self, plan: Plan, progress: Progress) -> Sums:
        """This rank's. The first gradients also tell how large the weights are."""
        rows, new = progress.tuner.rows, self._tuning.beginning(progress)
        sums = plan.sums(len(rows), [row.played == 0 for row in rows])
        if new:
            add_sizes(plan.batches, sums, new)
        return sums

    def _reduced(self, sums: Sums, reduction: Reduction) -> Sums:
        if not reduction.spans_ranks:
            return sums
        vector = torch.tensor(sums, dtype=torch.float64, device=self._progress.tuner.device)
        numbers: Sums = reduction.start(vector)().tolist()
        return numbers

    def _was_false_start(self, sums: Sums, progress: Progress) -> bool:
        """Whether the one gradient so far is far longer or shorter than this one. The weights have not moved yet.

        Which of the two is the odd one the next step shows. A scale by the first would be as far off as that is.

        Never for a base whose state cannot be dropped: it was there before the first step, or an engine has views of
        it. DeepSpeed's engines therefore keep such a gradient; those that call `decide` do not come here at all.
        """
        rows = progress.tuner.rows
        if self.settings.rule != "relative" or self._has_history or self.count is not None:
            return False
        if max([row.gradients for row in rows]) != 1:
            return False
        clip = clip_factor(sums, self.max_grad_norm)
        norms = [clip * math.sqrt(square) if square >= 0 else 0.0 for square in sums[1 : -1 : len(SUMS)]]
        pairs = zip(norms, [row.longest for row in rows], strict=True)
        return any(max(a, b) > OUTLIER * min(a, b) > 0 for a, b in pairs if math.isfinite(a))

    def _forget_start(self, progress: Progress) -> None:
        """Starts over with this step: the outlier would stay in the base's moments."""
        self.state.clear()
        self._forget_plans()  # they hold what was cleared
        constants, tuner = self._units.constants(progress), progress.tuner
        new = initial_state(constants, tuners=len(tuner), device=tuner.device)
        progress.tuner, progress.unit = new.with_rows(new.rows, (0.0, tuner.counts[1])), 0.0

    def _decide(self, sums: Sums, progress: Progress) -> Decision:
        self._last["sums"] = sums
        decision = self._tuning.by_floats(sums, progress, self.max_grad_norm)
        if 0 in decision.befores:
            self._last["sums"] = _without_waiting(sums, decision.befores)
        if decision.applied:
            self._note_lrs()
        elif progress.tuner.counts[1] > 0:
            self._warn_of_skips(progress)
        return decision

    def _entries(self, progress: Progress, params: Sequence[Tensor]) -> list[Entry]:
        """The parameters with a gradient, and those that had one before: they count, and may follow the scale.

        Those that a person has frozen stay where they are and are not counted.
        """
        weights = self._counting(params).weights if self._decision is None else {}
        align_gradients(params)
        entries, rows, is_kept = [], progress.tuner.rows, not progress.released
        for group in self.param_groups:
            index = progress.tuner_of(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                refuse_sparse(p)
                refuse_foreign(p, known)
                if is_kept and known:
                    self._slots.adopt(p, known, rows[index].played)
                    self._slots.conform(p, known)
                if p.grad is not None or (self._slots.main in known and p.requires_grad):
                    entries.append(Entry(p, group, index, weights.get(id(p), 1.0)))
        return entries

    def _counting(self, params: Sequence[Tensor]) -> Counting:
        if self._counted is None or self._counted[0] is not params:
            refuse_mixed_groups(self.param_groups)
            refuse_overlaps(params)
            self._counted = params, self._count(params)
        return self._counted[1]

    def _count(self, params: Sequence[Tensor]) -> Counting:
        if self.count is not None:  # an engine that has cut the parameters up knows how its batches add up
            return self.count(params)
        refuse_unattached(self)
        return reduction_for(params, group=self.group, sync_replicas=self.sync_replicas)

    # ---------------------------------------------------------------- for engines that step part by part

    def local_sums(self, parts: Sequence[tuple[Group, Tensor, Tensor, Tensor | None]]) -> Tensor:
        """What `decide` takes, of an engine's parts: param group, weights, gradient and what is kept for them."""
        progress = self._progress
        rows = progress.tuner.rows
        batches = batches_of_parts(
            self.base, [Part(g, progress.tuner_of(g), x, grad, kept) for g, x, grad, kept in parts]
        )
        sums, is_default = [0.0] * (len(SUMS) * len(rows) + 1), self._slots.is_default
        with_decay = not is_default and bool(self.settings.s_decay)
        for batch in batches:
            is_difference = is_default and rows[batch.tuner_index].played > 0
            batch.add_sums(sums, is_waiting=not is_difference, with_dx=with_decay, with_xx=with_decay)
        add_sizes(batches, sums, self._tuning.beginning(progress))
        return torch.tensor(sums, dtype=torch.float64, device=progress.tuner.device)

    def decide(self, sums: Tensor) -> Decision:
        """Lets the tuner make its step, given the sums over all parameters of all ranks (see `local_sums`)."""
        return self._decide(sums.tolist(), self._progress)

    @contextmanager
    def applying(self, decision: Decision) -> Iterator[None]:
        """Within, `step()` takes this decision and sees only to the weights."""
        self._decision = decision
        try:
            yield
        finally:
            self._decision = None

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0, which must leave no trace.

        A user's first step may look the same, so the caller counts.
        """
        return not self.state and has_lr_zero(self.base) and _is_called_by("torch.distributed.checkpoint.state_dict")

    def _make_dry_run(self) -> None:
        self.base.step()
        stepped = [p for p in self._params() if p.grad is not None]
        coarse = [p for p in stepped if is_16_bit(p.dtype)]
        has_masters = self._slots.is_default and bool(coarse) and are_usable(self.base, coarse)
        for p in () if checkpoint.is_released(self.param_groups) else stepped:
            self._slots.begin(p, self.state[p], has_master=has_masters and is_16_bit(p.dtype))
        self._dry_state = self.state

    def _leave_dry_run(self) -> None:
        """If no state was loaded after the dry run, drop what it made: Adam would count it as a step."""
        if self._dry_state is not None and self._dry_state is self.state:
            self.state.clear()
        self._dry_state = None


def _is_called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _without_waiting(sums: Sums, befores: Sequence[float]) -> Sums:
    """An update that waits for its scale has moved nothing."""
    moved = list(sums)
    for index, before in enumerate(befores):
        if before == 0:
            moved[len(SUMS) * index + SUMS.index("dd")] = 0.0
    return moved


def _evaluated(closure: Closure | None, refuse: Closure | None) -> tuple[Closure | None, Any]:
    """The loss, and a closure for the base whose first call returns it; another one computes it again, or refuses."""
    if closure is None:
        return None, None
    again = torch.enable_grad()(closure)
    loss = again()
    cached = [loss]
    return lambda: cached.pop() if cached else (refuse or again)(), loss


@contextmanager
def _restored_on_error(progress: Progress, before: TunerState) -> Iterator[None]:
    """The tuner, where the base raises. Not where ranks decide together: those that do not fail have moved on."""
    try:
        yield
    except BaseException:
        progress.tuner = before
        raise
