"""The default rule, written slowly and obviously in float64. The package's reference, which shares no code with it.

All that is kept of past moves is the weights' displacement D = x - x_ref. For the parameters that share a scale:

    H  = the highest lr so far; t = the number of gradients; f = min(1, t / 20); w = f * lr / H; n = the sum of w
    a  = |u| / |x| of a layer at a measured step, per unit of S * lr: in the spectral norm for a matrix, by eight power
         iterations, else in the Euclidean norm; the lower median over the matrices or over the vectors, if larger
    A  = the root mean square of a over the run, by n; G that of the gradients' norms then
    z  = -<D, g>, including the penalty's gradient in g if the base adds one
    q  = z / rms(z) between -1 and 1, with a mean that fades by 1 - w / 40 per step
    E += w * (q - 0.1) / (n + 60), without the 0.1 once lr is below H
    B += w * 0.6 / (n + 60) while lr is below H, and 0 again when it is not
    S  = 0.02 * f / (A * H * max(1, norms of the last gradients / G)) * exp(E + B)

A gradient longer than 5 times the root mean square of the last ones is shortened to that. A measured step that is ten
times as long as the scale takes it to be, is taken back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from reference import Around, BaseFactory, Tensors, Vector, inner
from torch import Tensor


class Rule:
    """The parameters that share one scale, and their tuner's state."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.S = 0.0
        self.h = 0.0  # the slope of the loss per unit of S
        self.highest_lr = 0.0
        self.t = 0
        self.n = 0.0
        self.n_measured = 0.0
        self.a2 = self.G2 = 0.0  # squared means over the measured steps
        self.E = self.B = 0.0
        self.v = self.m = 0.0  # fading sums of w * z^2 and w
        self.g2 = self.g1 = 0.0  # fading sums of |g|^2 and 1
        self.travelled = self.elapsed = 0.0  # the sums of S * lr and of lr

    @property
    def r(self) -> float:
        return self.E

    def usual_square(self) -> float:
        """The mean squared norm of the last gradients."""
        return self.g2 / self.g1

    def weigh(self, z: float, lr: float, w: float) -> None:
        self.v = (1 - w / 40) * self.v + w * z**2
        self.m = (1 - w / 40) * self.m + w
        gain = w / (self.n + 60)
        falls = lr < 0.9999 * self.highest_lr
        if self.v > 0:
            q = z / math.sqrt(self.v / self.m)
            self.E += gain * (min(max(q, -1.0), 1.0) - (0.0 if falls else 0.1))
        self.B = self.B + gain * 0.6 if falls else 0.0

    def choose(self, f: float) -> None:
        growth = max(1.0, self.usual_square() / self.G2) if self.G2 > 0 else 1.0
        self.S = 0.02 * f / (math.sqrt(self.a2 * growth) * self.highest_lr) * math.exp(self.E + self.B)

    def measure(self, a: float) -> bool:
        """Takes in a measured change per unit of S * lr. Returns whether the step was absurdly long."""
        if a == 0 or self.g1 == 0:
            return False
        is_first = self.n == 0
        growth = max(1.0, self.usual_square() / self.G2) if self.G2 > 0 else 1.0
        too_long = not is_first and a > 10 * math.sqrt(self.a2 * growth)
        old, new = self.n_measured, self.n - self.n_measured
        if is_first or too_long or old == 0:
            old, new = 0.0, 1.0
        self.a2 = (old * self.a2 + new * a**2) / (old + new)
        self.G2 = (old * self.G2 + new * self.usual_square()) / (old + new)
        self.n_measured = self.n
        if too_long:
            self.travelled = self.elapsed = 0.0
        return too_long

    def begin_again(self) -> None:
        """Matrices are trained that were not before."""
        self.t, self.n, self.n_measured, self.E, self.B = 0, 0.0, 0.0, 0.0, 0.0
        self.travelled = self.elapsed = 0.0


