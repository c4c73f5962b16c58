"""The default rule around any base: the base's own step, at learning rate lr * S.

A base that is not known to be linear in lr is stepped at lr, and its update is then multiplied by S. While the scale is
unknown, every base is stepped this way: the first update is only measured, and stored in place of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import MASTER, REF, is_16_bit
from mechanic_plugins.core.tuner import Decision
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.passes import masters
from mechanic_plugins.passes.base_step import BaseStep, is_discarded, warn_of_own_iterates
from mechanic_plugins.passes.plan import Closure, Entry, Plan, exact
from mechanic_plugins.passes.slots import Slots

__all__ = ["AroundBase"]


class Lent(NamedTuple):
    """A 16-bit parameter, its master, and its stand-in during a step."""

    param: Tensor
    master: Tensor
    stand_in: Tensor


class AroundBase(Plan):
    """Steps the base itself, at the learned scale."""

    def __init__(
        self,
        base: Optimizer,
        entries: Sequence[Entry],
        tuner_of: Sequence[int],
        slots: Slots,
        *,
        keeps: bool = True,
        may_fuse: bool = False,
        by_kernels: bool = False,
        has_begun: bool = False,
    ) -> None:
        """`tuner_of` has the tuner's index for each param group.

        `keeps` is False after `freeze(release=True)`, when only the gradients enter the sums. `by_kernels`: Triton may
        compute the sums. `has_begun`: a kernel may decide.
        """
        super().__init__(base, entries, slots.main)
        self.slots, self._tuner_of, self._keeps = slots, tuner_of, keeps
        self._step_base = BaseStep(base, self.params, may_fuse=may_fuse)
        self._is_linear = known_bases.is_linear_in_lr(type(base))
        self._uses_masters = keeps and masters.are_usable(base, self.params)
        for batch in self.batches if self._uses_masters and slots.is_default else ():
            if is_16_bit(batch.params[0].dtype):
                wides = [base.state.get(p, {}).get(MASTER) for p in batch.params]
                batch.wides = wides if all(wide is not None for wide in wides) else None
                self.is_complete = self.is_complete and batch.wides is not None
        self.is_complete = self.is_complete or not keeps
        for batch in self.batches if by_kernels else ():
            batch.use_kernels()
        self._has_begun = has_begun and by_kernels and self.is_complete and self._is_linear

    def decides_on_device(self) -> bool:
        can_be_told = self._has_begun and known_bases.skips_on_found_inf(self.base, self.params)
        return can_be_told and all(batch.can_use_kernels() for batch in self.batches)

    # ---------------------------------------------------------------- the step

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        afters = decision.afters
        if self._is_linear and (isinstance(afters, Tensor) or all(afters) or self._have_scales(afters)):
            return self._step_at_scale(decision, unit, closure)
        return self._step_apart(decision, unit, closure)

    def _have_scales(self, afters: Sequence[float]) -> bool:
        return all(afters[e.tuner_index] > 0 for e in self.entries if e.param.grad is not None)

    def _step_at_scale(self, decision: Decision, unit: float, closure: Closure | None) -> Any:
        starts, lent = self._starts(decision), self._lent() if self._uses_masters else []
        groups, afters = self.base.param_groups, decision.afters
        lrs = [group["lr"] * (afters[i] / unit) for group, i in zip(groups, self._tuner_of, strict=True)]
        if isinstance(afters, Tensor):
            lrs = [lr.float() for lr in lrs]  # the dtype that torch's fused kernels read
        try:
            result = self._step_with(lent, lrs, decision, closure)
        except BaseException:
            for each in lent:
                local(each.master).copy_(local(each.param))
            raise
        for each in lent:
            local(each.param).copy_(local(each.master))
        if starts or lent:
            self._keep(starts, lent)
        return result

    def _step_apart(self, decision: Decision, unit: float, closure: Closure | None) -> Any:
        """Reads the updates off the weights. On an error the weights are restored."""
        starts, lent = self._starts(decision), self._lent() if self._uses_masters else []
        moved = [entry for entry in self.entries if entry.param.grad is not None or not self.slots.is_default]
        lost = [self._uses_masters and is_discarded(self.base, entry.param) for entry in moved]
        masters_of = {id(each.param): each.master for each in lent}
        stepped = [masters_of.get(id(entry.param), entry.param) for entry in moved]
        olds = {x: local(x).detach().clone() for x in stepped}
        only_measures = self.slots.is_default and not any(decision.afters)
        stretch = _stretch(moved, list(olds.values()), unit) if self._is_linear and only_measures else 1.0
        lrs = [group["lr"] * (stretch / unit) for group in self.base.param_groups] if self._is_linear else ()
        try:
            result = self._step_with(lent, lrs, decision, closure)
            if not self.is_complete:
                warn_of_own_iterates(self.base, [entry.param for entry in moved], list(olds.values()))
            params = {entry.param for entry in moved}
            self._keep({p: x for p, x in starts.items() if p not in params}, lent)
            for entry, x, is_lost in zip(moved, stepped, lost, strict=True):
                update = (local(x) - olds[x]) / stretch
                local(x).copy_(olds[x])
                if only_measures:  # frees memory for the reference that is created below
                    del olds[x]
                if entry.param in starts:
                    self._begin(entry.param, starts[entry.param])
                self._add(entry, x, update.zero_() if is_lost else update, decision)
        except BaseException:
            for x, old in olds.items():
                local(x).copy_(old)
            raise
        return result

    def _step_with(self, lent: Sequence[Lent], lrs: Sequence[Any], decision: Decision, closure: Closure | None) -> Any:
        if not lent:
            return self._step_base(lrs, decision.clip, applied=decision.applied, closure=closure)
        pairs = [(each.param, each.stand_in) for each in lent]
        with masters.in_the_place_of(self.base, pairs):
            closure = masters.synchronized(closure, pairs)
            result = self._step_base(lrs, decision.clip, applied=decision.applied, closure=closure)
        for each in lent:
            if local(each.stand_in).data_ptr() != local(each.master).data_ptr():  # the base has replaced the tensor
                local(each.master).copy_(local(each.stand_in))
        return result

    def _add(self, entry: Entry, x: Tensor, update: Tensor, decision: Decision) -> None:
        """Adds scale * update to `x`, the parameter or its master; while the scale is 0, the update is only stored."""
        p, after = entry.param, float(decision.afters[entry.tuner_index])
        if after == 0:
            local(self.base.state[p][REF]).add_(update)
            return
        local(x).add_(update, alpha=after)
        if x is not p:
            local(p).copy_(local(x))

    # ---------------------------------------------------------------- what is kept

    def _starts(self, decision: Decision) -> dict[Tensor, Tensor | None]:
        """The parameters that get a reference in this step, with its value, or None if their tuner has no scale yet.

        At a tuner's first move these are all of its parameters: the stored updates are dropped.
        """
        if not self._keeps or (self.is_complete and all(decision.befores)):
            return {}
        first = [was == 0 < now for was, now in zip(decision.befores, decision.afters, strict=False)]
        starts: dict[Tensor, Tensor | None] = {}
        for group, index in zip(self.base.param_groups, self._tuner_of, strict=True):
            for p in group["params"]:
                has_one, is_first = REF in self.base.state.get(p, {}), bool(first) and first[index]
                if (has_one and is_first) or (not has_one and p.grad is not None):
                    starts[p] = local(p).detach().clone() if decision.afters[index] > 0 else None
        return starts

    def _keep(self, starts: dict[Tensor, Tensor | None], lent: Sequence[Lent]) -> None:
        """Called after the base has created its state, since bases recognise a new parameter by its empty state."""
        for each in lent:
            self.base.state[each.param].setdefault(MASTER, each.master)
        for p, x in starts.items():
            self._begin(p, x)

    def _begin(self, p: Tensor, x: Tensor | None) -> None:
        state = self.base.state[p]
        self.slots.begin(p, state, has_master=self._uses_masters and is_16_bit(p.dtype))
        if x is not None:
            self.slots.put(p, state, REF, x)

    def _lent(self) -> list[Lent]:
        lent = []
        for p in self.params:
            if not is_16_bit(p.dtype) or p.grad is None or is_discarded(self.base, p):
                continue
            master = self.base.state.get(p, {}).get(MASTER)
            if master is None:
                master = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
                local(master).copy_(local(p))
            else:
                local(master).copy_(exact(local(p), local(master)))
            lent.append(Lent(p, master, masters.stand_in(p, master)))
        return lent


def _stretch(moved: Sequence[Entry], olds: Sequence[Tensor], unit: float) -> float:
    """A power of two to multiply the lr by if an update of lr * gradient would be lost in the weights' rounding.

    It may be far too large for bases with longer updates, which are exact all the same once divided by it. 1 for 16-bit
    weights, whose range it could exceed. It differs between ranks, so no weight may ever move by what is read off.
    """
    lr = max((float(entry.group["lr"]) for entry in moved), default=0.0) / unit
    grads = [local(entry.param.grad) for entry in moved if entry.param.grad is not None]
    x, g = (
        max((each.abs().max().item() for each in tensors if each.numel()), default=0.0) for tensors in (olds, grads)
    )
    if not 0 < 1024 * lr * g < x < math.inf:
        return 1.0
    return float(2.0 ** min(math.frexp(x / (lr * g))[1], {torch.float64: 512, torch.float32: 64}.get(olds[0].dtype, 0)))
