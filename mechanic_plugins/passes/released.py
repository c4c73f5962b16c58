"""The way of a step after `freeze(release=True)`: the base's own, at the learning rate that was learned.

Nothing of Mechanic's is kept beside the base's state, and the only pass over memory is for the norm of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.param_state import needs_reference
from mechanic_plugins.core.tuner_state import SUMS, empty_sums, gradient_count, sums_of
from mechanic_plugins.distributed.sharding import align_gradients, local
from mechanic_plugins.passes.any_base import skipping
from mechanic_plugins.passes.plan import Closure, Decision, Group, Plan

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
        return self._state is self.base.state and list(map(id, self._groups)) == list(map(id, self.base.param_groups))

    def sums(self, *, tuners: int, device: torch.device) -> Tensor:
        out = empty_sums(tuners, device)
        for group, index in zip(self._groups, self._tuner_indices, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            align_gradients(params)
            if params:
                norms = torch.stack([norm.double().to(device) for norm in _norms(params)])
                weights = [self._weights.get(id(p), 1.0) for p in params]
                sums_of(out, index)[_GG] += (norms**2 * torch.tensor(weights, dtype=torch.float64).to(device)).sum()
                gradient_count(out).add_(len(params))
        return out

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        if not self._scales:
            self._scales = (decision.after / unit).tolist()  # waits for the device, once
        if decision.clip is not None:
            _clip([p for group in self._groups for p in group["params"]], decision.clip)
        scales = [self._scales[index] for index in self._tuner_indices]
        with _at_scaled_lr(self._groups, scales), skipping(self.base, decision):
            return self.base.step() if closure is None else self.base.step(closure)


def _norms(params: Sequence[Tensor]) -> Sequence[Tensor]:
    grads = [local(p.grad) for p in params]
    wide = [grad.float() if needs_reference(grad.dtype) else grad for grad in grads]
    return torch._foreach_norm(wide)


def _clip(params: Sequence[Tensor], factor: Tensor) -> None:
    for p in params:
        if p.grad is not None:
            grad = local(p.grad)
            grad.copy_(grad * factor.to(grad.device, torch.float32 if needs_reference(grad.dtype) else grad.dtype))


@contextmanager
def _at_scaled_lr(groups: Sequence[Group], scales: Sequence[float]) -> Iterator[None]:
    lrs = [group["lr"] for group in groups]
    try:
        for group, lr, scale in zip(groups, lrs, scales, strict=True):
            group["lr"] = lr * scale
        yield
    finally:
        for group, lr in zip(groups, lrs, strict=True):
            group["lr"] = lr
