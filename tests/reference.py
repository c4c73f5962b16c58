"""Algorithm 1 of "Mechanic: A Learning Rate Tuner" (arXiv 2306.00144), written slowly and obviously in float64.

This file judges the package. It was written from the paper, without looking at the package, and shares nothing with
it: weights are recomputed as x_ref + S * Delta in every step, sums are taken one parameter at a time, and the tuner's
vectors are numpy arrays. The letters are the paper's:

    x_ref    the weights at the start             s, r, m, v   the tuner's vectors, one entry for each beta
    Delta    the sum of the base's updates        S            the sum of s, the scale
    u        the base's update at the weights x   h            the gradient that the tuner sees
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
RULES = ("optimistic", "paper", "experiments", "optax", "theory")


class Tuner:
    """The map from h_1, h_2, ... to s. An s_init of 0 means "not known yet": s then stays 0."""

    def __init__(self, rule: str, *, betas: Sequence[float], s_init: float, eps: float) -> None:
        self.rule = {
            "optimistic": self.optimistic,
            "paper": self.paper,
            "experiments": self.experiments,
            "optax": self.optax,
            "theory": self.theory,
        }[rule]
        self.beta: Vector = np.array(betas, dtype=np.float64)
        self.n = len(betas)
        self.s_init = s_init
        self.eps = eps
        self.loss_weight = 1.0  # optimistic only: set before each step
        self.steps_grow = False  # optimistic only: with the gradient, as those of SGD
        self.usual_share = 0.3  # optimistic only: of the largest |h|, up to which a loss is weighed
        self.gain_weight = 1.0  # optimistic only: below 1 for long steps
        self.r: Vector = np.zeros(self.n)
        self.m: Vector = np.zeros(self.n)
        self.v: Vector = np.zeros(self.n)
        self.q: Vector = np.zeros(self.n)  # theory only
        self.m_1 = 0.0  # theory only: the first |h| that is not 0
        self.s: Vector = np.full(self.n, s_init) if rule in ("experiments", "optax") else np.zeros(self.n)

    def step(self, h: float, played_over_scale: float = 1.0) -> None:
        """Take h; `played_over_scale` says by how much the scale that produced x_t differed from the sum of s."""
        self.rule(h, self.s * played_over_scale)

    def paper(self, h: float, bet: Vector) -> None:
        """Algorithm 1, with |h| in m."""
        beta = self.beta
        self.m = np.maximum(beta * self.m, abs(h))
        self.v = beta**2 * self.v + h**2
        self.r = np.maximum(0.0, beta * self.r - bet * h)
        wealth = self.s_init * self.m / self.n + self.r
        self.s = np.divide(wealth, np.sqrt(self.v) + self.eps, out=np.zeros(self.n), where=self.v > 0)

    def optimistic(self, h: float, bet: Vector) -> None:
        """Algorithm 1, but losses count less than gains, and sqrt(v) is never far below that of the longest memory."""
        if self.s_init == 0:  # no bet has been placed yet
            return
        beta = self.beta
        recent = np.abs(beta - 0.99).argmin()
        usual = 0.5 * self.m[recent] if self.steps_grow else self.usual_share * self.m.max()
        self.m = np.maximum(beta * self.m, abs(h))
        self.v = beta**2 * self.v + h**2
        self.r = np.maximum(0.0, beta * self.r - bet * self.judged(h, usual))
        wealth = self.s_init * self.m / self.n + self.r
        root = np.sqrt(self.v)
        floor = self.eps + 1e-2 * root.max()
        self.s = np.divide(wealth, root + floor, out=np.zeros(self.n), where=self.v > 0)

    def judged(self, h: float, usual: float) -> float:
        """A gain counts in full but for long steps, a loss less but for what is beyond the usual size."""
        if h <= 0:
            return self.gain_weight * h
        return self.loss_weight * h if h < usual else self.loss_weight * usual + (h - usual)

    def experiments(self, h: float, bet: Vector) -> None:
        """What the authors' experiments ran."""
        self._unclamped(h, bet, h_in_r=np.full(self.n, h))

    def optax(self, h: float, bet: Vector) -> None:
        """`optax.contrib.mechanize`: as the experiments, but the h that enters r is clipped."""
        self._unclamped(h, bet, h_in_r=np.clip(h, -self.m, self.m))

    def _unclamped(self, h: float, bet: Vector, h_in_r: Vector) -> None:
        beta = self.beta
        self.m = np.maximum(beta * self.m, abs(h) + self.eps)
        self.v = beta**2 * self.v + h**2
        self.r = beta * self.r - bet * h_in_r
        wealth = self.s_init / self.n * self.m + np.maximum(0.0, self.r)
        self.s = wealth / (np.sqrt(self.v) + self.eps)

    def theory(self, h: float, bet: Vector) -> None:
        """The appendix's Algorithm 2, with |h| in m and the sign of q that its proof uses."""
        beta = self.beta
        h_hat = np.clip(h, -self.m, self.m)
        self.m = np.maximum(beta * self.m, abs(h))
        self.m_1 = self.m_1 or abs(h)
        self.q = beta * self.q - h_hat
        self.r = beta * self.r - bet * h_hat
        self.v = beta**2 * self.v + h_hat**2
        wealth = self.s_init * self.m_1 / self.n + self.r
        if not self.m_1:
            return
        root = np.sqrt(4 * self.m**2 + self.v)
        self.s = wealth / (root + self.eps) * np.clip(self.q / root, 0.0, 1.0)


