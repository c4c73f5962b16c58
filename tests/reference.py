"""Algorithm 1 of "Mechanic: A Learning Rate Tuner" (arXiv 2306.00144), written slowly and obviously in float64.

This is the reference for the package. It was written from the paper, without looking at the package, and shares no
code with it: weights are recomputed as x_ref + S * Delta in every step, sums are taken one parameter at a time, and
the tuner's vectors are numpy arrays. The letters are the paper's:

    x_ref    the weights at the start             s, r, m, v   the tuner's vectors, one entry for each beta
    Delta    the sum of the base's updates        S            the sum of s, the scale
    u        the base's update at the weights x   h            the gradient that the tuner sees

tests/reference_default.py is the reference for the default rule, built around a base in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]
Tensors = Sequence[Tensor]
BaseFactory = Callable[[list[Tensor]], torch.optim.Optimizer]

BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
RULES = ("paper", "experiments", "optax", "theory")


class Around:
    """Wraps a torch optimizer and computes its updates at the weights x, which subclasses move.

    Usage: `judge = Judge(params, lambda copies: torch.optim.SGD(copies, lr=1.0, foreach=False))`, then in each step
    `judge.step(grads)` with the gradients at `judge.x`, or None for a parameter without one. Learning rates are set
    on `judge.base`.
    """

    def __init__(
        self,
        params: Tensors,
        base_factory: BaseFactory,
        *,
        scope: Literal["all", "group"] = "all",
        max_scale: float | None = None,
        max_grad_norm: float = math.inf,
    ) -> None:
        self.max_scale = math.inf if max_scale is None else max_scale
        self.max_grad_norm = max_grad_norm
        self.grad_norm = 0.0  # before clipping
        self.x_ref = [p.detach().to(torch.float64, copy=True) for p in params]
        self.x = [p.clone() for p in self.x_ref]
        self.copies = [p.clone() for p in self.x_ref]  # the weights that the base steps
        self.base_factory = base_factory
        self.base = base_factory(self.copies)
        self.had_grad = [False for _ in self.x]
        self.skipped = 0
        self.scope = scope
        groups = [self.indices_of(group) for group in self.base.param_groups]
        self.shares = groups if scope == "group" else [[i for indices in groups for i in indices]]

    def indices_of(self, group: dict[str, Any]) -> list[int]:
        return [i for i, copy in enumerate(self.copies) if any(copy is p for p in group["params"])]

    def clipped(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients as tuner and base see them, with a total norm of at most `max_grad_norm`."""
        whole = torch.cat([torch.zeros(1).double(), *(grad.double().flatten() for grad in grads if grad is not None)])
        self.grad_norm = whole.norm().item()
        if self.max_grad_norm >= self.grad_norm + 1e-6:
            return list(grads)
        share = self.max_grad_norm / (self.grad_norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
        return [None if grad is None else share * grad.double() for grad in grads]

    def minimised_gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of what is minimised, 0 if there is none."""
        g = [torch.zeros_like(x) if grad is None else grad.double() for x, grad in zip(self.x, grads, strict=True)]
        for group in self.base.param_groups:
            if group.get("maximize", False):
                for i in self.indices_of(group):
                    g[i] = -g[i]
        return g

    def base_update(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """What the base would add to the weights at x_t."""
        for copy, x, grad in zip(self.copies, self.x, grads, strict=True):
            copy.copy_(x)
            copy.grad = None if grad is None else grad.to(torch.float64, copy=True)
        self.base.step()
        return [copy - x for copy, x in zip(self.copies, self.x, strict=True)]


class Tuner:
    """Maps h_1, h_2, ... to s."""

    def __init__(self, rule: str, *, betas: Sequence[float], s_init: float, eps: float) -> None:
        self.rule = {
            "paper": self.paper,
            "experiments": self.experiments,
            "optax": self.optax,
            "theory": self.theory,
        }[rule]
        self.beta: Vector = np.array(betas, dtype=np.float64)
        self.n = len(betas)
        self.s_init = s_init
        self.eps = eps
        self.r: Vector = np.zeros(self.n)
        self.m: Vector = np.zeros(self.n)
        self.v: Vector = np.zeros(self.n)
        self.q: Vector = np.zeros(self.n)  # theory only
        self.m_1 = 0.0  # theory only: the first nonzero |h|
        self.s: Vector = np.full(self.n, s_init) if rule in ("experiments", "optax") else np.zeros(self.n)

    def step(self, h: float) -> None:
        self.rule(h)

    def paper(self, h: float) -> None:
        """Algorithm 1 with |h| in m."""
        beta = self.beta
        self.m = np.maximum(beta * self.m, abs(h))
        self.v = beta**2 * self.v + h**2
        self.r = np.maximum(0.0, beta * self.r - self.s * h)
        wealth = self.s_init * self.m / self.n + self.r
        self.s = np.divide(wealth, np.sqrt(self.v) + self.eps, out=np.zeros(self.n), where=self.v > 0)

    def experiments(self, h: float) -> None:
        """The rule of the authors' experiments."""
        self._unclamped(h, h_in_r=np.full(self.n, h))

    def optax(self, h: float) -> None:
        """`optax.contrib.mechanize`: like the experiments, but with a clipped h in r."""
        self._unclamped(h, h_in_r=np.clip(h, -self.m, self.m))

    def _unclamped(self, h: float, h_in_r: Vector) -> None:
        beta = self.beta
        self.m = np.maximum(beta * self.m, abs(h) + self.eps)
        self.v = beta**2 * self.v + h**2
        self.r = beta * self.r - self.s * h_in_r
        wealth = self.s_init / self.n * self.m + np.maximum(0.0, self.r)
        self.s = wealth / (np.sqrt(self.v) + self.eps)

    def theory(self, h: float) -> None:
        """The appendix's Algorithm 2 with |h| in m and with q's sign as in its proof."""
        beta = self.beta
        h_hat = np.clip(h, -self.m, self.m)
        self.m = np.maximum(beta * self.m, abs(h))
        self.m_1 = self.m_1 or abs(h)
        self.q = beta * self.q - h_hat
        self.r = beta * self.r - self.s * h_hat
        self.v = beta**2 * self.v + h_hat**2
        wealth = self.s_init * self.m_1 / self.n + self.r
        if not self.m_1:
            return
        root = np.sqrt(4 * self.m**2 + self.v)
        self.s = wealth / (root + self.eps) * np.clip(self.q / root, 0.0, 1.0)


class Part:
    """The parameters that share one scale (all of them, or one group's), and the tuner of that scale."""

    def __init__(self, indices: list[int], tuner: Tuner) -> None:
        self.indices = indices
        self.tuner = tuner
        self.S = 0.0
        self.h = 0.0

    def step(self, x: Tensors, Delta: Tensors, g: Tensors, s_decay: float, max_scale: float) -> None:
        """Tunes at the weights x, given the sum of updates Delta that led to them and the gradient g there."""
        xx = inner(x, x)
        decay = s_decay * self.S * math.sqrt(inner(g, g)) * inner(Delta, x) / math.sqrt(xx) if xx > 0 else 0.0
        self.h = inner(Delta, g) + decay
        self.tuner.step(self.h)
        if self.tuner.s.sum() > 0:
            self.tuner.s = self.tuner.s * min(1.0, max_scale / self.tuner.s.sum())
        self.S = float(self.tuner.s.sum())


class Reference(Around):
    """Mechanic by a published rule."""

    def __init__(
        self,
        params: Tensors,
        base_factory: BaseFactory,
        *,
        rule: str = "paper",
        betas: Sequence[float] = BETAS,
        s_init: float = 1e-8,
        s_decay: float = 0.01,
        eps: float = 1e-8,
        normalize_lr: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(params, base_factory, **options)
        self.Delta = [torch.zeros_like(p) for p in self.x_ref]
        self.c: float | None = None if normalize_lr else 1.0
        self.s_decay = s_decay
        self.parts = [Part(share, Tuner(rule, betas=betas, s_init=s_init, eps=eps)) for share in self.shares]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Steps from the weights x_t, at which the gradients were taken, to x_{t+1}."""
        grads = self.clipped(grads)
        self.had_grad = [had or g is not None for had, g in zip(self.had_grad, grads, strict=True)]
        g = self.minimised_gradients(grads)
        u = self.base_update(grads)
        self.find_c()
        for part in self.parts:
            if self.c is not None:  # before the first learning rate above 0, Delta is 0 and there is nothing to tune
                counted = [i for i in part.indices if self.had_grad[i]]
                x, Delta = [self.x[i] for i in counted], [self.Delta[i] for i in counted]
                part.step(x, Delta, [g[i] for i in counted], self.s_decay * self.c, self.max_scale)
            for i in part.indices:
                self.Delta[i] = self.Delta[i] + u[i]
                self.x[i] = self.x_ref[i] + part.S * self.Delta[i]

    def find_c(self) -> None:
        """At the first learning rate above 0, converts the constants, given for a rate of 1, to a rate of c."""
        lr = max(float(group.get("initial_lr", group["lr"])) for group in self.base.param_groups)
        if self.c is None and lr > 0:
            self.c = lr
            for part in self.parts:
                part.tuner.s_init /= lr
                part.tuner.s = part.tuner.s / lr
                part.tuner.eps *= lr

    def vectors(self, name: str) -> Vector:
        """The tuner's s, r, m or v: n entries, or with scope="group" a row of n for each group."""
        rows = np.stack([getattr(part.tuner, name) for part in self.parts])
        return rows if self.scope == "group" else rows[0]


def inner(a: Tensors, b: Tensors) -> float:
    """The inner product of two lists of tensors."""
    return sum((p * q).sum().item() for p, q in zip(a, b, strict=True))
