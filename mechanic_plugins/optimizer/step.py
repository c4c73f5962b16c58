"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the algorithm, from top to bottom: the sums over all parameters of all ranks, the
decision, and the move.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mechanic_plugins.distributed.engines import refuse_unattached
from mechanic_plugins.distributed.layout import as_matrix, layout_of
from mechanic_plugins.distributed.reduction import WHOLE, Shares
from mechanic_plugins.distributed.replicas import said_by_owners
from mechanic_plugins.distributed.sharding import align_gradients, local, shares_of
from mechanic_plugins.kernels import gpu_tuner, triton_support
from mechanic_plugins.kernels.cuda import is_capturing
from mechanic_plugins.optimizer import saving
from mechanic_plugins.optimizer.learned import Learned
from mechanic_plugins.optimizer.refusals import (
    refuse_foreign,
    refuse_mixed_groups,
    refuse_overlaps,
    refuse_release,
    refuse_scale_of_zero,
    refuse_sparse,
)
from mechanic_plugins.optimizer.wrapper import IN_USE, Wrapper
from mechanic_plugins.rule.decide import Decision, clip_factor, decide, new_tuners
from mechanic_plugins.rule.default import TOO_LONG, DefaultTuner, is_due
from mechanic_plugins.rule.schedule import Course, begin, follow, has_lr_zero, scheduled_lr, with_new_top
from mechanic_plugins.rule.sums import WIDTH, Sums
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights.host_sums import batches_of_parts, sums_of
from mechanic_plugins.weights.masters import are_usable
from mechanic_plugins.weights.measurement import Measurement, median_change
from mechanic_plugins.weights.on_device import DevicePlan, can_be_told, can_fuse
from mechanic_plugins.weights.on_host import HostPlan
from mechanic_plugins.weights.plan import Closure, Entry, Group, Plan
from mechanic_plugins.weights.slots import REF, is_16_bit
from mechanic_plugins.weights.step_base import is_observed

__all__ = ["MechanicOptimizer", "is_called_by"]

