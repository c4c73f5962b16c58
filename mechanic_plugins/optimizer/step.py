"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the algorithm: the sums over all parameters of all ranks, the tuner's
decision, the base's step and Mechanic's move.
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
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, REF, ParamState
from mechanic_plugins.core.relative import BEGINNING, OUTLIER
from mechanic_plugins.core.tuner import SUMS, clip_factor
from mechanic_plugins.core.tuner_state import initial_state
from mechanic_plugins.distributed.engines import refuse_unattached
from mechanic_plugins.distributed.reduction import Identity
from mechanic_plugins.distributed.sharding import (
    Counting,
    align_gradients,
    is_fake,
    local,
    reduction_for,
)
from mechanic_plugins.kernels.cuda import is_capturing
from mechanic_plugins.kernels.sizes import add_sizes, make_room
from mechanic_plugins.optimizer.decider import Decider, has_lr_zero
from mechanic_plugins.optimizer.delegate import Group, hooked
from mechanic_plugins.optimizer.freezing import Freezing
from mechanic_plugins.optimizer.overlaps import refuse_overlaps
from mechanic_plugins.optimizer.recording import Recorder, Recording
from mechanic_plugins.optimizer.refusals import refuse_foreign, refuse_mixed_groups, refuse_sparse
from mechanic_plugins.passes.deltas import complete, conform
from mechanic_plugins.passes.plan import Closure, Decision, Entry, Plan
from mechanic_plugins.passes.planner import Passes

__all__ = ["MechanicOptimizer"]