class Default(Around):
    """Mechanic by the default rule."""

    def __init__(self, params: Tensors, base_factory: BaseFactory, *, rule: str = "relative", **options: Any) -> None:
        assert rule == "relative"
        super().__init__(params, base_factory, **options)
        self.parts = [Rule(share) for share in self.shares]
        self.calls = 0
        self.has_begun = False  # whether a learning rate has been above 0
        self.frozen = False
        self.last_lrs: dict[int, float] = {}  # each group's, steps left out in which all are 0
        self.full_lrs: dict[int, float] = {}  # where the schedule stands at 1

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Steps from the weights x_t, at which the gradients were taken, to x_{t+1}."""
        grads = self.clipped(grads)
        if self.is_false_start(grads):
            self.begin_anew()
        grads = self.shortened(grads)
        g = self.minimised_gradients(grads)
        for part in self.parts:
            new = [i for i in part.indices if grads[i] is not None and not self.had_grad[i]]
            if part.S > 0 and any(is_matrix(self.x[i]) for i in new) and not self.frozen:
                part.begin_again()
                self.calls = 0
        self.calls += not self.is_lr_zero()
        is_measured = not self.frozen and (
            self.calls <= 10
            or math.log2(self.calls).is_integer()
            or self.calls % 200 == 0
            or any(part.a2 == 0 and part.g1 > 0 and part.highest_lr > 0 for part in self.parts)  # it started late
        )
        self.had_grad = [had or grad is not None for had, grad in zip(self.had_grad, grads, strict=True)]
        u = self.base_update(grads)
        self.has_begun = self.has_begun or any(
            group.get("initial_lr", group["lr"]) > 0 for group in self.base.param_groups
        )
        self.note_lrs()
        for part in self.parts:
            square = inner([g[i] for i in part.indices], [g[i] for i in part.indices])
            lr = self.lr_of(part)
            part.highest_lr = max(part.highest_lr, lr)
            if square > 0 and (lr > 0 or not self.is_held()):
                part.g2, part.g1 = (1 - 1 / 40) * part.g2 + square, (1 - 1 / 40) * part.g1 + 1
            if not self.is_held():
                self.tune(part, g, square, lr)
            before = {i: self.x[i] for i in part.indices}
            for i in part.indices:
                self.x[i] = self.x[i] + part.S * u[i]
            part.travelled += part.S * lr
            part.elapsed += lr if part.S > 0 else 0.0
            rate = (part.S or 1.0) * lr
            if is_measured and rate > 0:
                moves = {i: (part.S or 1.0) * u[i] for i in part.indices if g[i].any()}
                if part.measure(self.change(moves, before) / rate):
                    for i in part.indices:
                        self.x[i] = before[i]

    def shortened(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients with at most five times the usual norm."""
        squares = [
            sum(float((grads[i].double() ** 2).sum()) for i in part.indices if grads[i] is not None)
            for part in self.parts
        ]
        if any(part.g1 == 0 and square > 0 for part, square in zip(self.parts, squares, strict=True)):
            return list(grads)
        limit = 5 * math.sqrt(sum(part.usual_square() for part in self.parts if part.g1 > 0))
        norm = math.sqrt(sum(squares))
        if not 0 < limit < norm:
            return list(grads)
        return [None if grad is None else limit / norm * grad.double() for grad in grads]

    def tune(self, part: Rule, g: Tensors, square: float, lr: float) -> None:
        mine = [i for i in part.indices if self.had_grad[i]]
        if part.S > 0:
            pull = [g[i] + self.penalty_of(i) * self.x[i] for i in mine]
            z = -inner([self.x[i] - self.x_ref[i] for i in mine], pull)
            part.h = -z / part.S
        if square == 0 or part.highest_lr == 0:
            return
        part.t += 1
        f = min(1.0, part.t / 20)
        w = f * lr / part.highest_lr
        if part.S > 0:
            part.weigh(z, lr, w)
        if part.a2 > 0:
            part.n += w
            part.choose(f)
            part.S = min(part.S, self.max_scale)

    def change(self, moves: dict[int, Tensor], before: dict[int, Tensor]) -> float:
        """The median relative change of matrices, or of vectors, if that is larger."""
        kinds: dict[bool, list[float]] = {True: [], False: []}
        for i, move in moves.items():
            x = before[i]
            is_zero_start = not self.x_ref[i].any()
            if is_matrix(x):
                size = spectral_norm(x)
                size = max(size, 1.0) if is_zero_start else size
                found = spectral_norm(move) / size if size else 0.0
            else:
                size = x.norm().item()
                size = max(size, math.sqrt(x.numel())) if is_zero_start else size
                found = move.norm().item() / size if size else 0.0
            if found > 0:
                kinds[is_matrix(x)].append(found)
        return max((statistics.median_low(each) for each in kinds.values() if each), default=0.0)

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
        for k, _, lr in groups:
            if lr > 0 and before.get(k, 0.0) == 0:
                self.last_lrs[k], self.full_lrs[k] = lr, lr if place is None else lr / place

    def lr_of(self, part: Rule) -> float:
        """The current lr of these parameters: what the highest would be, had no group been changed by hand."""
        groups = [(k, g) for k, g in enumerate(self.base.param_groups) if set(self.indices_of(g)) & set(part.indices)]
        highest = max(float(group["lr"]) for _, group in groups)
        full = [self.full_lrs[k] for k, group in groups if group["lr"] > 0]
        if len(groups) == 1 or not full or part.highest_lr == 0:
            return highest
        places = [float(group["lr"]) / self.full_lrs[k] for k, group in groups if group["lr"] > 0]
        if max(places) - min(places) <= 1e-9 * max(places) and math.isclose(max(full), part.highest_lr):
            return highest
        return min(places) * part.highest_lr

    def is_held(self) -> bool:
        return self.frozen or not self.has_begun or self.is_lr_zero()

    def is_lr_zero(self) -> bool:
        return all(float(group["lr"]) == 0 for group in self.base.param_groups)

    def is_false_start(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether the only gradient so far was a hundred times longer or shorter than this one."""
        if max(part.g1 for part in self.parts) != 1:
            return False
        for part in self.parts:
            norm = math.sqrt(sum(float((grads[i].double() ** 2).sum()) for i in part.indices if grads[i] is not None))
            first = math.sqrt(part.g2)
            if max(norm, first) > 100 * min(norm, first) > 0:
                return True
        return False

    def begin_anew(self) -> None:
        """Forgets the only gradient so far."""
        groups = self.base.param_groups
        self.base = self.base_factory(self.copies)
        for new, old in zip(self.base.param_groups, groups, strict=True):
            new.update({key: value for key, value in old.items() if key != "params"})
        self.had_grad = [False for _ in self.x]
        self.parts = [Rule(part.indices) for part in self.parts]
        self.calls, self.has_begun, self.last_lrs, self.full_lrs = 0, False, {}, {}

    def penalty_of(self, i: int) -> float:
        """The weight decay of a parameter if the base adds it to the gradient, otherwise 0."""
        added_by = ("SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "ASGD")
        kind = next(kind for kind in type(self.base).__mro__ if kind.__module__.startswith("torch.optim"))
        group = next(group for group in self.base.param_groups if i in self.indices_of(group))
        is_added = kind.__name__ in added_by and not group.get("decoupled_weight_decay", False)
        return float(group["weight_decay"]) if is_added else 0.0

    def vectors(self, name: str) -> Vector:
        """S, the evidence (r), the sums of z^2 and w (v, m): one entry, or with scope="group" a row for each group."""
        rows = np.array([[getattr(part, name.replace("s", "S"))] for part in self.parts])
        return rows if self.scope == "group" else rows[0]


def is_matrix(x: Tensor) -> bool:
    return x.dim() > 1 and len(x) > 1 and x[0].numel() > 1


def spectral_norm(x: Tensor) -> float:
    """By eight power iterations from a vector that no matrix is likely to know."""
    matrix = x.reshape(len(x), -1)
    index = torch.arange(1, matrix.shape[1] + 1, dtype=torch.float64)
    v = torch.sin(index**2 * 0.7548776662466927)
    for _ in range(8):
        v = matrix.T @ (matrix @ (v / v.norm()))
        if not v.any():
            return 0.0
    return (matrix @ (v / v.norm())).norm().item()
