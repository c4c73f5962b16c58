"""The default rule: a relative prior, and the evidence of the run.

One update should change the weights by `PRIOR` of their size. From there the scale follows the evidence: every step
shows by z = <x_ref - x, g> whether the loss would be lower had the run moved further (z > 0, favourable) or less far
(z < 0, adverse). Their mean beside their root mean square,

    rho = sum(z) / sqrt(sum(z^2) * (n + DOUBT)),     -1 < rho < 1,

moves the scale by a factor exp(GAIN * rho). Sums and n forget over a window that is `MEMORY` of the run so far, so
that nothing depends on the length of the run; `DOUBT` steps without evidence are counted in, so that a few steps prove
little. In full, with u the base's update at its highest lr:

    size = sqrt(touched) * root mean square of the weights that are not 0               once, at the first gradient
    U    = max over the run of |x - x_ref| / sum(scale * lr)                            the length of a mean update
    S    = PRIOR * size / (highest lr * U) * exp(GAIN * rho)

A weight above 1 counts as 1, which makes a few large ones harmless, such as an output bias at the targets' mean;
`touched` counts the elements with a gradient, which are few in a large embedding. U grows as a base's momentum does.
"""

from __future__ import annotations

import math

from mechanic_plugins.core.row import Products, Row

__all__ = ["DOUBT", "GAIN", "MEMORY", "OUTLIER", "OUTLIER_GROWTH", "PRIOR", "advance", "delta_factor", "walk"]

PRIOR = 0.015
"""What an update should change of the weights."""
GAIN = 4.0
"""How far the evidence moves the scale: by a factor of up to exp(4)."""
DOUBT = 20.0
"""Steps without evidence that are counted in."""
MEMORY = 0.25
"""The window of the evidence, as a share of the run so far."""
OUTLIER = 100.0
"""A gradient that much longer than any before it is skipped."""
OUTLIER_GROWTH = 10.0
"""And each skip raises the limit by that, so that gradients that have really grown are skipped a few times only."""


def advance(row: Row, sums: Products, lr: float) -> None:
    """One step: the evidence of these sums, and the next scale. `row.lr` is the highest lr so far."""
    row.h = sums.dg + sums.dp
    if sums.gg == 0:
        return
    if row.gradients == 0 and row.size == 0 and row.played == 0:
        row.size, row.h = _size(sums), 0.0  # the sums of the first step are others: see `passes.sizes`
    elif row.path > 0:
        row.length = max(row.length, (row.played or 1.0) * math.sqrt(sums.dd) / row.path)
    if row.played > 0:
        _gather(row, -row.played * row.h)
    row.gradients += 1
    if row.length > 0 and row.lr > 0:
        row.s = [PRIOR * row.size / (row.lr * row.length) * math.exp(GAIN * _rho(row))]


def walk(row: Row, before: float, lr: float) -> None:
    """Adds the step that is about to be made at `row.played` to the path; the first updates are not made yet."""
    if row.path >= 0:
        row.path = (row.path if before > 0 else 0.0) + (row.played or 1.0) * lr


def delta_factor(before: float, after: float) -> float:
    """What delta is multiplied by: the weights stay where they are, and updates before the first move are dropped."""
    return 1.0 if after == 0 else before / after


def _size(sums: Products) -> float:
    squares, nonzero, touched = sums.xx, sums.dx, sums.dp
    return math.sqrt(touched * (squares / nonzero if nonzero > 0 else 1.0))


def _gather(row: Row, z: float) -> None:
    kept = 1 - 1 / (DOUBT + MEMORY * row.gradients)
    row.r = [kept * row.r[0] + z]
    row.v = [kept * row.v[0] + z * z]
    row.m = [kept * row.m[0] + 1]


def _rho(row: Row) -> float:
    energy = row.v[0] * (row.m[0] + DOUBT)
    return row.r[0] / math.sqrt(energy) if energy > 0 else 0.0