class Part:
    """The parameters that share one scale (all of them, or one group's), and the tuner of that scale."""

    def __init__(
        self,
        indices: list[int],
        tuner: Tuner,
        *,
        first_move: float | None,
        haste: float,
        smoothing: float,
        max_scale: float,
        hindsight: float,
        own_warmup: bool,
    ) -> None:
        self.indices = indices
        self.tuner = tuner
        self.first_move = first_move
        self.haste = haste  # optimistic only: how little the scale is smoothed at first
        self.smoothing = smoothing
        self.max_scale = max_scale
        self.hindsight = hindsight
        self.own_warmup = own_warmup
        self.is_optimistic = tuner.rule == tuner.optimistic
        self.steps_are_signs = False
        self.highest_lr = 0.0
        self.gradients = 0  # how many of this part's gradients were not zero
        self.longest = 0.0  # the longest of them, for the optimistic rule
        self.kept = 1.0  # what Delta is multiplied by as the scale changes
        self.S = 0.0
        self.played = 0.0  # the smoothed S; equal to it without smoothing
        self.h = 0.0

    def step(
        self,
        x: Tensors,
        Delta: Tensors,
        g: Tensors,
        s_decay: float,
        lr: float = 1.0,
        growth: float = 1.0,
        penalty: Sequence[float] = (),
    ) -> None:
        """Tune at the weights x, with the sum of updates Delta that they were made of and the gradient g there.

        `growth` is how much longer the gradient is than any before it, 1 if it is not. `penalty` holds, for each
        tensor, the weight decay that the base adds to the gradient: then it minimises penalty / 2 * |x|^2 as well.
        """
        dg, gg, xx, dx, dd = inner(Delta, g), inner(g, g), inner(x, x), inner(Delta, x), inner(Delta, Delta)
        if self.first_move is not None and dd > 0:
            self.find_s_init(self.first_move * (1 + math.sqrt(xx)) / math.sqrt(dd), gg, growth)
        self.gradients += gg > 0 and lr > 0
        if self.is_optimistic:
            share = lr / self.highest_lr if self.highest_lr > 0 else 1.0
            self.tuner.loss_weight = 1 - 0.9 * share ** (1 / 3)
            if self.first_move is not None and self.tuner.s_init > 0:  # a fifth of the first weights is a long step
                step = self.first_move * self.played / self.tuner.s_init
                self.tuner.loss_weight = max(self.tuner.loss_weight, min(step / 0.2, 1.0) ** 2)
                allowed = self.first_move if self.steps_are_signs else 0.2
                self.tuner.gain_weight = min(allowed / step, 1.0) ** 2 if step > 0 else 1.0
        decay = s_decay * self.played * math.sqrt(gg) * dx / math.sqrt(xx) if xx > 0 else 0.0
        self.h = dg + decay
        if self.is_optimistic:
            self.h += sum(k * inner([d], [w]) for k, d, w in zip(penalty, Delta, x, strict=False))

        self.tuner.step(self.h, self.played / self.S if self.S > 0 else 1.0)
        if self.tuner.s.sum() > 0:
            self.tuner.s = self.tuner.s * min(1.0, self.max_scale / self.tuner.s.sum())
        self.S = float(self.tuner.s.sum())
        before, self.played = self.played, self.smoothed(self.S)
        self.kept = self.kept_of_Delta(before, self.played)

    def find_s_init(self, measured: float, gg: float, growth: float) -> None:
        """By the first update; the optimistic rule waits for two, and for later ones of more than twice the length."""
        if not self.is_optimistic:
            self.tuner.s_init = self.tuner.s_init or measured
            return
        if self.tuner.s_init > 0:  # of one update: Delta holds all but the first two
            self.tuner.s_init = min(self.tuner.s_init, 2 * measured * max(self.gradients - 2, 1))
        elif self.gradients >= 2 and gg > 0:
            self.tuner.s_init = measured * self.gradients / growth

    def meet_lr(self, lr: float) -> float:
        """What the sum of updates is to be multiplied by, as though they had all been made at a new highest lr.

        The scale is divided by it, so that the weights stay, and everything that the tuner remembers follows.
        """
        if lr <= self.highest_lr:
            return 1.0
        growth = lr / self.highest_lr if self.highest_lr > 0 else 1.0
        self.highest_lr = lr
        if not self.own_warmup:
            return 1.0
        self.S, self.played = self.S / growth, self.played / growth
        self.tuner.s = self.tuner.s / growth
        self.tuner.m = self.tuner.m * growth
        self.tuner.v = self.tuner.v * growth**2
        if self.first_move is not None:
            self.tuner.s_init = self.tuner.s_init / growth
        return growth

    def kept_of_Delta(self, before: float, after: float) -> float:
        """With it the weights go only the share `hindsight` of the way from before * Delta to after * Delta.

        The optimistic rule begins with the update of the step in which it first plays: those before were all made at
        the same weights, and together would be one step that is several times as long.
        """
        if before == 0 < after and self.is_optimistic:
            return 0.0
        if before == 0 or after == 0:
            return 1.0
        return (before + self.hindsight * (after - before)) / after

    def smoothed(self, S: float) -> float:
        """The log-average of the scales played so far and S; an S of 0 makes it 0, and the next S starts anew."""
        c = self.smoothing
        if self.is_optimistic:  # a window of all steps so far or more, up to what the constant means
            c = min(c, self.gradients / (self.gradients + self.haste))
        if c == 0 or S == 0 or self.played == 0:
            return S
        return math.exp(c * math.log(self.played) + (1 - c) * math.log(S))