_PLANS = 64
"""How many plans are kept: one for each set of parameters that moves."""
_DD = Sums._fields.index("dd")
_FAR_OFF = 100.0
"""If the second gradient is this many times as long or as short as the first, the run starts over."""


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
    """The optimizer that `mechanize` returns. Build it with `mechanize`.

    By default the scale is learned by this package's own rule, the relative rule, which has no regret bound;
    rule="paper" is Algorithm 1 of "Mechanic: A Learning Rate Tuner".
    """

    @_disable_dynamo  # torch.compile leaves the step alone: its passes, or the base's, are compiled already
    @hooked
    def step(self, closure: Closure | None = None) -> Any:
        """Steps the base at the learned scale. A step with non-finite gradients or none changes nothing.

        With `max_grad_norm`, base and tuner see clipped gradients, as if `torch.nn.utils.clip_grad_norm_` had been
        called first. The `.grad` tensors themselves may or may not be scaled afterwards.

        At a learning rate of 0 in every group, the weights and the scale stay where they are. With a published rule, a
        parameter without a gradient still follows the scale, unless its `requires_grad` is False.
        """
        had_grad, loss = torch.is_grad_enabled(), None
        torch._C._set_grad_enabled(False)  # like torch.no_grad(), which takes ten calls
        try:
            if self._dry_state is not None:
                self._leave_dry_run()
            if closure is not None:
                closure, loss = self._evaluated(closure)
            elif not self.base.state and self._is_dry_run():
                return self._make_dry_run()
            params = self._params()
            if not self._has_data:  # fake tensors: nothing to learn, but what a step allocates can be counted
                self._make_dry_run()
                return loss
            result = self._train(params, closure)
            return result if loss is None else loss
        finally:
            torch._C._set_grad_enabled(had_grad)

    def _train(self, params: Sequence[Tensor], closure: Closure | None) -> Any:
        learned, calls = self._learned, self._learned.calls
        if self._given is not None:  # an engine has decided for all ranks
            return self._plan(learned, params).move(self._given, closure) if self._given.is_made else None
        is_measured = self.is_step_measured
        plan = self._plan(learned, params, on_host=is_measured)
        shares = self._shares(params)
        reduction = shares.reduction
        if self._slots.is_default and not (plan.is_complete or shares.has_local):
            self._restart_if_layers_are_new(learned, plan)
            is_measured = self.is_step_measured
        if plan.decides_on_device:
            decision = self._decide_on_device(learned, reduction(plan.sums(learned.tuners)))
            if decision is None:
                return None
        else:
            tuners = learned.tuners if learned.flat is None else learned.wait_for_tuners()
            sums = reduction.of_floats(plan.sums(tuners))
            if tuners[0].scale == 0 and self._was_false_start(tuners, sums):
                self._forget_start(learned)
                return self._train(params, closure)
            decision = self._decide(learned, sums)
            if not decision.is_made:
                return None
        measurements = self._begin_measurement(params, shares, decision) if is_measured else []
        try:
            result = plan.move(decision, closure)
        except BaseException:
            if reduction.spans_ranks:  # the other ranks, which decide together with this one, have moved on
                learned.tuners, learned.flat = decision.tuners, decision.flat
                if is_measured:  # they wait for this rank's part
                    self._end_measurement(measurements, plan, decision)
            else:
                learned.calls = calls
            raise
        learned.tuners, learned.flat = decision.tuners, decision.flat
        if is_measured:
            self._end_measurement(measurements, plan, decision)
        if learned.flat is None and learned.captured is not None:  # replays of the graph go on from here
            learned.on_device(learned.captured.device)
        return result

    # ---------------------------------------------------------------- the decision

    def _decide(self, learned: Learned, sums: Sequence[float]) -> Decision:
        """Decides on the host. A step that is not made has been counted when this returns."""
        tuners, settings = learned.tuners, self.settings
        if tuners[0].unit == 0:
            placed = [(self._tuner_of(group), group) for group in self.base.param_groups]
            tuners = begin(tuners, placed, normalize=settings.normalize_lr)
        lrs, course, holds = self._schedule(learned, tuners)
        if lrs is None:
            scales = [tuner.scale for tuner in learned.tuners]
            return Decision(learned.tuners, False, 1.0, scales, scales)
        holds = holds or tuners[0].unit == 0
        decision = decide(tuners, sums, list(map(float, lrs)), settings, hold=holds, max_grad_norm=self._max_grad_norm)
        learned.last_sums = sums if 0 not in decision.old_scales else _without_waiting(sums, decision.old_scales)
        if learned.entry is not IN_USE:
            self._mark_in_use()
        if decision.is_made:
            learned.course, learned.calls = course, learned.calls + any(lrs)  # not at a learning rate of 0
            return decision
        for tuner, counted in zip(learned.tuners, decision.tuners, strict=True):
            tuner.skipped = counted.skipped
        if tuner.skipped > 0:
            self._warn_of_skips(int(tuner.steps), int(tuner.skipped))
        return decision

    def _warn_of_lr(self, index: int, lr: float) -> None:
        """Says once for each kind of number that no step can be made with it."""
        kind = "negative" if lr < 0 else str(lr)
        if kind not in self._odd_lrs:
            self._odd_lrs.add(kind)
            warnings.warn(
                f"the lr of param group {index} is {lr}: the step was not made, since a learning rate must be a finite "
                "number >= 0; weights, optimizer state and tuner are unchanged. Schedules that fall below 0 after "
                "their last step need a floor, as in LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)).",
                stacklevel=6,
            )

    def _decide_on_device(self, learned: Learned, sums: Tensor) -> Decision | None:
        """Decides in the GPU's memory, without waiting for it. In a skipped step the kernels write nothing."""
        lrs, course, holds = self._schedule(learned, learned.tuners)
        if lrs is None:
            return None
        flat, learned.course, learned.calls = learned.on_device(sums.device), course, learned.calls + 1
        for tuner, lr in zip(learned.tuners, lrs, strict=True):
            tuner.top_lr = max(tuner.top_lr, 0.0 if isinstance(lr, Tensor) else lr)
        new, table = gpu_tuner.launch(
            flat, sums, kind=type(learned.tuners[0]), settings=self.settings, lrs=lrs, hold=holds,
            max_grad_norm=self._max_grad_norm,
        )  # fmt: skip
        if new is flat:  # overwritten in place: the user is capturing this step
            learned.captured = flat
        learned.last_sums = sums
        if learned.entry is not IN_USE:
            self._mark_in_use()
        return Decision.on_device(learned.tuners, learned.placed(new), table)

    def _schedule(self, learned: Learned, tuners: Sequence[Tuner]) -> tuple[list[float | Tensor] | None, Course, bool]:
        """Per tuner, the position of its groups' schedule as a learning rate; the course of the groups.

        No learning rates, after a warning, if one of them is negative or not finite: no step can be made. And whether
        the scale stays as it is: frozen, or at a learning rate of 0, at which nothing must move. Two rules that start
        with a scale above 0 do take such steps, as published: their warm-ups depend on it.
        """
        groups, course, count = self.base.param_groups, learned.course, len(tuners)
        lrs = [group.get("lr") for group in groups]
        learned.last_lrs = lrs
        if Tensor in map(type, lrs):  # which a scheduler changes in place
            learned.last_lrs = [lr.detach().clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        if self._ignores_schedule or lrs.count(None) == len(lrs):
            return [1.0] * count, course, learned.frozen
        if len(groups) == 1 and 0 in course and type(lrs[0]) is float and 0 < lrs[0] < math.inf:
            return [lrs[0]], {0: (lrs[0], max(lrs[0], course[0][1]))}, learned.frozen
        odd = [(i, lr) for i, lr in enumerate(lrs) if isinstance(lr, float) and not 0 <= lr < math.inf]
        if odd:
            self._warn_of_lr(*odd[0])
            return None, course, True
        placed = [(self._place_of(group), group) for group in groups]
        course = follow(placed, course)
        parts = [[each for each in placed if count == 1 or each[0] == index] for index in range(count)]
        is_held = self.settings.rule not in ("experiments", "optax") and has_lr_zero(groups)
        positions = [scheduled_lr(part, course, tuner.top_lr) for part, tuner in zip(parts, tuners, strict=True)]
        return positions, with_new_top(course), learned.frozen or is_held

    # ---------------------------------------------------------------- the plan

    def _plan(self, learned: Learned, params: Sequence[Tensor], *, on_host: bool = False) -> Plan:
        """The plan of an earlier step with the same moving parameters, if it is still valid, else a new one."""
        by_gpu = False
        if params and not on_host and params[0].device.type in triton_support.DEVICES:
            by_gpu = self._gpu_may_decide(learned, local(params[0]).device)
        key = learned.released, by_gpu, *[id(p) for p in params if p.grad is not None or p.requires_grad]
        plan = self._plans.get(key)
        if plan is None or not plan.is_current():
            if learned.released:
                refuse_scale_of_zero(learned)
            plan = self._plans[key] = self._make_plan(learned, params, by_gpu)
            if len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def _make_plan(self, learned: Learned, params: Sequence[Tensor], by_gpu: bool) -> Plan:
        base, slots, backend = self.base, self._slots, self.backend
        entries, tuner_of = self._entries(learned, params), [self._tuner_of(group) for group in self.param_groups]
        if learned.released:
            return HostPlan(base, entries, tuner_of, slots, self.settings, keeps=False)
        fuses = backend in ("auto", "fused") and bool(entries) and can_fuse(base, entries)
        if backend == "fused" and entries and not fuses:
            raise ValueError(
                f"backend='fused' cannot step {type(base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        may_ask_gpu = by_gpu and bool(entries) and slots.are_complete(base.state, [e.param for e in entries])
        if may_ask_gpu and fuses:
            return DevicePlan(base, entries, slots, self.settings, around=None)
        device = local(params[0]).device if params else torch.device("cpu")
        uses_kernels = backend != "foreach" and triton_support.can_run(device)
        plan = HostPlan(
            base, entries, tuner_of, slots, self.settings, may_fuse=backend == "auto", uses_kernels=uses_kernels
        )
        if may_ask_gpu and plan.is_complete and can_be_told(base, entries, slots):
            return DevicePlan(base, entries, slots, self.settings, around=plan)
        return plan

    def _gpu_may_decide(self, learned: Learned, device: torch.device) -> bool:
        """Whether every tuner with trained weights has begun, on a GPU with Triton. The same on all ranks."""
        if learned.released or self._given is not None:
            return False
        may = self.backend != "foreach" and triton_support.can_run(device)
        active = {self._tuner_of(g) for g in self.param_groups if any(p.requires_grad for p in g["params"])}
        if may and not active <= self._begun:
            for index, tuner in enumerate(learned.wait_for_tuners()):
                if tuner.scale > 0 if self._slots.is_default else tuner.unit > 0:
                    self._begun.add(index)
            may = active <= self._begun
        if not may and is_capturing(device):
            raise RuntimeError(
                "the step can be captured in a CUDA graph once the scale is known: make "
                "two steps with a gradient before the capture."
            )
        return may

    def _entries(self, learned: Learned, params: Sequence[Tensor]) -> list[Entry]:
        """The parameters that take part: those with a gradient now or in an earlier step.

        Parameters with requires_grad=False stay where they are and are not counted.
        """
        weights = self._shares(params).weights if self._given is None else {}
        align_gradients(params)
        entries = []
        for group in self.param_groups:
            index = self._tuner_of(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                refuse_sparse(p)
                refuse_foreign(p, known)
                if known and not learned.released:
                    self._slots.conform(p, known)
                if p.grad is not None or (self._slots.main in known and p.requires_grad):
                    entries.append(Entry(p, group, index, weights.get(id(p), 1.0)))
        return entries

    def _shares(self, params: Sequence[Tensor]) -> Shares:
        """How these parameters are counted; found out once."""
        if self._known_shares is None or self._known_shares[0] is not params:
            self._known_shares, self._layout = (params, self._count_shares(params)), None
        return self._known_shares[1]

    def _count_shares(self, params: Sequence[Tensor]) -> Shares:
        refuse_mixed_groups(self.param_groups)
        refuse_overlaps(params)
        if self.shares_by_engine is not None:
            return self.shares_by_engine(params)
        refuse_unattached(self)
        return shares_of(params, group=self.group, sync_replicas=self.sync_replicas)

    # ---------------------------------------------------------------- closures

    def _evaluated(self, closure: Closure) -> tuple[Closure, Any]:
        """The loss, and a closure for the base that first returns this loss. Later calls recompute it or raise."""
        again = torch.enable_grad()(closure)
        loss = again()
        cached = [loss]

        def refuse() -> None:
            raise RuntimeError(
                f"max_grad_norm={self._max_grad_norm} clips the gradients that a step starts from, but "
                f"{type(self.base).__name__} evaluates the closure again within its step, and those gradients would "
                "not be clipped: leave max_grad_norm out and call torch.nn.utils.clip_grad_norm_ in the closure."
            )

        otherwise = again if self._max_grad_norm is None else refuse
        return lambda: cached.pop() if cached else otherwise(), loss

    # ---------------------------------------------------------------- how much a step changes the layers

    @property
    def is_step_measured(self) -> bool:
        """Whether the next step is one of those that the default rule measures. The same on all ranks.

        So is each one until the first measurement of a tuner whose gradients came late. A step that the user captures
        in a CUDA graph is none: measuring waits for the device.
        """
        learned = self._learned
        if not self._slots.is_default or learned.frozen:
            return False
        if not is_due(learned.calls + 1):
            unknown = [tuner for tuner in learned.tuners if tuner.scale == 0] if learned.flat is None else []
            if not any(isinstance(tuner, DefaultTuner) and tuner.waits_for_measurement for tuner in unknown):
                return False
        return not any(map(is_capturing, {local(p).device for p in self._params()}))

    def _restart_if_layers_are_new(self, learned: Learned, plan: Plan) -> None:
        """Starts the tuners over whose matrices get their first gradient late, such as a body that is unfrozen."""
        state, main = self.state, self._slots.main
        fresh = {
            entry.tuner_index
            for entry in plan.entries
            if main not in state.get(entry.param, ()) and min(as_matrix(entry.param.shape)) > 1
        }
        tuners = learned.wait_for_tuners()
        if learned.frozen or not any(tuners[index].scale > 0 for index in fresh):
            return
        learned.tuners, learned.flat, learned.calls = [tuner.copy() for tuner in tuners], None, 0
        for tuner in (learned.tuners[index] for index in fresh):
            assert isinstance(tuner, DefaultTuner)
            tuner.restart()

    def _begin_measurement(self, params: Sequence[Tensor], shares: Shares, decision: Decision) -> list[Measurement]:
        """Looks at the layers before a step that is measured; apart at those that are this rank's alone."""
        moved = [decision.old_scales[self._tuner_of(group)] > 0 for group in self.param_groups for _ in group["params"]]
        has_moved = dict(zip(map(id, params), moved, strict=True))
        common = [p for p in params if id(p) not in shares.own]
        if self._layout is None:
            self._layout = layout_of(common) if self.layout_by_engine is None else self.layout_by_engine()
        parts = [(common, self._layout, shares)]
        if shares.has_local and len(common) < len(params):
            own = [p for p in params if id(p) in shares.own]
            parts.append((own, layout_of(own), WHOLE))
        return [Measurement(self.base, *part, has_moved=[has_moved[id(p)] for p in part[0]]) for part in parts]

    def _end_measurement(self, measurements: Sequence[Measurement], plan: Plan, decision: Decision) -> None:
        """Compares the layers with what they were before the step. Absurdly long steps are taken back."""
        params = self._params()
        shares, layout, unapplied = self._shares(params), self._layout, plan.unapplied
        assert layout is not None
        plan.unapplied = {}
        tuner_of = {id(p): self._tuner_of(group) for group in self.base.param_groups for p in group["params"]}
        common = [p for p in params if id(p) not in shares.own]
        changes = measurements[0].changes(unapplied)
        owners = [tuner_of[id(common[owner])] for owner in layout.owners]
        if shares.has_local:  # each rank measures its own
            own = [p for p in params if id(p) in shares.own]
            found = [change for measurement in measurements[1:] for change in measurement.changes(unapplied)]
            for change, owner in said_by_owners([*zip(found, (tuner_of[id(p)] for p in own), strict=True)], shares):
                changes.append(change)
                owners.append(owner)
        for index in self.note_changes(changes, owners, decision):
            if self.shares_by_engine is not None:  # which holds copies of the weights
                continue
            for measurement in measurements:
                measurement.take_back(p for p in params if tuner_of[id(p)] == index)
            if self._learned.calls == 1:  # of layers that are trained from now on, nothing was known
                continue
            warnings.warn(
                f"an update of {type(self.base).__name__} was more than {TOO_LONG:.0f} times as long as those before "
                "it and was taken back: the scale uses the new length.",
                stacklevel=5,
            )

    def note_changes(
        self, changes: Sequence[tuple[float, bool]], owners: Sequence[int], decision: Decision
    ) -> list[int]:
        """Hands the tuners what the step has changed. Returns those whose step was absurdly long.

        Args:
            changes: Of each whole parameter, as `mechanic_plugins.weights.changes.Changes.after` returns them.
            owners: The index of each one's tuner.
            decision: The step's.
        """
        too_long = []
        for index, tuner in enumerate(self._learned.wait_for_tuners()):
            assert isinstance(tuner, DefaultTuner)
            mine = [change for change, owner in zip(changes, owners, strict=True) if owner == index]
            rate = float(decision.new_scales[index] or 1.0) * decision.lrs[index]
            if rate > 0 and not tuner.take_measurement(median_change(mine) / rate):
                too_long.append(index)
        return too_long

    # ---------------------------------------------------------------- starts that went wrong

    def _was_false_start(self, tuners: Sequence[Tuner], sums: Sequence[float]) -> bool:
        """Whether the only gradient so far is far longer or shorter than this one. The weights have not moved yet.

        The next step will show which of the two is the odd one. Always False if the base's state cannot be dropped,
        because it predates the first step or an engine such as DeepSpeed holds views of it.
        """
        if not self._slots.is_default or max(tuner.g_count for tuner in tuners if isinstance(tuner, DefaultTuner)) != 1:
            return False
        if self._has_history or self.shares_by_engine is not None:
            return False
        clip = 1.0 if self._max_grad_norm is None else clip_factor(sums, self._max_grad_norm)
        norms = [clip * math.sqrt(square) if square >= 0 else 0.0 for square in sums[1:-1:WIDTH]]
        firsts = [math.sqrt(tuner.g_squares) for tuner in tuners if isinstance(tuner, DefaultTuner)]
        pairs = zip(norms, firsts, strict=True)
        return any(max(a, b) > _FAR_OFF * min(a, b) > 0 for a, b in pairs if math.isfinite(a))

    def _forget_start(self, learned: Learned) -> None:
        """Starts over with this step, since the base's moments would remember the outlier."""
        self.state.clear()
        self._plans.clear()  # plans hold the state that was cleared
        skipped = learned.tuners[0].skipped
        learned.tuners, learned.course, learned.calls = new_tuners(self.settings, len(learned.tuners)), {}, 0
        for tuner in learned.tuners:
            tuner.skipped = skipped
        self._mark_in_use()

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
        learned = self._learned
        if release:
            refuse_release(self.base, by_engine=self.shares_by_engine is not None)
        tuners = learned.wait_for_tuners()
        if not (release and tuners[0].steps == 0):  # it may be about to load a released optimizer's state
            refuse_scale_of_zero(learned)
        learned.frozen, learned.released = True, release or learned.released
        if release:
            learned.flat = None
            saving.strip((), self.state)
            self._plans.clear()  # plans hold the tensors that were dropped
        self.write_tuner()

    def unfreeze(self) -> None:
        """Resumes tuning from where the tuner was."""
        learned = self._learned
        was_released, learned.frozen, learned.released = learned.released, False, False
        if was_released:  # a new run, as far as references and path go
            learned.wait_for_tuners()
            learned.flat = None
            for p in [p for p in self._params() if p in self.state]:
                self._slots.begin(p, self.state[p], has_master=False)
                if self._slots.is_default:
                    self._slots.put(p, self.state[p], REF, local(p))
            self._plans.clear()
        self.write_tuner()

    # ---------------------------------------------------------------- for engines that step part by part

    def local_sums(self, parts: Sequence[tuple[Group, Tensor, Tensor, Tensor | None]]) -> Tensor:
        """The sums for `decide`, from an engine's parts: param group, weights, gradient and what is kept for them."""
        entries = [(Entry(x, g, self._tuner_of(g), 1.0), grad, kept) for g, x, grad, kept in parts]
        batches = batches_of_parts(self.base, self._slots, entries)
        sums = sums_of(batches, self._learned.wait_for_tuners(), self.settings)
        return torch.tensor(sums, dtype=torch.float64)

    def decide(self, sums: Tensor) -> Decision:
        """Advances the tuner, given the sums over all parameters of all ranks (see `local_sums`)."""
        learned = self._learned
        learned.wait_for_tuners()
        decision = self._decide(learned, sums.tolist())
        if decision.is_made:
            learned.tuners = decision.tuners
        return decision

    @contextmanager
    def applying(self, decision: Decision) -> Iterator[None]:
        """Within this context, `step()` applies the given decision and only moves the weights."""
        self._given = decision
        try:
            yield
        finally:
            self._given = None

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0, which must leave no trace.

        A user's first step may look the same, hence the look at the caller.
        """
        return has_lr_zero(self.base.param_groups) and is_called_by("torch.distributed.checkpoint.state_dict")

    def _make_dry_run(self) -> None:
        self.base.step()
        stepped = [p for p in self._params() if p.grad is not None]
        has_masters = self._slots.is_default and are_usable(self.base, stepped)
        for p in () if self._learned.released else stepped:
            self._slots.begin(p, self.state[p], has_master=has_masters and is_16_bit(p.dtype))
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


def _without_waiting(sums: Sequence[float], old_scales: Sequence[float]) -> list[float]:
    """The sums without the squared distance of tuners that have not moved yet."""
    moved = list(sums)
    for index, scale in enumerate(old_scales):
        if scale == 0:
            moved[WIDTH * index + _DD] = 0.0
    return moved
