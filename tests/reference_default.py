"""The default rule, written slowly and obviously in float64. The package's reference, which shares no code with it.

All that is kept of past moves is the weights' displacement D = x - x_ref. For the parameters that share a scale:

    N     = the number of nonzero gradients
    size  = the cubed mean of min(|x|, 1)^(1/3) over the nonzero weights at the start; at least |D| / sqrt(N) / e^3
    w     = lr / highest lr: the weight of a step
    p     = w * S / mean of S over the run, at most w: the weight of its evidence
    U^2   = the mean of |D|^2 / sum((S * lr)^2) over the run, by w; at first U = 2 |u| / lr of an update not applied
    z     = -<D, g>, including the penalty's gradient in g if the base adds one
    rho   = sum(p * z) / sqrt(sum(p * z^2) * 40); these sums fade by 1 - p / 40 per step
    S     = PRIOR * size * N^(3/8) / (highest lr * U) * exp(3 * rho)

In a step whose lr is higher than any before it or announced, the highest lr is what 40 more such rises would lead to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from reference import Around, BaseFactory, Tensors, Vector, inner
from torch import Tensor

PRIOR = 0.35
"""How far a step should move the weights, as a share of their size."""


class Rule:
    """The parameters that share one scale, and their tuner's state."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.longest = 0.0  # the longest gradient; reset by a false start, like the rest
        self.S = 0.0
        self.h = 0.0  # z per unit of S
        self.seen_lr = self.first_top = 0.0  # the highest so far or announced, and as announced in the first step
        self.highest_lr = 0.0  # like seen_lr, but where lr rises what it will rise to
        self.gradients = 0
        self.size = self.gone = 0.0
        self.touched = 0
        self.U = 0.0
        self.path = 0.0  # the sum of (S * lr)^2
        self.elapsed = 0.0  # the sum of lr
        self.travelled = 0.0  # the sum of S * lr
        self.r = self.v = self.m = 0.0

    def measure(self, x: Tensors, g: Tensors) -> None:
        """Measures size once, over the parameters that have a gradient."""
        weights = np.concatenate([p.numpy().ravel() for p in x])
        nonzero = np.abs(weights[weights != 0])
        touched = sum(int((p != 0).sum()) for p in g)
        self.size = float(np.cbrt(nonzero.clip(max=1)).mean() ** 3) if len(nonzero) else 0.5
        self.touched = touched

    def count(self, g: Tensors) -> None:
        """Takes the largest count of three gradients: layers behind one that starts at 0 have none at first."""
        if self.gradients < 3:
            self.touched = max(self.touched, sum(int((p != 0).sum()) for p in g))

    def gather(self, z: float, square: float, w: float) -> None:
        run = self.elapsed / self.highest_lr
        self.U = math.sqrt((run * self.U**2 + w * square) / (run + w))
        mean = self.travelled / self.elapsed
        p = w * min(1.0, self.S / mean)
        kept = 1 - p / 40
        self.r = kept * self.r + p * z
        self.v = kept * self.v + p * z**2
        self.m = kept * self.m + p

    def choose(self) -> None:
        if self.U == 0 or self.highest_lr == 0:
            return
        rho = self.r / math.sqrt(40 * self.v) if self.v > 0 else 0.0
        size = max(self.size, self.gone / math.sqrt(self.touched) / math.e**3) * self.touched**0.375
        self.S = PRIOR * size / (self.highest_lr * self.U) * math.exp(3 * rho)


