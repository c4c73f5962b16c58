"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the paper's Algorithm 1: the sums over all parameters of all ranks, the tuner's
decision, the base's step and Mechanic's move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, REF, ParamState
from mechanic_plugins.core.schedule import Schedule
from mechanic_plugins.core.tuner import (
    SUMS,
    Sums,
    TunerState,
    advance,
    column,
    delta_factor,
    gradient_limit,
    initial_state,
    keep_where,
    noted,
    rescale_to_lr,
    was_outlier,
)
from mechanic_plugins.distributed.reduction import Identity
from mechanic_plugins.distributed.sharding import (
    Counting,
    align_gradients,
    is_dtensor,
    is_fake,
    local,
    reduction_for,
    refuse_unattached,
)
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.kernels.multi_tensor import is_capturing
from mechanic_plugins.optimizer.interface import Group, Wrapper
from mechanic_plugins.optimizer.overlaps import refuse_overlaps
from mechanic_plugins.passes.plan import Closure, Decision, Entry, complete, conform
from mechanic_plugins.passes.planner import Passes

__all__ = ["MechanicOptimizer"]


class MechanicOptimizer(Wrapper):
    """What `mechanize` returns: build it there."""

    was_built: ClassVar[bool] = False
    """Whether this process has made one: the runner asks at the end."""

    def _start(self) -> None:
        super()._start()
        MechanicOptimizer.was_built = True
        self._counted: tuple[tuple[int, ...], Counting] | None = None
        self._passes = Passes(self.base, self.backend)
        self._fused = False
        self._calls = 0
        self._decision: Decision | None = None
        self.count: Callable[[Sequence[Tensor]], Counting] | None = None
        """How an engine that has cut the parameters up adds its batches up."""

    @_disable_dynamo  # torch.compile leaves the step as it is: the passes are compiled already, or the base's
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Algorithm 1. A step whose gradient is not finite, or an outlier, or not there at all, changes nothing.

        A parameter without a gradient still follows the scale, unless its `requires_grad` is False. At a learning rate
        of 0 in every group the weights and the scale stay where they are.
        """
        self._leave_dry_run()
        if closure is None and self._is_dry_run():
            return self._make_dry_run()
        closure, loss = _evaluated(closure)
        params = self._params()
        if is_fake(params):  # nothing can be learned from tensors without data; what a step allocates can be counted
            self._make_dry_run()
            return loss
        self._calls += 1
        return self._train(closure, loss, params)

    def _train(self, closure: Closure | None, loss: Any, params: Sequence[Tensor]) -> Any:
        progress = self._progress
        plan = self._passes.plan(_ids_of_moving(params), lambda: self._entries(progress, params))
        self._fused = plan.is_fused
        decision, started = self._decision, []
        reduction = self._counting(params).reduction if decision is None else Identity()
        with nullcontext() if reduction.spans_ranks else _tuner_restored_on_error(progress):
            if decision is None:
                sums = plan.sums(tuners=len(progress.tuner.s), device=progress.tuner.s.device)
                reduced = reduction.start(sums)
                started = plan.start(closure)
                sums = reduced()
                if self._was_false_start(sums, progress):
                    self._forget_start(progress)
                    return self._train(closure, loss, params)
                decision = self._decided(sums, progress)
            if decision.applied is False:
                return loss
            result = plan.apply(decision, unit=self._delta_unit(progress), closure=closure, started=started)
        return result if loss is None else loss

    def _was_false_start(self, vector: Tensor, progress: Progress) -> bool:
        """Whether the one gradient so far was an outlier beside this one. The weights have not moved yet.

        Never for a base whose state cannot be dropped: it was there before the first step, or an engine has views of
        it. DeepSpeed's engines therefore keep such a gradient; those that call `decide` do not come here at all. On a
        GPU, which would have to be waited for, only the second call looks.
        """
        on_cpu = vector.device.type == "cpu"
        if self.settings.rule != "optimistic" or not (on_cpu or self._calls == 2) or is_capturing(vector.device):
            return False
        if self._has_history or self.count is not None:
            return False
        norms = Sums.of(vector[:-1].view(-1, len(SUMS))).gg.sqrt()
        is_second = progress.tuner.gradients.max() == 1
        return bool(is_second & was_outlier(progress.tuner.longest, norms).any())

    def _forget_start(self, progress: Progress) -> None:
        """Begins anew with this step: the outlier would stay in the base's moments, and in delta."""
        self.state.clear()
        self._passes = Passes(self.base, self.backend)  # the plans hold what was cleared
        progress.tuner = initial_state(
            self._constants(progress), tuners=len(progress.tuner.s), device=progress.tuner.s.device
        )
        progress.steps = torch.zeros_like(progress.steps)

    def decide(self, sums: Tensor) -> Decision:
        """Lets the tuner make its step, given the sums over all parameters of all ranks (see `local_sums`)."""
        return self._decided(sums, self._progress)

    def _decided(self, sums: Tensor, progress: Progress) -> Decision:
        if self._passes.uses_kernels(sums.device):
            return self._decided_on_gpu(sums, progress)
        old = progress.tuner
        moves = self._is_made(sums, progress)
        before = old.played
        kept = torch.ones_like(before)
        if moves is not False:
            self._note_lrs()
            kept = self._advance_tuner(sums, moves, progress, old)
        return Decision(moves, before[:, 0], progress.tuner.played[:, 0], kept[:, 0])

    def _decided_on_gpu(self, sums: Tensor, progress: Progress) -> Decision:
        """The same in one launch."""
        hold = not self._resolve_unit(progress) or self._holds(progress)
        settings = self._constants(progress)
        counters = _counters(progress)
        progress.tuner, counters, scales = gpu_tuner.advance(
            progress.tuner,
            sums,
            counters,
            settings=settings,
            betas=self._on_device(settings.betas, sums.device),
            constants=self._on_device(gpu_tuner.constants_of(settings), sums.device),
            lrs=self._tuned_lrs(progress),
            hold=hold,
            in_place=is_capturing(sums.device),
        )
        progress.steps, progress.skipped = counters.unbind()
        before, after, made, kept = scales.unbind(1)
        self._note_lrs()
        return Decision(self._applied(made[0], progress), before, after, kept, scales)

    def _applied(self, moves: Tensor, progress: Progress) -> bool | Tensor:
        """Whether the step is made: for a base that cannot be told on the device, by waiting for it."""
        if moves.device.type != "cpu" and self._decides_on_device():
            return moves
        is_made = bool(moves)
        if not is_made and progress.skipped > 0:
            self._warn_of_skips(progress)
        return is_made

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
            row = self._row(group, progress)
            for p in group["params"]:
                known = self.state.get(p, {})
                if p.grad is None and (DELTA not in known or not p.requires_grad):
                    continue
                _refuse_sparse(p)
                _refuse_foreign(p, known)
                conform(self.base, p)
                param_state = ParamState(local(p), local(p.grad), local(known.get(DELTA)), local(known.get(REF)))
                entries.append(Entry(p, group, param_state, row, weights.get(id(p), 1.0)))
        return entries

    def _row(self, group: Group, progress: Progress) -> int:
        """Which tuner the group belongs to. An engine may have left only some of the groups here."""
        return (progress.row_of(group) or 0) if self.settings.scope == "group" else 0

    def _counting(self, params: Sequence[Tensor]) -> Counting:
        key = tuple(map(id, params))
        if self._counted is None or self._counted[0] != key:
            _refuse_mixed_groups(self.param_groups)
            refuse_overlaps(params)
            self._counted = key, self._count(params)
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
            Entry(param_state.x, group, param_state, self._row(group, progress), 1.0) for group, param_state in parts
        ]
        return self._passes.sums(entries, tuners=len(progress.tuner.s), device=progress.tuner.s.device)

    def _is_made(self, vector: Tensor, progress: Progress) -> bool | Tensor:
        """Whether the step is made: a bool, or a tensor where the base can be told on the device.

        On a GPU with a base that cannot, this waits for the device: the one synchronisation of a step.
        """
        finite = vector.isfinite().all()
        has_gradients = finite & (vector[-1] > 0)
        fits = finite & ~self._is_outlier(vector, has_gradients, progress)
        if vector.device.type == "cpu":
            if not fits:
                progress.skipped = progress.skipped + 1
                self._warn_of_skips(progress)
            return bool(has_gradients & fits)
        progress.skipped = progress.skipped + ~fits
        return self._applied(has_gradients & fits, progress)

    def _is_outlier(self, vector: Tensor, has_gradients: Tensor, progress: Progress) -> Tensor:
        """Whether the gradient is far longer than all before it; the tuner remembers the longest, skipped or not."""
        if self.settings.rule != "optimistic":
            return torch.zeros_like(has_gradients)
        norms = Sums.of(vector[:-1].view(-1, len(SUMS))).gg.sqrt()
        is_outlier, longest = gradient_limit(progress.tuner.longest, norms)
        longest = torch.where(has_gradients, longest, progress.tuner.longest)
        progress.tuner = progress.tuner._replace(longest=longest)
        return has_gradients & is_outlier.any()

    def _advance_tuner(self, vector: Tensor, moves: bool | Tensor, progress: Progress, old: TunerState) -> Tensor:
        """Returns what delta is multiplied by. `old` is the tuner before it met this step's gradient."""
        lr, skipped = column(self._tuned_lrs(progress), vector.device), progress.tuner
        settings, sums, lr_ratio = self.settings, Sums.of(vector[:-1].view(-1, len(SUMS))), torch.ones_like(lr)
        if self._resolve_unit(progress) and not self._holds(progress):
            settings = self._constants(progress)
            state = noted(old, lr)
            if settings.own_warmup:
                state, sums, lr_ratio = rescale_to_lr(old, sums, lr)
            betas = self._on_device(settings.betas, vector.device)
            new = advance(state, sums, settings=settings, betas=betas, lr=lr)
            kept = delta_factor(state, new, hindsight=settings.hindsight) / lr_ratio
        else:
            new, kept = noted(old, lr), torch.ones_like(lr)
        new = new._replace(longest=skipped.longest)
        if isinstance(moves, Tensor):
            new, kept = keep_where(moves, new, skipped), torch.where(moves, kept, 1.0)
        progress.tuner, progress.steps = new, progress.steps + moves
        return kept

    def _holds(self, progress: Progress) -> bool:
        """Whether the scale stays: frozen, or at a learning rate of 0, which is to move nothing.

        The two rules that start with a scale above 0 take such a step as published: their warm-ups would differ. An lr
        that is a tensor on a GPU is not looked at.
        """
        if progress.frozen:
            return True
        obeys = self.settings.rule in ("optimistic", "paper", "theory") and not known_bases.ignores_a_schedule(
            self.base
        )
        return obeys and self._has_lr_zero()

    def _tuned_lrs(self, progress: Progress) -> list[float | Tensor]:
        """For each tuner where its groups' schedule stands, as a learning rate; 0 for a base that ignores one."""
        tuned = [Schedule(progress.lr_refs) for _ in progress.tuner.s]
        if not known_bases.ignores_a_schedule(self.base):
            for group in self.param_groups:
                index = progress.row_of(group) or 0
                tuned[self._row(group, progress)].add(group, progress.lr_refs, index)
        return [schedule.lr() for schedule in tuned]

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0. It must leave no trace.

        A person's first step may look the same, so it counts who asks.
        """
        return not self.state and self._has_lr_zero() and _is_called_by("torch.distributed.checkpoint.state_dict")

    def _has_lr_zero(self) -> bool:
        lrs = [group["lr"] for group in self.param_groups if group.get("lr") is not None]
        known = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in lrs)
        return bool(lrs) and known and all(float(lr) == 0 for lr in lrs)

    def _make_dry_run(self) -> None:
        self.base.step()
        for p in self._params():
            if p.grad is not None:
                complete(self.base, p, local(p))
        self._dry_state = self.state

    def _leave_dry_run(self) -> None:
        """No state was loaded after the dry run: forget what it made (Adam would count it as a step)."""
        if self._dry_state is not None and self._dry_state is self.state:
            self.state.clear()
        self._dry_state = None


def _is_called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _ids_of_moving(params: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(id(p) for p in params if p.requires_grad or p.grad is not None)


def _evaluated(closure: Closure | None) -> tuple[Closure | None, Any]:
    """The loss, and a closure for the base whose first call returns it instead of computing it again."""
    if closure is None:
        return None, None
    again = torch.enable_grad()(closure)
    loss = again()
    cached = [loss]
    return lambda: cached.pop() if cached else again(), loss


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


def _counters(progress: Progress) -> Tensor:
    """Steps and skipped side by side; the GPU's tuner leaves them so."""
    steps, skipped = progress.steps, progress.skipped
    if steps._base is not None and steps._base is skipped._base:
        return steps.as_strided((2,), (1,))
    return torch.stack([steps, skipped])


def _refuse_sparse(p: Tensor) -> None:
    if p.grad is not None and p.grad.layout != torch.strided:
        raise ValueError(
            f"a gradient of shape {tuple(p.shape)} is sparse ({p.grad.layout}): Mechanic moves every weight in every "
            "step. Use sparse=False in the embedding, or p.grad.to_dense() before step()."
        )


def _refuse_foreign(p: Tensor, state: Mapping[str, Any]) -> None:
    """A kernel would read past the end of what is too short."""
    for name in (DELTA, REF):
        if name in state and state[name].shape != p.shape:
            raise ValueError(
                f"the optimizer's {name} has shape {tuple(state[name].shape)} where the parameter has shape "
                f"{tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you change a "
                "parameter's shape."
            )


def _refuse_mixed_groups(groups: Sequence[Group]) -> None:
    for index, group in enumerate(groups):
        kinds = {is_dtensor(p) for p in group["params"]}
        if len(kinds) > 1 and (group.get("fused") or group.get("foreach")):
            raise ValueError(
                f"param group {index} mixes sharded (DTensor) and plain parameters, which fused and foreach optimizers "
                "cannot step together: put them into two groups."
            )
