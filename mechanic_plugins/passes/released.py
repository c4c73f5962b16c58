"""The way of a step after `freeze(release=True)`: the base's own, at the learning rate that was learned.

Nothing of Mechanic's is kept beside the base's state, and the only pass over memory is for the norm of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.param_state import needs_reference
from mechanic_plugins.core.tuner_state import SUMS, empty_sums, gradient_count, sums_of
from mechanic_plugins.distributed.sharding import align_gradients, local
from mechanic_plugins.passes.any_base import at_lrs, skipping
from mechanic_plugins.passes.plan import Closure, Decision, Plan, clip

__all__ = ["ReleasedPlan"]

_GG = SUMS.index("gg")


class ReleasedPlan(Plan):
    """Good as long as parameters, param groups and the scale stay the same."""

    def __init__(self, base: Optimizer, tuner_indices: Sequence[int], weights: Mapping[int, float]) -> None:
        """`tuner_indices` has one for each param group, `weights` each parameter's in the sums, by id."""
        super().__init__(base, (), ())
        self._tuner_indices, self._weights = tuner_indices, weights
        self._scales: list[float] = []

    def is_current(self) -> bool:
        return self.has_same_dicts()

    def sums(self, *, tuners: int, device: torch.device, with_dx: bool) -> Tensor:
        """Of the gradients alone: nothing else is asked of a scale that stays."""
        out = empty_sums(tuners, device)
        for group, index in zip(self._groups, self._tuner_indices, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                sums_of(out, index)[_GG] += self._square(params).to(device)
                gradient_count(out).add_(len(params))
        return out

    def _square(self, params: Sequence[Tensor]) -> Tensor:
        """Of this rank's share of the gradients' norm."""
        align_gradients(params)
        grads = [local(p.grad) for p in params]
        norms = torch._foreach_norm([grad.float() if needs_reference(grad.dtype) else grad for grad in grads])
        torch._foreach_mul_(norms, [math.sqrt(self._weights.get(id(p), 1.0)) for p in params])
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        if not self._scales:
            self._scales = (decision.after / unit).tolist()  # waits for the device, once
        if decision.clip is not None:
            for group in self._groups:
                for p in group["params"]:
                    clip([local(p.grad)], decision.clip)
        lrs = [group["lr"] * self._scales[i] for group, i in zip(self._groups, self._tuner_indices, strict=True)]
        with at_lrs(self.base, lrs), skipping(self.base, decision):
            return self.base.step() if closure is None else self.base.step(closure)
