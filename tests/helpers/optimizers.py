"""The base optimizers for the tests, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion as in arXiv 2302.06675."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, -p.grad if group["maximize"] else p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        exp_avg = state["exp_avg"]
        direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
        p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


class Overriding(torch.optim.AdamW):
    """Overrides step(), so that nothing is known about its updates."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Factored(torch.optim.Optimizer):
    """Keeps state in its own dtypes and structures, unlike any of torch's optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(t=0, wide=torch.zeros_like(p, dtype=torch.float32), pair=[torch.zeros_like(p), None])
            state["t"] += 1
            state["wide"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            state["pair"] = [state["pair"][0].lerp(p.grad, 0.1), None]
            size = (state["wide"] * (1 - 0.9 ** state["t"])).sqrt() + 1e-8
            p.addcdiv_(state["pair"][0], size, value=-self.param_groups[0]["lr"])


@dataclass(frozen=True, eq=False)
class Row:
    """One base optimizer.

    Args:
        name: its name in test ids.
        cls: its class.
        kwargs: its arguments, including `lr`.
        foreach: whether it takes `foreach=`.
        fused: whether it takes `fused=` on a CPU.
        linear: whether its update is proportional to lr.
        matrices_only: whether it refuses parameters that are not 2-D.
        maximize: whether it takes `maximize=`.
        variants_agree: whether torch's variants of it are equal up to rounding in float64.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)
    foreach: bool = True
    fused: bool = False
    linear: bool = True
    matrices_only: bool = False
    maximize: bool = True
    variants_agree: bool = True

    def build(self, params: Iterable[Any], variant: str = "for-loop", **kwargs: Any) -> torch.optim.Optimizer:
        """Builds the optimizer on these parameters, as its "for-loop", "foreach" or "fused" variant."""
        chosen = {"foreach": variant == "foreach"} if self.foreach else {}
        if variant == "fused":
            chosen = {"fused": True}
        return self.cls(params, **{**self.kwargs, **chosen, **kwargs})

    @property
    def variants(self) -> list[str]:
        """The variants other than the for-loop."""
        return ["foreach"] * self.foreach + ["fused"] * self.fused

    def __str__(self) -> str:
        return self.name


OPTIMIZERS = [
    Row("SGD", torch.optim.SGD, {"lr": 1.0}, fused=True),
    Row("SGD-momentum", torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "weight_decay": 1e-3}, fused=True),
    Row("SGD-nesterov", torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "nesterov": True}, fused=True),
    Row("Adam", torch.optim.Adam, {"lr": 1.0, "weight_decay": 1e-3}, fused=True),
    Row("AdamW", torch.optim.AdamW, {"lr": 1.0}, fused=True),
    Row("NAdam", torch.optim.NAdam, {"lr": 1.0}),
    Row("RAdam", torch.optim.RAdam, {"lr": 1.0}),
    Row("Adamax", torch.optim.Adamax, {"lr": 1.0}),
    Row("Adadelta", torch.optim.Adadelta, {"lr": 1.0}),
    Row("RMSprop", torch.optim.RMSprop, {"lr": 1.0, "momentum": 0.5}),
    Row("Rprop", torch.optim.Rprop, {"lr": 1e-2}, linear=False),  # lr is only its first step size
    Row("Adagrad", torch.optim.Adagrad, {"lr": 1.0}, fused=True),
    Row("Adafactor", torch.optim.Adafactor, {"lr": 1e-1}, linear=False),  # its step is min(lr, 1 / sqrt(t))
    # Its lr decays by 1 + lambd * lr * t, which torch keeps in float32: its variants are 5e-7 apart after 50 steps.
    Row("ASGD", torch.optim.ASGD, {"lr": 1.0}, linear=False, variants_agree=False),
    Row("Lion", Lion, {"lr": 1.0, "weight_decay": 1e-2}, foreach=False),
]
if hasattr(torch.optim, "Muon"):  # torch >= 2.9
    OPTIMIZERS.append(
        Row("Muon", torch.optim.Muon, {"lr": 1.0}, foreach=False, matrices_only=True, maximize=False),
    )