class Reference:
    """Mechanic around a torch optimizer.

    Usage: `reference = Reference(params, lambda copies: torch.optim.SGD(copies, lr=1.0, foreach=False))`, then in each
    step `reference.step(grads)` with the gradients at `reference.x`, None where a parameter has none. Learning rates
    are set on `reference.base`.
    """

    def __init__(
        self,
        params: Tensors,
        base_factory: BaseFactory,
        *,
        betas: Sequence[float] = BETAS,
        s_init: float | Literal["auto"] = "auto",
        first_move: float | None = None,
        s_decay: float = 0.0,
        eps: float | None = None,
        rule: str = "optimistic",
        normalize_lr: bool = True,
        smoothing: float | None = None,
        max_scale: float | None = None,
        scope: Literal["all", "group"] = "all",
        hindsight: float | None = None,
        own_warmup: bool | None = None,
        max_grad_norm: float = math.inf,
        total_steps: int | None = None,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.grad_norm = 0.0  # before clipping
        self.x_ref = [p.detach().to(torch.float64, copy=True) for p in params]
        self.x = [p.clone() for p in self.x_ref]
        self.Delta = [torch.zeros_like(p) for p in self.x_ref]
        self.copies = [p.clone() for p in self.x_ref]  # what the base steps
        self.base_factory = base_factory
        self.base = base_factory(self.copies)
        self.had_grad = [False for _ in self.x]
        self.c: float | None = None if normalize_lr else 1.0
        self.s_decay = s_decay
        is_ours = rule == "optimistic"
        is_sgd, is_lion = (is_ours and name in type(self.base).__name__ for name in ("SGD", "Lion"))
        # what is not given depends on the thousands of steps in the run, if they are known
        length = max(total_steps, 140) / 1000 if total_steps is not None and is_ours and not is_sgd else 1.0
        slow = min(max(2 * length - 2, 0.0), 1.0)
        usual_move = 5e-4 if is_sgd else 3e-3
        haste = (usual_move if first_move is None else first_move) / 6e-3 * max(1.0, 0.5 / length) ** 3
        if first_move is None:
            first_move = usual_move * max(1.0, length**-0.5) - slow * 1.6e-3
        if smoothing is None:
            smoothing = 0.97 + 0.02 * slow if is_ours else 0.0
        if hindsight is None:
            hindsight = (0.3 if is_sgd else 0.15) * min(1.0, length) if is_ours else 1.0
        own_warmup = is_ours if own_warmup is None else own_warmup
        if eps is None:
            eps = {"optimistic": 0.0, "experiments": 1e-10}.get(rule, 1e-8)
        self.skipped = 0
        self.first_lrs: dict[int, float] = {}

        groups = [self._indices(group) for group in self.base.param_groups]
        parts = groups if scope == "group" else [[i for indices in groups for i in indices]]
        number = 0.0 if s_init == "auto" else s_init
        self.scope = scope
        self.parts = [
            Part(
                indices,
                Tuner(rule, betas=betas, s_init=number, eps=eps),
                first_move=first_move if s_init == "auto" else None,
                haste=haste,
                smoothing=smoothing,
                max_scale=math.inf if max_scale is None else max_scale,
                hindsight=hindsight,
                own_warmup=own_warmup,
            )
            for indices in parts
        ]
        for part in self.parts:
            part.tuner.steps_grow = is_sgd
            part.tuner.usual_share = min(1.0, 0.3 * max(1.0, 0.5 / length))
            part.steps_are_signs = is_lion

    def _indices(self, group: dict[str, Any]) -> list[int]:
        return [i for i, copy in enumerate(self.copies) if any(copy is p for p in group["params"])]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Steps from the weights x_t, at which the gradients were taken, to x_{t+1}."""
        grads = self.clipped(grads)
        self.begin_anew(self.minimised_gradients(grads))
        longer = [self.growth_of(part, self.minimised_gradients(grads)) for part in self.parts]
        if max(longer) > 100 and self.parts[0].is_optimistic:
            for part, growth in zip(self.parts, longer, strict=True):
                part.longest = part.longest * 10 if growth > 100 else max(0.999, growth) * part.longest
            self.skipped += 1
            return
        grads = self.limit_growth(grads, longer)
        self.had_grad = [had or g is not None for had, g in zip(self.had_grad, grads, strict=True)]
        g = self.minimised_gradients(grads)
        u = self.base_update(grads)
        self.find_c()
        self.note_first_lrs()
        for part, growth_of_g in zip(self.parts, longer, strict=True):
            if self.c is not None:  # with no learning rate seen yet Delta is 0: there is nothing to tune
                growth = part.meet_lr(self.lr_of(part))
                for i in part.indices:
                    self.Delta[i] = self.Delta[i] * growth
                counted = [i for i in part.indices if self.had_grad[i]]
                x, Delta = [self.x[i] for i in counted], [self.Delta[i] for i in counted]
                lr = self.lr_of(part)
                penalty = [self.penalty_of(i) for i in counted]
                part.step(x, Delta, [g[i] for i in counted], self.s_decay * self.c, lr, max(1.0, growth_of_g), penalty)
            for i in part.indices:
                self.Delta[i] = part.kept * self.Delta[i] + u[i]
                self.x[i] = self.x_ref[i] + part.played * self.Delta[i]
            part.longest = max(0.999 * part.longest, self.norm_of(part, g))

    def clipped(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As one long vector, no longer than `max_grad_norm`: what tuner and base see of them."""
        whole = torch.cat([torch.zeros(1).double(), *(grad.double().flatten() for grad in grads if grad is not None)])
        self.grad_norm = whole.norm().item()
        if self.max_grad_norm >= self.grad_norm + 1e-6:
            return list(grads)
        share = self.max_grad_norm / (self.grad_norm + 1e-6)  # torch.nn.utils.clip_grad_norm_ adds that too
        return [None if grad is None else share * grad.double() for grad in grads]

    def limit_growth(self, grads: Sequence[Tensor | None], longer: list[float]) -> list[Tensor | None]:
        """What SGD sees of a part is at most a quarter longer than the longest before it. Not at an lr of 0."""
        seen = list(grads)
        is_stepped = any(group["lr"] > 0 for group in self.base.param_groups)
        for k, part in enumerate(self.parts):
            if part.tuner.steps_grow and is_stepped and longer[k] > 1.25:
                for i in part.indices:
                    grad = seen[i]
                    seen[i] = None if grad is None else 1.25 / longer[k] * grad.double()
                longer[k] = 1.25
        return seen

    def begin_anew(self, g: Tensors) -> None:
        """If the only gradient so far was a hundred times as long as this one, it was an outlier, and is forgotten."""
        only_one = max(part.gradients for part in self.parts) == 1
        was_outlier = any(0 < 100 * self.norm_of(part, g) < part.longest for part in self.parts)
        if not (self.parts[0].is_optimistic and only_one and was_outlier):
            return
        groups = self.base.param_groups
        self.base = self.base_factory(self.copies)
        for new, old in zip(self.base.param_groups, groups, strict=True):
            new.update({key: value for key, value in old.items() if key != "params"})
        self.Delta = [torch.zeros_like(p) for p in self.x_ref]
        for part in self.parts:
            part.gradients, part.longest, part.highest_lr = 0, 0.0, 0.0

    def norm_of(self, part: Part, g: Tensors) -> float:
        """Of the part's gradient."""
        mine = [g[i] for i in part.indices]
        return math.sqrt(inner(mine, mine))

    def growth_of(self, part: Part, g: Tensors) -> float:
        """How much longer the part's gradient is than the longest before it, which fades over a thousand steps."""
        return self.norm_of(part, g) / part.longest if part.longest > 0 else 1.0

    def note_first_lrs(self) -> None:
        """Each group's first learning rate above 0; a group that comes later counts for no more than the others."""
        ceiling = max(self.first_lrs.values(), default=math.inf)
        for k, group in enumerate(self.base.param_groups):
            first = float(group.get("initial_lr", group["lr"]))
            if k not in self.first_lrs and first > 0:
                self.first_lrs[k] = min(first, ceiling)

    def lr_of(self, part: Part) -> float:
        """Where the schedule of the part's groups stands: their highest learning rate, if they have all moved alike."""
        groups = list(enumerate(self.base.param_groups))
        if self.scope == "group":
            groups = [(k, group) for k, group in groups if set(self._indices(group)) & set(part.indices)]
        highest = max(float(group["lr"]) for _, group in groups)
        ratios = [float(group["lr"]) / self.first_lrs[k] for k, group in groups if k in self.first_lrs]
        if not ratios or min(ratios) >= max(ratios) * (1 - 1e-9):
            return highest
        return min(ratios) * max(self.first_lrs[k] for k, _ in groups if k in self.first_lrs)

    def penalty_of(self, i: int) -> float:
        """The weight decay of a parameter, where the base adds it to the gradient."""
        added_by = ("SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "ASGD")
        kind = next(kind for kind in type(self.base).__mro__ if kind.__module__.startswith("torch.optim"))
        group = next(group for group in self.base.param_groups if i in self._indices(group))
        is_added = kind.__name__ in added_by and not group.get("decoupled_weight_decay", False)
        return float(group["weight_decay"]) if is_added else 0.0

    def minimised_gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of what is minimised, 0 where there is none."""
        g = [torch.zeros_like(x) if grad is None else grad.double() for x, grad in zip(self.x, grads, strict=True)]
        for group in self.base.param_groups:
            if group.get("maximize", False):
                for i in self._indices(group):
                    g[i] = -g[i]
        return g

    def base_update(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """What the base, standing at x_t, would add to it."""
        for copy, x, grad in zip(self.copies, self.x, grads, strict=True):
            copy.copy_(x)
            copy.grad = None if grad is None else grad.to(torch.float64, copy=True)
        self.base.step()
        return [copy - x for copy, x in zip(self.copies, self.x, strict=True)]

    def find_c(self) -> None:
        """At the first learning rate above 0: the constants, stated for a rate of 1, become those for a rate of c."""
        lr = max(float(group.get("initial_lr", group["lr"])) for group in self.base.param_groups)
        if self.c is None and lr > 0:
            self.c = lr
            for part in self.parts:
                part.tuner.s_init /= lr
                part.tuner.s = part.tuner.s / lr
                part.tuner.eps *= lr

    def vectors(self, name: str) -> Vector:
        """The tuner's s, r, m or v: n entries, or with scope="group" a row of them for each group."""
        rows = np.stack([getattr(part.tuner, name) for part in self.parts])
        return rows if self.scope == "group" else rows[0]


def inner(a: Tensors, b: Tensors) -> float:
    """The inner product of two lists of tensors."""
    return sum((p * q).sum().item() for p, q in zip(a, b, strict=True))