class Default(Around):
    """Mechanic by the default rule."""

    def __init__(self, params: Tensors, base_factory: BaseFactory, *, rule: str = "relative", **options: Any) -> None:
        assert rule == "relative"
        super().__init__(params, base_factory, **options)
        self.waiting = [torch.zeros_like(p) for p in self.x_ref]  # updates not applied
        self.parts = [Rule(share) for share in self.shares]
        self.has_begun = False  # whether a learning rate has been above 0
        self.last_lrs: dict[int, float] = {}  # each group's, steps left out in which all are 0
        self.full_lrs: dict[int, float] = {}  # where the schedule stands at 1

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Steps from the weights x_t, at which the gradients were taken, to x_{t+1}."""
        grads = self.clipped(grads)
        g = self.minimised_gradients(grads)
        norms = [self.norm_of(part, g) for part in self.parts]
        if max(part.gradients for part in self.parts) == 1 and any(
            max(norm, part.longest) > 100 * min(norm, part.longest) > 0
            for part, norm in zip(self.parts, norms, strict=True)
        ):
            self.begin_anew()
        outliers = [norm > 100 * part.longest > 0 for part, norm in zip(self.parts, norms, strict=True)]
        for part, norm, is_outlier in zip(self.parts, norms, outliers, strict=True):
            part.longest = 100 * part.longest if is_outlier else max(part.longest, norm)
        if any(outliers):
            self.skipped += 1
            return
        self.had_grad = [had or grad is not None for had, grad in zip(self.had_grad, grads, strict=True)]
        u = self.base_update(grads)
        self.begin()
        self.note_lrs()
        for part, norm in zip(self.parts, norms, strict=True):
            lr, held = self.lr_of(part), self.is_held()
            part.highest_lr = max(part.seen_lr, lr)
            if lr > part.seen_lr > 0:
                part.highest_lr = lr + 40 * (lr - part.seen_lr)
            part.seen_lr = max(part.seen_lr, lr)
            was = part.S
            if not held:
                self.tune(part, grads, g, norm, lr)
            self.move(part, was, u, lr)

    def begin(self) -> None:
        """At the first learning rate above 0, reads the highest lr that a schedule has announced."""
        if self.has_begun or not any(group.get("initial_lr", group["lr"]) > 0 for group in self.base.param_groups):
            return
        self.has_begun = True
        for part in self.parts:
            for group in self.base.param_groups:
                if set(self.indices_of(group)) & set(part.indices):
                    announced = (group.get(key) or 0.0 for key in ("lr", "initial_lr", "max_lr"))
                    part.seen_lr = part.first_top = max(part.seen_lr, *map(float, announced))

    def note_lrs(self) -> None:
        """Notes each group's lr, and what it would be with the schedule at 1.

        The group that moved least moved with the schedule. Others that moved by another factor were changed by hand; if
        a scheduler knows them, which may give each group its own curve, only those that jumped by a factor of 3.
        """
        groups = [(k, group, float(group["lr"])) for k, group in enumerate(self.base.param_groups)]
        if all(lr == 0 for _, _, lr in groups):
            return
        before = dict(self.last_lrs)
        known = [(k, group, lr) for k, group, lr in groups if before.get(k, 0.0) > 0]
        factor = min((lr / before[k] for k, _, lr in known if lr > 0), key=lambda x: abs(math.log(x)), default=1.0)
        for k, group, lr in known:
            change, limit = lr / (before[k] * factor), 3.0 if "initial_lr" in group else 1 + 1e-9
            self.full_lrs[k] *= 1.0 if 1 / limit < change < limit else change
            self.last_lrs[k] = lr
        place = min((lr / self.full_lrs[k] for k, _, lr in known if lr > 0), default=None)
        for k, group, lr in groups:
            if lr > 0 and before.get(k, 0.0) == 0:
                announced = max(float(group.get(key) or 0.0) for key in ("lr", "initial_lr", "max_lr"))
                is_told = place is None or (k not in before and "initial_lr" in group)
                self.last_lrs[k], self.full_lrs[k] = lr, announced if is_told else lr / place

    def lr_of(self, part: Rule) -> float:
        """The current lr of these parameters: what the highest would be, had no group been changed by hand."""
        groups = [(k, g) for k, g in enumerate(self.base.param_groups) if set(self.indices_of(g)) & set(part.indices)]
        highest = max(float(group["lr"]) for _, group in groups)
        full = [self.full_lrs[k] for k, group in groups if group["lr"] > 0]
        if len(groups) == 1 or not full:
            return highest
        places = [float(group["lr"]) / self.full_lrs[k] for k, group in groups if group["lr"] > 0]
        if max(places) - min(places) <= 1e-9 * max(places) and math.isclose(max(full), part.first_top):
            return highest
        return min(places) * part.first_top

    def is_held(self) -> bool:
        return all(float(group["lr"]) == 0 for group in self.base.param_groups)

    def tune(self, part: Rule, grads: Sequence[Tensor | None], g: Tensors, norm: float, lr: float) -> None:
        mine = [i for i in part.indices if self.had_grad[i]]
        D = [self.x[i] - self.x_ref[i] if part.S > 0 else self.waiting[i] for i in mine]
        pull = [g[i] + self.penalty_of(i) * self.x[i] for i in mine]
        part.h = inner(D, pull) / (part.S or 1.0)
        if norm == 0:
            return
        if part.size == 0:
            with_gradient = [i for i in part.indices if grads[i] is not None]
            part.measure([self.x[i] for i in with_gradient], [g[i] for i in with_gradient])
            part.h = 0.0
        else:
            part.gone = math.sqrt(inner(D, D)) if part.S > 0 else 0.0
            part.count([g[i] for i in part.indices if grads[i] is not None])
            if part.path > 0 and part.S > 0:
                part.gather(-inner(D, pull), inner(D, D) / part.path, lr / part.highest_lr)
            elif part.path > 0:
                part.U = 2 * math.sqrt(inner(D, D) / part.path)
        part.gradients += 1
        part.choose()
        part.S = min(part.S, self.max_scale)

    def move(self, part: Rule, was: float, u: Tensors, lr: float) -> None:
        for i in part.indices:
            if part.S > 0:
                self.x[i] = self.x[i] + part.S * u[i]
            else:
                self.waiting[i] = self.waiting[i] + u[i]
        if part.S > 0:
            part.path = (part.path if was > 0 else 0.0) + (part.S * lr) ** 2
            part.elapsed += lr
            part.travelled += part.S * lr
        elif lr > 0:
            part.path = lr**2

    def begin_anew(self) -> None:
        """Forgets the only gradient so far, which was a hundred times longer or shorter than this one."""
        groups = self.base.param_groups
        self.base = self.base_factory(self.copies)
        for new, old in zip(self.base.param_groups, groups, strict=True):
            new.update({key: value for key, value in old.items() if key != "params"})
        self.waiting = [torch.zeros_like(p) for p in self.x_ref]
        self.had_grad = [False for _ in self.x]
        self.parts = [Rule(part.indices) for part in self.parts]
        self.has_begun, self.last_lrs, self.full_lrs = False, {}, {}

    def norm_of(self, part: Rule, g: Tensors) -> float:
        """The norm of the part's gradient."""
        mine = [g[i] for i in part.indices]
        return math.sqrt(inner(mine, mine))

    def penalty_of(self, i: int) -> float:
        """The weight decay of a parameter if the base adds it to the gradient, otherwise 0."""
        added_by = ("SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "ASGD")
        kind = next(kind for kind in type(self.base).__mro__ if kind.__module__.startswith("torch.optim"))
        group = next(group for group in self.base.param_groups if i in self.indices_of(group))
        is_added = kind.__name__ in added_by and not group.get("decoupled_weight_decay", False)
        return float(group["weight_decay"]) if is_added else 0.0

    def vectors(self, name: str) -> Vector:
        """S, or the sums of z, z^2 and 1 (r, v, m): one entry, or with scope="group" a row for each group."""
        rows = np.array([[getattr(part, name.replace("s", "S"))] for part in self.parts])
        return rows if self.scope == "group" else rows[0]
