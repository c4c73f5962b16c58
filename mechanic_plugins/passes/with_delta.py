"""The published rules, x = x_ref + S * Delta: the scale multiplies the past, so the sum of all updates is kept.

Slow and plain: a copy of the weights, the base's own step, and Mechanic's move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, REF, is_16_bit
from mechanic_plugins.core.tuner import SUMS, Decision
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels.dots import reals
from mechanic_plugins.passes import masters
from mechanic_plugins.passes.base_step import BaseStep, is_discarded, warn_of_own_iterates
from mechanic_plugins.passes.plan import Closure, Entry, Plan
from mechanic_plugins.passes.slots import Slots

__all__ = ["WithDelta"]


class WithDelta(Plan):
    """Good for any base."""

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], slots: Slots, *, may_fuse: bool, with_decay: bool
    ) -> None:
        """`with_decay`: the rule asks for <d, x> and <x, x>."""
        super().__init__(base, entries, DELTA)
        self.slots, self._with_decay = slots, with_decay
        self._step_base = BaseStep(base, self.params, may_fuse=may_fuse)
        self._uses_twins = masters.are_usable(base, self.params)

    def sums(self, waiting: Sequence[bool]) -> list[float]:
        out = [0.0] * (len(SUMS) * len(waiting) + 1)
        for batch in self.batches:
            batch.add_sums(out, is_waiting=True, with_dx=self._with_decay, with_xx=self._with_decay)
        return out

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        """An error leaves the weights as they were."""
        lost = [is_discarded(self.base, p) for p in self.params]
        twins = [self._twin(p, is_lost) for p, is_lost in zip(self.params, lost, strict=True)]
        olds = [local(p).detach().clone() for p in self.params]
        pairs = [(p, twin) for p, twin in zip(self.params, twins, strict=True) if twin is not p]
        is_linear = known_bases.is_linear_in_lr(type(self.base))
        lrs = [group["lr"] / unit for group in self.base.param_groups] if is_linear and unit != 1 else ()
        try:
            with masters.in_the_place_of(self.base, pairs):
                result = self._step_base(lrs, decision.clip, closure=masters.synchronized(closure, pairs))
            self._begin(olds)
            for entry, twin, old, is_lost in zip(self.entries, twins, olds, lost, strict=True):
                self._move(entry, local(twin).detach(), old, decision, is_lost=is_lost)
        except BaseException:
            for p, old in zip(self.params, olds, strict=True):
                local(p).copy_(old)
            raise
        return result

    def _twin(self, p: Tensor, is_lost: bool) -> Tensor:
        if not (self._uses_twins and is_16_bit(p.dtype)) or is_lost:
            return p
        return masters.stand_in(p, p.detach().to(torch.float32))

    def _begin(self, olds: Sequence[Tensor]) -> None:
        """Never before the base has its state: bases take an empty one for a new parameter."""
        if self.is_complete:
            return
        warn_of_own_iterates(self.base, self.params, olds)
        for p, old in zip(self.params, olds, strict=True):
            state = self.base.state[p]
            if DELTA not in state:
                self.slots.begin(p, state, has_master=False)
                if REF in state:
                    local(state[REF]).copy_(old)

    def _move(self, entry: Entry, new: Tensor, old: Tensor, decision: Decision, *, is_lost: bool) -> None:
        """From the base's weights to Mechanic's."""
        p, state = entry.param, self.base.state[entry.param]
        scales = decision.befores[entry.tuner_index], float(decision.afters[entry.tuner_index])
        x, delta = local(p).detach(), local(state[DELTA])
        if is_16_bit(p.dtype):
            _move_rounded(x, delta, local(state[REF]), old, old if is_lost and self._uses_twins else new, *scales)
        else:
            x, delta, old = reals([x, delta, old]) if p.is_complex() else (x, delta, old)
            _move_by_difference(x, delta, old, *scales)


def _move_by_difference(x: Tensor, delta: Tensor, old: Tensor, before: float, after: float) -> None:
    """X + before * u + (after - before) * delta, the new one: a move that is small beside x, which is rounded once."""
    delta.add_(x.sub_(old))  # x holds u
    if after == 0:
        x.mul_(before).add_(delta, alpha=-before).add_(old)
    else:  # the same in fewer operations
        torch.lerp(x, delta, (after - before) / after, out=x)
        torch.add(old, x, alpha=after, out=x)


def _move_rounded(x: Tensor, delta: Tensor, ref: Tensor, old: Tensor, new: Tensor, before: float, after: float) -> None:
    """16 bits: x is the rounding of ref + scale * delta. Weights changed from outside take ref with them."""
    was, now = (torch.tensor(scale, dtype=torch.float32, device=x.device) for scale in (before, after))
    expected = torch.addcmul(ref.float(), delta, was)
    moved_outside = old != expected.to(old.dtype)
    ref.copy_(torch.where(moved_outside, old.float() - was * delta, ref.float()))
    delta.add_(new.float() - old.float())
    x.copy_(torch.addcmul(ref.float(), delta, now))
