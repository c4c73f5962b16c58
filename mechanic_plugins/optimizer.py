"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the paper's Algorithm 1: the sums over all parameters of all ranks, the tuner's
decision, the base's step and Mechanic's move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mechanic_plugins import bases, fused, multi_tensor
from mechanic_plugins.checkpoint import DELTA, REF, Progress
from mechanic_plugins.passes import Batch, Decision, Entry, Passes
from mechanic_plugins.sharding import Counting, align_gradients, is_dtensor, local, reduction_for, refuse_unattached
from mechanic_plugins.slots import Slot
from mechanic_plugins.tuner import SUMS, Sums, advance, keep_where
from mechanic_plugins.wrapper import Group, Wrapper

__all__ = ["MechanicOptimizer"]

Closure = Callable[[], Any]


class MechanicOptimizer(Wrapper):
    """What `mechanize` returns: build it there."""

    def _start(self) -> None:
        super()._start()
        self._counted: tuple[tuple[int, ...], Counting] | None = None
        self._passes = Passes(self.base, self.backend)
        self._fused = False
        self._decision: Decision | None = None
        self.count: Callable[[Sequence[Tensor]], Counting] | None = None
        """How an engine that has cut the parameters up adds its pieces up."""

    @_disable_dynamo  # torch.compile leaves the step as it is: the passes are compiled already, or the base's
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Algorithm 1. A step with a gradient that is not finite, or with none at all, changes nothing."""
        closure, loss = _evaluated(closure)
        self._leave_dry_run()
        plan = self._passes.plan(tuple(map(id, self._params())))
        if plan is not None:
            return self._follow(plan, loss)
        entries = self._entries()
        self._fused = self._passes.is_fused(entries)
        if self._decision is not None:
            return self._play(entries, self._decision, closure, loss)
        reduced = self._counting().reduction.start(self._summed(entries))
        started = self._passes.start(entries, closure)
        sums = reduced()
        if self._is_dry_run(sums):
            return self._make_dry_run(entries)
        with _tuner_restored_on_error(self._progress):
            return self._play(entries, self.decide(sums), closure, loss, started)

    def _follow(self, plan: fused.Plan, loss: Any) -> Any:
        """The same for a fused step whose parameters and state are where they were in the last one."""
        self._fused = True
        decision = self._decision
        with _tuner_restored_on_error(self._progress):
            if decision is None:
                tuner = self._progress.tuner
                sums = plan.sums(tuners=len(tuner.s), device=tuner.s.device)
                decision = self.decide(self._counting().reduction.start(sums)())
            if decision.moves is not False:
                plan.play(decision.scales(), unit=self._delta_unit())
        return loss

    def decide(self, sums: Tensor) -> Decision:
        """Lets the tuner make its step, given the sums over all parameters of all ranks (see `local_sums`)."""
        if self._passes.workspace is not None and multi_tensor.can_run(sums.device):
            return self._decide_on_gpu(sums)
        moves = self._is_made(sums)
        before = self._progress.tuner.played[:, 0]
        if moves is not False:
            self._note_lrs()
            self._advance_tuner(sums, moves)
        return Decision(moves, before, self._progress.tuner.played[:, 0])

    def _decide_on_gpu(self, sums: Tensor) -> Decision:
        """The same in one launch."""
        progress = self._progress
        hold = not self._resolve_unit() or progress.frozen
        settings = self._constants()
        counters = _counters(progress)
        progress.tuner, counters, scales = multi_tensor.advance(
            progress.tuner,
            sums,
            counters,
            settings=settings,
            betas=self._on_device(settings.betas),
            constants=self._on_device(multi_tensor.tuner_constants(settings)),
            hold=hold,
            in_place=fused.is_capturing(sums.device),
        )
        progress.steps, progress.skipped = counters.unbind()
        before, after, made = scales.unbind(1)
        self._note_lrs()
        return Decision(self._made_known(made[0]), before, after, scales)

    def _made_known(self, moves: Tensor) -> bool | Tensor:
        """Whether the step is made: for a base that cannot be told on the device, by waiting for it."""
        if moves.device.type != "cpu" and self._decides_on_device():
            return moves
        is_made = bool(moves)
        if not is_made and self._progress.skipped > 0:
            self._warn_of_skips()
        return is_made

    def _decides_on_device(self) -> bool:
        return self._fused or bases.skips_on_found_inf(self.base, self._params())

    @contextmanager
    def playing(self, decision: Decision) -> Iterator[None]:
        """Within, `step()` takes this decision and sees only to the weights: for engines that step part by part."""
        self._decision = decision
        try:
            yield
        finally:
            self._decision = None

    def _play(
        self,
        entries: Sequence[Entry],
        decision: Decision,
        closure: Closure | None,
        loss: Any,
        started: Sequence[Batch] = (),
    ) -> Any:
        if decision.moves is False:
            return loss
        result = self._passes.play(entries, decision, unit=self._delta_unit(), closure=closure, started=started)
        return result if loss is None else loss

    def _entries(self) -> list[Entry]:
        """The parameters with a gradient, and those that had one before: their weights still follow the scale."""
        weights = self._counting().weights if self._decision is None else {}
        align_gradients(self._params())
        entries = []
        for group in self.param_groups:
            row = self._row(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                if p.grad is None and DELTA not in known:
                    continue
                _refuse_sparse(p)
                _refuse_foreign(p, known)
                slot = Slot(local(p), local(p.grad), local(known.get(DELTA)), local(known.get(REF)))
                entries.append(Entry(p, group, slot, row, weights.get(id(p), 1.0)))
        return entries

    def _row(self, group: Group) -> int:
        """Which tuner the group belongs to. An engine may have left only some of the groups here."""
        return (self._progress.row_of(group) or 0) if self.settings.scope == "group" else 0

    def _counting(self) -> Counting:
        params = self._params()
        key = tuple(map(id, params))
        if self._counted is None or self._counted[0] != key:
            _refuse_mixed_groups(self.param_groups)
            self._counted = key, self._count(params)
        return self._counted[1]

    def _count(self, params: Sequence[Tensor]) -> Counting:
        if self.count is not None:  # an engine that has cut the parameters up knows how its pieces add up
            return self.count(params)
        refuse_unattached(self)
        return reduction_for(params, group=self.group, sync_replicas=self.sync_replicas)

    def local_sums(self, parts: Sequence[tuple[Group, Slot]]) -> Tensor:
        """What `decide` wants, of slots that an engine put together, each with its param group and counted once."""
        return self._summed([Entry(slot.x, group, slot, self._row(group), 1.0) for group, slot in parts])

    def _summed(self, entries: Sequence[Entry]) -> Tensor:
        tuner = self._progress.tuner
        return self._passes.sums(entries, tuners=len(tuner.s), device=tuner.s.device)

    def _is_made(self, vector: Tensor) -> bool | Tensor:
        """Whether the step is made: a bool, or a tensor where the base can be told on the device.

        On a GPU with a base that cannot, this waits for the device: the one synchronisation of a step.
        """
        finite = vector.isfinite().all()
        progress = self._progress
        progress.skipped = progress.skipped + ~finite
        return self._made_known(finite & (vector[-1] > 0))

    def _advance_tuner(self, vector: Tensor, moves: bool | Tensor) -> None:
        progress = self._progress
        progress.steps = progress.steps + moves
        if self._resolve_unit() and not progress.frozen:
            sums, settings = Sums.of(vector[:-1].view(-1, len(SUMS))), self._constants()
            new = advance(progress.tuner, sums, settings=settings, betas=self._on_device(settings.betas))
            progress.tuner = keep_where(moves, new, progress.tuner) if isinstance(moves, Tensor) else new

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self, vector: Tensor) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0. It must leave no trace."""
        if self.state or not self._has_lr_zero():
            return False
        return bool(vector[-1] > 0) and not vector[:-1].view(-1, len(SUMS))[:, 1].any()

    def _has_lr_zero(self) -> bool:
        lrs = [group["lr"] for group in self.param_groups if group.get("lr") is not None]
        return bool(lrs) and all(float(lr) == 0 for lr in lrs)

    def _make_dry_run(self, entries: Sequence[Entry]) -> None:
        self.base.step()
        for entry in entries:
            self._passes.completed(entry, entry.slot.x)
        self._dry_state = self.state

    def _leave_dry_run(self) -> None:
        """No state was loaded after the dry run: forget what it made (Adam would count it as a step)."""
        if self._dry_state is not None and self._dry_state is self.state:
            self.state.clear()
        self._dry_state = None


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
    """The weights go back when the base raises: a tuner that had moved on would not fit them."""
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
