"""The published rules, in the paper's letters: given h, each of n learners updates its bet, one per beta.

Mechanic (Cutkosky, Defazio, Mehta: "Mechanic: A Learning Rate Tuner", arXiv 2306.00144), Algorithm 1:

    h = <Delta, g> + lambda * S * |g| * <Delta, x> / |x|
    m = max(beta * m, |h|)                      the largest h seen, forgotten slowly
    v = beta^2 * v + h^2                        the sum of squares of h
    r = max(0, beta * r - s * h)                the reward so far
    s = (s_init * m / n + r) / (sqrt(v) + eps)  the next bet; S = sum(s)

|h| in m is what the paper means: with the sign as printed, a first h < 0 leaves s at 0 forever.

The constants are stated for a base lr of 1. At a peak lr of `unit`, updates are `unit` times as long and the same run
has a scale 1 / unit as large: s_init / unit, eps * unit and lambda * unit give the same trajectory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import Sums
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["PublishedTuner"]


@dataclass
class PublishedTuner(Tuner):
    """The tuner of the published rules. The lists have one number per beta; only `rule="theory"` uses q and w0."""

    s: list[float] = field(default_factory=list)
    r: list[float] = field(default_factory=list)
    m: list[float] = field(default_factory=list)
    v: list[float] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    w0: list[float] = field(default_factory=list)

    def observe(self, sums: Sums, lr: float, settings: Settings) -> float:
        """Takes in one step's sums and returns the next scale."""
        unit, n = self.unit, len(settings.betas)
        h = sums.dg
        if settings.s_decay:
            direction = sums.dx / math.sqrt(sums.xx) if sums.xx > 0 else 0.0
            h += settings.s_decay * unit * self.scale * math.sqrt(sums.gg) * direction
        self.signal = h
        self.gradients += sums.gg > 0
        s_init, eps = settings.s_init / unit / n, settings.eps * unit
        old = zip(self.s, self.r, self.m, self.v, self.q, self.w0, settings.betas, strict=True)
        new = itertools.starmap(functools.partial(_MOVES[settings.rule], h, s_init, eps), old)
        self.s, self.r, self.m, self.v, self.q, self.w0 = map(list, zip(*new, strict=True))
        return sum(self.s)

    def limit(self, scale: float) -> None:
        """Lowers the bets in proportion."""
        self.s, self.scale = [s * (scale / self.scale) for s in self.s], scale


Learner = tuple[float, float, float, float, float, float]
"""One learner: its bet s, reward r, largest h and sum of squares; q and the initial wealth in Algorithm 2."""


def _paper(
    h: float, s_init: float, eps: float, s: float, r: float, m: float, v: float, q: float, w0: float, beta: float
) -> Learner:
    """Algorithm 1."""
    m = max(beta * m, abs(h))
    v = beta * beta * v + h * h
    r = max(0.0, beta * r - s * h)
    s = (s_init * m + r) / (math.sqrt(v) + eps) if v > 0 else 0.0
    return s, r, m, v, q, w0


def _experiments(
    h: float, s_init: float, eps: float, s: float, r: float, m: float, v: float, q: float, w0: float, beta: float
) -> Learner:
    """The code of the paper's experiments: r may fall below 0 and is clamped in the wealth."""
    r = beta * r - s * h
    m = max(beta * m, abs(h) + eps)
    v = beta * beta * v + h * h
    s = (s_init * m + max(0.0, r)) / (math.sqrt(v) + eps)
    return s, r, m, v, q, w0


def _optax(
    h: float, s_init: float, eps: float, s: float, r: float, m: float, v: float, q: float, w0: float, beta: float
) -> Learner:
    """optax.contrib's: as in the experiments, but the h that is rewarded is clipped to the largest one seen before."""
    r = beta * r - s * min(max(h, -m), m)
    m = max(beta * m, abs(h) + eps)
    v = beta * beta * v + h * h
    s = (s_init * m + max(0.0, r)) / (math.sqrt(v) + eps)
    return s, r, m, v, q, w0


def _theory(
    h: float, s_init: float, eps: float, s: float, r: float, m: float, v: float, q: float, w0: float, beta: float
) -> Learner:
    """Algorithm 2, for the regret bound.

    q has the sign that the proof uses (as printed, s would be positive only where it loses). The initial wealth is
    s_init times the first nonzero |h|: no bet is placed before that, so it is a constant of the game.
    """
    clipped = min(max(h, -m), m)
    m = max(beta * m, abs(h))
    v = beta * beta * v + clipped * clipped
    r = beta * r - s * clipped
    q = beta * q - clipped
    w0 = w0 if w0 > 0 else s_init * m
    root = math.sqrt(4 * m * m + v)
    s = (w0 + r) / (root + eps) * min(max(q / root, 0.0), 1.0) if m > 0 else 0.0
    return s, r, m, v, q, w0


_MOVES: dict[str, Callable[..., Learner]] = {
    "paper": _paper,
    "experiments": _experiments,
    "optax": _optax,
    "theory": _theory,
}
