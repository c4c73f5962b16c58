"""The published rules, in the paper's letters: given h, each of n learners updates its bet, one per beta.

Mechanic (Cutkosky, Defazio, Mehta: "Mechanic: A Learning Rate Tuner", arXiv 2306.00144), Algorithm 1:

    h = <Delta, g> + lambda * S * |g| * <Delta, x> / |x|
    m = max(beta * m, |h|)                      the largest h seen, forgotten slowly
    v = beta^2 * v + h^2                        the sum of squares of h
    r = max(0, beta * r - s * h)                the reward so far
    s = (s_init * m / n + r) / (sqrt(v) + eps)  the next bet; S = sum(s)

|h| in m is what the paper means: with the sign as printed, a first h < 0 leaves s at 0 forever.
"""

from __future__ import annotations

import math

from mechanic_plugins.core.row import Products, Row
from mechanic_plugins.core.settings import Settings

__all__ = ["advance"]


def advance(row: Row, sums: Products, settings: Settings) -> None:
    """One step of the rule named in the settings."""
    h = sums.dg
    if settings.s_decay:
        direction = sums.dx / math.sqrt(sums.xx) if sums.xx > 0 else 0.0
        h = h + settings.s_decay * row.played * math.sqrt(sums.gg) * direction
    row.h, row.s_init = h, settings.s_init
    row.gradients += sums.gg > 0
    move = {"paper": _paper, "experiments": _unclamped, "optax": _unclamped, "theory": _theory}[settings.rule]
    for i, beta in enumerate(settings.betas):
        move(row, i, beta, h, settings)


def _paper(row: Row, i: int, beta: float, h: float, settings: Settings) -> None:
    """Algorithm 1."""
    n, eps = len(row.s), settings.eps
    m = max(beta * row.m[i], abs(h))
    v = beta * beta * row.v[i] + h * h
    r = max(0.0, beta * row.r[i] - row.s[i] * h)
    row.s[i] = (row.s_init * m / n + r) / (math.sqrt(v) + eps) if v > 0 else 0.0
    row.m[i], row.v[i], row.r[i] = m, v, r


def _unclamped(row: Row, i: int, beta: float, h: float, settings: Settings) -> None:
    """The code of the paper's experiments: s starts at s_init, r may fall below 0 and is clamped in the wealth.

    In optax.contrib, the h that is rewarded is also clipped to the largest one seen before.
    """
    seen = min(max(h, -row.m[i]), row.m[i]) if settings.rule == "optax" else h
    n, eps = len(row.s), settings.eps
    m = max(beta * row.m[i], abs(h) + eps)
    v = beta * beta * row.v[i] + h * h
    r = beta * row.r[i] - row.s[i] * seen
    row.s[i] = (row.s_init * m / n + max(0.0, r)) / (math.sqrt(v) + eps)
    row.m[i], row.v[i], row.r[i] = m, v, r


def _theory(row: Row, i: int, beta: float, h: float, settings: Settings) -> None:
    """Algorithm 2, for the regret bound.

    q has the sign that the proof uses (as printed, s would be positive only where it loses). The initial wealth is
    s_init times the first nonzero |h|: no bet is placed before that, so it is a constant of the game.
    """
    n, eps = len(row.s), settings.eps
    clipped = min(max(h, -row.m[i]), row.m[i])
    m = max(beta * row.m[i], abs(h))
    v = beta * beta * row.v[i] + clipped * clipped
    r = beta * row.r[i] - row.s[i] * clipped
    q = beta * row.q[i] - clipped
    w0 = row.w0[i] if row.w0[i] > 0 else row.s_init * m / n
    root = math.sqrt(4 * m * m + v)
    row.s[i] = (w0 + r) / (root + eps) * min(max(q / root, 0.0), 1.0) if m > 0 else 0.0
    row.m[i], row.v[i], row.r[i], row.q[i], row.w0[i] = m, v, r, q, w0
