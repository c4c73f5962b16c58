"""Lion: the sign of a momentum, with decoupled weight decay (Chen et al., arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion in plain torch, without bitsandbytes.

        opt = mechanize(Lion(model.parameters()))

    Every weight moves by lr in every step, so a plain Lion needs about a third to a tenth of Adam's lr.

    Args:
        params: Parameters or param groups.
        lr: The length of a step.
        betas: The share of the momentum in the step, and in the next momentum.
        weight_decay: Decoupled: the weights shrink by lr * weight_decay in a step.
        maximize: Ascend instead of descend.
    """

    linear_in_lr = True
    """Its update is proportional to lr: Mechanic may step it at lr=1."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not 0 <= lr:
            raise ValueError(f"lr must be >= 0, got {lr}: use maximize=True to ascend.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}: Lion's authors use (0.9, 0.99).")
        if not 0 <= weight_decay:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay}: the weights would grow; 0 is off.")
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:  # torch's grouping refuses empty lists
                continue
            lists = [params, [_gradient(p) for p in params], [self._momentum(p) for p in params]]
            for same_kind, _ in self._group_tensors_by_device_and_dtype(lists).values():
                _update(*same_kind, group=group)  # type: ignore[arg-type]
        return loss

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    if p.grad.is_sparse:
        raise RuntimeError("Lion does not support sparse gradients, as it moves every weight: use sparse=False.")
    return p.grad


def _update(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], *, group: dict[str, Any]) -> None:
    params, grads, momenta = ([_real(_local(t)) for t in tensors] for tensors in (params, grads, momenta))
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    lr, (beta1, beta2) = group["lr"], group["betas"]
    directions = list(torch._foreach_lerp(momenta, grads, 1 - beta1))
    torch._foreach_sign_(directions)
    torch._foreach_mul_(directions, -lr)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_add_(params, directions)
    torch._foreach_lerp_(momenta, grads, 1 - beta2)


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _local(t: Any) -> Tensor:
    """This rank's shard of a DTensor: all operations are elementwise, and older torch cannot shard some of them."""
    part: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part
