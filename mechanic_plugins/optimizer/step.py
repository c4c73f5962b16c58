"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the algorithm: the sums over all parameters of all ranks, the tuner's decision, and
the base's step at the learned scale.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core.param_state import is_16_bit
from mechanic_plugins.core.relative import FAR, OUTLIER, restart
from mechanic_plugins.core.row import Row
from mechanic_plugins.core.tuner import SUMS, Decision, clip_factor
from mechanic_plugins.core.tuner_state import TunerState, initial_state
from mechanic_plugins.distributed.engines import refuse_unattached
from mechanic_plugins.distributed.reduction import Reduction, Shares
from mechanic_plugins.distributed.sharding import align_gradients, shares_of
from mechanic_plugins.kernels.cuda import is_capturing
from mechanic_plugins.optimizer.interface import Group, Wrapper
from mechanic_plugins.optimizer.overlaps import refuse_overlaps
from mechanic_plugins.optimizer.refusals import (
    refuse_foreign,
    refuse_mixed_groups,
    refuse_release,
    refuse_scale_of_zero,
    refuse_sparse,
)
from mechanic_plugins.optimizer.tuning import has_lr_zero
from mechanic_plugins.passes.base_step import is_observed
from mechanic_plugins.passes.masters import are_usable
from mechanic_plugins.passes.plan import Batch, Closure, Entry, Plan, Sums, add_sizes, batches_of_parts, sums_of