class MechanicOptimizer(Freezing):
    """What `mechanize` returns: build it there."""

    def _start(self) -> None:
        super()._start()
        self._counted: tuple[Sequence[Tensor], Counting] | None = None
        self._decider = Decider(self.base, self.settings, self._units)
        self._recorder = Recorder(self._decider)
        self._fused = False
        self._calls = 0
        self._decision: Decision | None = None
        self._sized: Progress | None = None
        self._tuners_sized = 0

    @_disable_dynamo  # torch.compile leaves the step as it is: the passes are compiled already, or the base's
    @hooked
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Steps the base at the learned scale. Outliers, gradients that are not finite, or none change nothing.

        With `max_grad_norm` base and tuner see the gradients clipped, as if `torch.nn.utils.clip_grad_norm_` had come
        before. The gradients themselves are left in either state: the step scales them in place where it has to.

        A parameter without a gradient still follows the scale, unless its `requires_grad` is False. At a learning rate
        of 0 in every group the weights and the scale stay where they are.
        """
        self._leave_dry_run()
        if closure is None and self._is_dry_run():
            return self._make_dry_run()
        closure, loss = _evaluated(closure, self._refuse_second_evaluation if self.max_grad_norm is not None else None)
        params = self._params()
        if is_fake(params):  # nothing can be learned from tensors without data; what a step allocates can be counted
            self._make_dry_run()
            return loss
        self._calls += 1
        return self._train(closure, loss, params)

    def _refuse_second_evaluation(self) -> None:
        raise RuntimeError(
            f"max_grad_norm={self.max_grad_norm} clips the gradients that a step starts from, but "
            f"{type(self.base).__name__} evaluates the closure again within its step, and those gradients would not be "
            "clipped: leave max_grad_norm out and call torch.nn.utils.clip_grad_norm_ in the closure."
        )

    def _plan(self, progress: Progress, params: Sequence[Tensor]) -> Plan:
        if progress.released:
            return self._released_plan(progress, params, self._counting(params))
        return self._passes.plan(params, lambda: self._entries(progress, params))

    def _train(self, closure: Closure | None, loss: Any, params: Sequence[Tensor]) -> Any:
        progress = self._progress
        plan = self._plan(progress, params)
        self._fused = plan.is_fused
        decision, started = self._decision, []
        reduction = self._counting(params).reduction if decision is None else Identity()
        with nullcontext() if reduction.spans_ranks else _tuner_restored_on_error(progress):
            if decision is None:
                new = self._new_tuners(progress)
                recording = (
                    None
                    if new
                    else self._recorder.find(
                        plan, progress, max_grad_norm=self.max_grad_norm, spans_ranks=reduction.spans_ranks
                    )
                )
                sums = self._sums(plan, progress) if recording is None else recording.sums()
                if new:
                    plan.add_sizes(sums, new)
                reduced = reduction.start(sums)
                started = plan.start(closure)
                sums = reduced()
                if self._was_false_start(sums, progress):
                    self._forget_start(progress)
                    return self._train(closure, loss, params)
                if recording is not None:
                    self._play(recording, sums, progress)
                    plan.finish()
                    return loss
                decision = self._decide(sums, progress)
            if decision.applied is False:
                return loss
            result = plan.apply(decision, unit=self._units.of_delta(progress), closure=closure, started=started)
        return result if loss is None else loss

    def _play(self, recording: Recording, sums: Tensor, progress: Progress) -> None:
        self._last["sums"] = sums
        recording.play(sums, progress)
        self._note_lrs()

    def _sums(self, plan: Plan, progress: Progress) -> Tensor:
        return plan.sums(**self._about_sums(progress))

    def _about_sums(self, progress: Progress) -> dict[str, Any]:
        state = progress.tuner
        return {"tuners": len(state), "device": state.device, "with_dx": bool(self.settings.s_decay)}

    def _new_tuners(self, progress: Progress) -> dict[int, bool]:
        """Those that begin, and whether they have seen no gradient yet. Waits for the device in the first few steps."""
        if self.settings.rule != "relative" or (self._sized is progress and self._tuners_sized == len(progress.tuner)):
            return {}
        if is_capturing(progress.tuner.device):
            return dict.fromkeys(range(len(progress.tuner)), True) if progress.unit == 0 else {}
        known = torch.cat([progress.tuner.column(name) for name in ("gradients", "size")], dim=1).tolist()
        new = {index: size == 0 for index, (gradients, size) in enumerate(known) if gradients < BEGINNING}
        if not new:
            self._sized, self._tuners_sized = progress, len(progress.tuner)
        return new

    def _was_false_start(self, vector: Tensor, progress: Progress) -> bool:
        """Whether the one gradient so far is far longer or shorter than this one. The weights have not moved yet.

        Which of the two is the odd one the next step shows. A scale by the first would be as far off as that is.

        Never for a base whose state cannot be dropped: it was there before the first step, or an engine has views of
        it. DeepSpeed's engines therefore keep such a gradient; those that call `decide` do not come here at all. On a
        GPU, which would have to be waited for, only the second call looks.
        """
        on_cpu = vector.device.type == "cpu"
        if self.settings.rule != "relative" or not (on_cpu or self._calls == 2) or is_capturing(vector.device):
            return False
        if self._has_history or self.count is not None:
            return False
        if progress.tuner.column("gradients").max() != 1:
            return False
        numbers = vector.tolist()
        clip = clip_factor(numbers, self.max_grad_norm)
        norms = [clip * math.sqrt(square) if square >= 0 else 0.0 for square in numbers[1 : -1 : len(SUMS)]]
        longest = progress.tuner.column("longest")[:, 0].tolist()
        pairs = zip(norms, longest, strict=True)
        return any(max(a, b) > OUTLIER * min(a, b) > 0 for a, b in pairs if math.isfinite(a))

    def _forget_start(self, progress: Progress) -> None:
        """Begins anew with this step: the outlier would stay in the base's moments, and in delta."""
        self.state.clear()
        self._passes = Passes(self.base, self.backend)  # the plans hold what was cleared
        progress.tuner = initial_state(
            self._units.constants(progress), tuners=len(progress.tuner), device=progress.tuner.device
        )
        progress.steps = torch.zeros_like(progress.steps)
        progress.unit, self._sized = 0.0, None

    def decide(self, sums: Tensor) -> Decision:
        """Lets the tuner make its step, given the sums over all parameters of all ranks (see `local_sums`)."""
        return self._decide(sums, self._progress)

    def _decide(self, sums: Tensor, progress: Progress) -> Decision:
        self._last["sums"] = sums
        by_kernel = self._passes.uses_kernels(sums.device)
        decision = self._decider.decide(sums, progress, by_kernel=by_kernel, max_grad_norm=self.max_grad_norm)
        applied = self._known(decision.applied, progress)
        if applied is not False:
            self._note_lrs()
        return decision._replace(applied=applied)

    def _known(self, applied: bool | Tensor, progress: Progress) -> bool | Tensor:
        """A bool, unless the base can be told on the device: for others this is a step's one synchronisation."""
        if isinstance(applied, Tensor) and applied.device.type != "cpu" and self._decides_on_device():
            return applied
        is_applied = bool(applied)
        if not is_applied and progress.skipped > 0:
            self._warn_of_skips(progress)
        return is_applied

    def _decides_on_device(self) -> bool:
        return self._fused or known_bases.skips_on_found_inf(self.base, self._params())

    @contextmanager
    def applying(self, decision: Decision) -> Iterator[None]:
        """Within, `step()` takes this decision and sees only to the weights: for engines that step part by part."""
        self._decision = decision
        try:
            yield
        finally:
            self._decision = None

    def _entries(self, progress: Progress, params: Sequence[Tensor]) -> list[Entry]:
        """The parameters with a gradient, and those that had one before: their weights still follow the scale.

        Those that a person has frozen stay where they are and are not counted.
        """
        weights = self._counting(params).weights if self._decision is None else {}
        align_gradients(params)
        entries = []
        for group in self.param_groups:
            tuner_index = progress.tuner_of(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                if p.grad is None and (DELTA not in known or not p.requires_grad):
                    continue
                refuse_sparse(p)
                refuse_foreign(p, known)
                conform(self.base, p, self.delta_dtype)
                param_state = ParamState(local(p), local(p.grad), local(known.get(DELTA)), local(known.get(REF)))
                entries.append(Entry(p, group, param_state, tuner_index, weights.get(id(p), 1.0), self.delta_dtype))
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

    def local_sums(self, parts: Sequence[tuple[Group, ParamState]]) -> Tensor:
        """What `decide` takes, for tensors that an engine assembled, each with its param group and counted once."""
        progress = self._progress
        entries = [
            Entry(param_state.x, group, param_state, progress.tuner_of(group), 1.0) for group, param_state in parts
        ]
        sums, new = self._passes.sums(entries, **self._about_sums(progress)), self._new_tuners(progress)
        make_room(sums, new)
        for entry in entries:
            if (index := entry.tuner_index) in new:
                add_sizes(sums, index, [entry.param_state.x], [entry.param_state.grad], 1.0, is_first=new[index])
        return sums

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0, which must leave no trace.

        A user's first step may look the same, so the caller counts.
        """
        return not self.state and has_lr_zero(self.base) and _is_called_by("torch.distributed.checkpoint.state_dict")

    def _make_dry_run(self) -> None:
        self.base.step()
        for p in self._params():
            if p.grad is not None and not checkpoint.is_released(self.param_groups):
                complete(self.base, p, local(p), self.delta_dtype)
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


def _evaluated(closure: Closure | None, refuse: Closure | None) -> tuple[Closure | None, Any]:
    """The loss, and a closure for the base whose first call returns it; another one computes it again, or refuses."""
    if closure is None:
        return None, None
    again = torch.enable_grad()(closure)
    loss = again()
    cached = [loss]
    return lambda: cached.pop() if cached else (refuse or again)(), loss


@contextmanager
def _tuner_restored_on_error(progress: Progress) -> Iterator[None]:
    """The weights go back when the base raises: a tuner that had moved on would not fit them.

    Not where ranks decide together: those that do not fail have moved on, and all must play one scale.
    """
    tuner, steps = progress.tuner, progress.steps
    try:
        yield
    except BaseException:
        progress.tuner, progress.steps = tuner, steps
        raise
