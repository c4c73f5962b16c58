"""The published rules, x = x_ref + S * Delta: the scale also multiplies past updates, so their sum is kept.

Plain rather than fast: a copy of the weights, the base's own step, then Mechanic's move. Works with any base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import DELTA, REF, is_16_bit
from mechanic_plugins.core.tuner import Decision
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels.dots import reals
from mechanic_plugins.passes.around import AroundBase, Lent
from mechanic_plugins.passes.plan import Closure, Entry

__all__ = ["WithDelta"]


class WithDelta(AroundBase):
    """Reads each update off the weights; every parameter follows the scale."""

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        return self._step_apart(decision, unit, closure)

    def _starts(self, decision: Decision) -> dict[Tensor, Tensor | None]:
        return {}

    def _keep(self, starts: dict[Tensor, Tensor | None], lent: Sequence[Lent]) -> None:
        for p in () if self.is_complete else self.params:
            self.slots.begin(p, self.base.state[p], has_master=False)

    def _add(self, entry: Entry, x: Tensor, update: Tensor, decision: Decision) -> None:
        state, p = self.base.state[entry.param], local(entry.param).detach()
        scales = decision.befores[entry.tuner_index], float(decision.afters[entry.tuner_index])
        delta = local(state[DELTA])
        if is_16_bit(p.dtype):
            _move_rounded(p, delta, local(state[REF]), update, *scales)
        else:
            here, delta, update = reals([p, delta, update]) if p.is_complex() else (p, delta, update)
            _move(here, delta, update, *scales)


def _move(x: Tensor, delta: Tensor, update: Tensor, before: float, after: float) -> None:
    """Sets x + before * u + (after - before) * delta, with the new delta: a small move, rounded only once."""
    delta.add_(update)
    if after == 0:
        x.add_(update.mul_(before).add_(delta, alpha=-before))
    else:  # the same in fewer operations
        x.add_(torch.lerp(update, delta, (after - before) / after), alpha=after)


def _move_rounded(x: Tensor, delta: Tensor, ref: Tensor, update: Tensor, before: float, after: float) -> None:
    """For 16-bit weights: x is the rounding of ref + scale * delta. If x was changed from outside, ref moves along."""
    was, now = (torch.tensor(scale, dtype=torch.float32, device=x.device) for scale in (before, after))
    expected = torch.addcmul(ref.float(), delta, was)
    moved_outside = x != expected.to(x.dtype)
    ref.copy_(torch.where(moved_outside, x.float() - was * delta, ref.float()))
    delta.add_(update.float())
    x.copy_(torch.addcmul(ref.float(), delta, now))