__all__ = ["MechanicOptimizer", "is_called_by"]


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what torch puts around a step: a mark for schedulers, and hooks and profiling if they are in use.

    Profiling alone costs the host more than launching a whole step on a GPU.
    """
    marked = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_opt_called"] = True
        return (marked if is_observed(self) else step)(self, *args, **kwargs)

    # keeps torch from wrapping it again
    wrapper.hooked = wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return wrapper


class MechanicOptimizer(Wrapper):
    """The optimizer that `mechanize` returns. Build it with `mechanize`."""

    @_disable_dynamo  # torch.compile leaves the step alone: its passes, or the base's, are compiled already
    @hooked
    def step(self, closure: Closure | None = None) -> Any:
        """Steps the base at the learned scale. A step with outliers, non-finite gradients or none changes nothing.

        With `max_grad_norm`, base and tuner see clipped gradients, as if `torch.nn.utils.clip_grad_norm_` had been
        called first. The `.grad` tensors themselves may or may not be scaled afterwards.

        At a learning rate of 0 in every group, the weights and the scale stay where they are. With a published rule, a
        parameter without a gradient still follows the scale, unless its `requires_grad` is False.
        """
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # like torch.no_grad(), which takes ten calls
        try:
            if self._dry_state is not None:
                self._leave_dry_run()
            if closure is None and not self.base.state and self._is_dry_run():
                return self._make_dry_run()
            loss = None
            if closure is not None:
                closure, loss = self._evaluated(closure)
            params = self._params()
            if self._has_data:
                result = self._train(closure, params)
                return result if loss is None else loss
            self._make_dry_run()  # nothing to learn, but what a step allocates can be counted
            return loss
        finally:
            torch._C._set_grad_enabled(had_grad)

    def _evaluated(self, closure: Closure) -> tuple[Closure, Any]:
        """The loss, and a closure for the base that first returns this loss. Later calls recompute it or raise."""
        again = torch.enable_grad()(closure)
        loss = again()
        cached = [loss]
        otherwise = again if self.max_grad_norm is None else self._refuse_second_evaluation
        return lambda: cached.pop() if cached else otherwise(), loss

    def _refuse_second_evaluation(self) -> None:
        raise RuntimeError(
            f"max_grad_norm={self.max_grad_norm} clips the gradients that a step starts from, but "
            f"{type(self.base).__name__} evaluates the closure again within its step, and those gradients would not be "
            "clipped: leave max_grad_norm out and call torch.nn.utils.clip_grad_norm_ in the closure."
        )

    def _train(self, closure: Closure | None, params: Sequence[Tensor]) -> Any:
        progress = self._keeper.progress
        by_kernel = self._leaves_to_device(progress)
        plan = self._plan(progress, params, by_kernel)
        if self._decision is not None:
            return plan.apply(self._decision, unit=self._keeper.unit, closure=closure)
        reduction, before = self._shares(params).reduction, progress.tuner
        if by_kernel:
            decision = self._decide_on_device(plan, progress, reduction)
        else:
            new = self._tuning.beginning(before.rows)
            sums = self._sums(plan, before, reduction, new)
            if new and self._was_false_start(sums, before.rows):
                self._forget_start(progress)
                return self._train(closure, params)
            decision = self._decide(sums, progress)
        if decision is None or decision.applied is False:
            return None
        try:
            result = plan.apply(decision, unit=self._tuning.units.of_scale(progress), closure=closure)
        except BaseException:
            if not reduction.spans_ranks:  # with ranks that decide together, the others have moved on
                progress.tuner = before
            raise
        if not by_kernel and self.shares_by_engine is None and self._tuning.may_jump(progress):
            self._undo_jump(params, progress, before, reduction)
        return result

    def _decide_on_device(self, plan: Plan, progress: Progress, reduction: Reduction) -> Decision | None:
        """Does not wait for the device if the base can be told there. None if a recording has made the step."""
        recording = self._recorder.find(
            plan, progress, max_grad_norm=self.max_grad_norm, spans_ranks=reduction.spans_ranks
        )
        is_told = plan.decides_on_device()
        sums = self._device_sums(plan, progress, is_told) if recording is None else recording.sums()
        self._last["sums"] = sums = reduction(sums)
        self._note_lrs()
        if recording is not None:
            recording.play(sums, progress)
            return None
        decision = self._tuning.by_kernel(sums, progress, self.max_grad_norm)
        decision = decision if is_told else decision.on_host()
        is_seen = not isinstance(decision.applied, Tensor) or decision.applied.device.type == "cpu"
        if is_seen and not decision.applied and progress.tuner.counts[1] > 0:
            self._warn_of_skips(progress)
        return decision

    def _device_sums(self, plan: Plan, progress: Progress, is_told: bool) -> Tensor:
        tuners, device = len(progress.tuner), progress.tuner.device
        if is_told:
            return plan.device_sums(tuners, device)
        return torch.tensor(sums_of(plan.batches, [False] * tuners), dtype=torch.float64, device=device)

    def _leaves_to_device(self, progress: Progress) -> bool:
        device, is_free = progress.tuner.device, not progress.released
        by_kernel = is_free and self._planner.uses_kernels(device) and self._tuning.can_leave_to_device(progress)
        if is_free and not by_kernel and is_capturing(device):
            raise RuntimeError(
                "the step can be captured in a CUDA graph once the scale is known: make "
                f"{self._tuning.before_kernels} steps with a gradient before the capture."
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

    def _sums(self, plan: Plan, tuner: TunerState, reduction: Reduction, new: Mapping[int, bool]) -> Sums:
        """The global sums. The first gradients of new tuners also measure the size of the weights."""
        sums = self._local_sums(plan.batches, tuner.rows, new)
        if not reduction.spans_ranks:
            return sums
        numbers: Sums = reduction(torch.tensor(sums, dtype=torch.float64, device=tuner.device)).tolist()
        return numbers

    def _local_sums(self, batches: Sequence[Batch], rows: Sequence[Row], new: Mapping[int, bool]) -> Sums:
        """This rank's sums. With a published rule every tuner is `waiting`: delta is stored, not a reference."""
        is_default = self._keeper.slots.is_default
        waiting = [not is_default or row.played == 0 for row in rows]
        sums = sums_of(batches, waiting, with_decay=bool(self.settings.s_decay))
        if new:
            add_sizes(batches, sums, new)
        return sums

    def _was_false_start(self, sums: Sums, rows: Sequence[Row]) -> bool:
        """Whether the only gradient so far is far longer or shorter than this one. The weights have not moved yet.

        The next step will show which of the two is the odd one. Always False if the base's state cannot be dropped,
        because it predates the first step or an engine such as DeepSpeed holds views of it.
        """
        if self._keeper.has_history or self.shares_by_engine is not None:
            return False
        if max([row.gradients for row in rows]) != 1:
            return False
        clip = clip_factor(sums, self.max_grad_norm)
        norms = [clip * math.sqrt(square) if square >= 0 else 0.0 for square in sums[1 : -1 : len(SUMS)]]
        pairs = zip(norms, [row.longest for row in rows], strict=True)
        return any(max(a, b) > OUTLIER * min(a, b) > 0 for a, b in pairs if math.isfinite(a))

    def _forget_start(self, progress: Progress) -> None:
        """Starts over with this step, since the base's moments would remember the outlier."""
        self.state.clear()
        self._planner.forget()  # plans hold the state that was cleared
        constants, tuner = self._tuning.units.constants(progress), progress.tuner
        new = initial_state(constants, tuners=len(tuner), device=tuner.device)
        progress.tuner, progress.unit = new.with_rows(new.rows, (0.0, tuner.counts[1])), 0.0

    def _undo_jump(self, params: Sequence[Tensor], progress: Progress, was: TunerState, reduction: Reduction) -> None:
        """Puts the weights back to where they began if this step was absurdly long. The base keeps its state."""
        sums = self._sums(self._plan(progress, params, False), progress.tuner, reduction, {})
        rows, dds = [row.copy() for row in progress.tuner.rows], sums[SUMS.index("dd") : -1 : len(SUMS)]
        lost = [index for index, (row, dd) in enumerate(zip(rows, dds, strict=True)) if restart(row, dd)]
        if not lost:
            return
        progress.tuner = progress.tuner.with_rows(rows, was.counts)
        self._keeper.return_to_start(lost)
        warnings.warn(
            f"an update of {type(self.base).__name__} was more than {FAR:.0f} times as long as those before it and "
            "was dropped: the weights are back where they started, and the scale uses the new length.",
            stacklevel=4,
        )

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
        """The parameters that take part: those with a gradient now or in an earlier step.

        Parameters with requires_grad=False stay where they are and are not counted.
        """
        weights = self._shares(params).weights if self._decision is None else {}
        align_gradients(params)
        entries, rows, is_kept = [], progress.tuner.rows, not progress.released
        for group in self.param_groups:
            index = progress.tuner_of(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                refuse_sparse(p)
                refuse_foreign(p, known)
                if is_kept and known:
                    self._keeper.slots.adopt(p, known, rows[index].played)
                    self._keeper.slots.conform(p, known)
                if p.grad is not None or (self._keeper.slots.main in known and p.requires_grad):
                    entries.append(Entry(p, group, index, weights.get(id(p), 1.0)))
        return entries

    def _shares(self, params: Sequence[Tensor]) -> Shares:
        if self._known_shares is None or self._known_shares[0] is not params:
            refuse_mixed_groups(self.param_groups)
            refuse_overlaps(params)
            if self.shares_by_engine is None:
                refuse_unattached(self)
                shares = shares_of(params, group=self.group, sync_replicas=self.sync_replicas)
            else:
                shares = self.shares_by_engine(params)
            self._known_shares = params, shares
        return self._known_shares[1]

    def _note_lrs(self) -> None:
        """Remembers this step's lrs: a scheduler may change them before `effective_lrs` is read."""
        self._last["lrs"] = [
            lr.detach().clone() if isinstance(lr := dict.get(group, "lr"), Tensor) else lr
            for group in self.base.param_groups
        ]

    # ---------------------------------------------------------------- holding the scale

    def freeze(self, *, release: bool = False) -> None:
        """Holds the scale at its current value; training continues with it.

        Args:
            release: Free the memory of the references as well. From now on a step is the base's own at scale * lr, and
                16-bit weights are rounded as by the base alone. `unfreeze` starts with new references.

        Raises:
            ValueError: The base's updates are not proportional to lr, or an engine holds views of its state.
            RuntimeError: No scale has been learned yet.
        """
        if release:
            refuse_release(self.base, by_engine=self.shares_by_engine is not None)
        progress = self._keeper.progress
        if not (release and progress.tuner.counts[0] == 0):  # it may be about to load a released optimizer's state
            refuse_scale_of_zero(progress)
        progress.frozen, progress.released = True, release or progress.released
        if release:
            rows = [row.copy() for row in progress.tuner.rows]
            for row in rows:
                row.path = 0.0  # new references start a new path
            progress.tuner = progress.tuner.with_rows(rows)
            checkpoint.strip((), self.state)
            self._planner.forget()  # plans hold the tensors that were dropped
            self._keeper.write()

    def unfreeze(self) -> None:
        """Resumes tuning from where the tuner was."""
        progress = self._keeper.progress
        was_released, progress.frozen, progress.released = progress.released, False, False
        if was_released:
            self._keeper.write()

    # ---------------------------------------------------------------- for engines that step part by part

    def local_sums(self, parts: Sequence[tuple[Group, Tensor, Tensor, Tensor | None]]) -> Tensor:
        """The sums for `decide`, from an engine's parts: param group, weights, gradient and the reference or delta."""
        progress = self._keeper.progress
        rows = progress.tuner.rows
        entries = [(Entry(x, g, progress.tuner_of(g), 1.0), grad, kept) for g, x, grad, kept in parts]
        batches = batches_of_parts(self.base, entries)
        sums = self._local_sums(batches, rows, self._tuning.beginning(rows))
        return torch.tensor(sums, dtype=torch.float64, device=progress.tuner.device)

    def decide(self, sums: Tensor) -> Decision:
        """Advances the tuner, given the sums over all parameters of all ranks (see `local_sums`)."""
        return self._decide(sums.tolist(), self._keeper.progress)

    @contextmanager
    def applying(self, decision: Decision) -> Iterator[None]:
        """Within this context, `step()` applies the given decision and only moves the weights."""
        self._decision = decision
        try:
            yield
        finally:
            self._decision = None

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0, which must leave no trace.

        A user's first step may look the same, hence the look at the caller.
        """
        return has_lr_zero(self.base) and is_called_by("torch.distributed.checkpoint.state_dict")

    def _make_dry_run(self) -> None:
        self.base.step()
        stepped = [p for p in self._params() if p.grad is not None]
        has_masters = self._keeper.slots.is_default and are_usable(self.base, stepped)
        for p in () if checkpoint.is_released(self.param_groups) else stepped:
            self._keeper.slots.begin(p, self.state[p], has_master=has_masters and is_16_bit(p.dtype))
        self._dry_state = self.state

    def _leave_dry_run(self) -> None:
        """Drops the dry run's state if none was loaded after it: Adam would count it as a step."""
        if self._dry_state is self.base.state:
            self.base.state.clear()
        self._dry_state = None


def is_called_by(module: str) -> bool:
    """Whether a function of that module is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _without_waiting(sums: Sums, befores: Sequence[float]) -> Sums:
    """The sums without the squared distance of tuners that have not moved yet."""
    moved = list(sums)
    for index, before in enumerate(befores):
        if before == 0:
            moved[len(SUMS) * index + SUMS.index("dd")] = 0.0
    return moved
