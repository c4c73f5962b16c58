"""The default rule: a relative prior, and the evidence of the run.

One update should change the weights by `PRIOR` of their size. From there the scale follows the evidence: every step
shows by z = <x_ref - x, g> whether the loss would be lower had the run moved further (z > 0, favourable) or less far
(z < 0, adverse). Their mean beside their root mean square,

    rho = sum(z) / sqrt(sum(z^2) * (n + DOUBT)),     -1 < rho < 1,

moves the scale by a factor exp(GAIN * rho), and by the root of that where it is adverse: much of that is noise, which a
schedule's fall or smaller steps will remove. Sums and n forget over a window that is `MEMORY` of the run so far, so
that nothing depends on the length of the run; `DOUBT` steps without evidence are counted in, so that a few steps prove
little. In full, with u the base's update at its highest lr:

    size = the root mean square of the weights that are not 0, measured at the first gradient
    U    = max over the run of |x - x_ref| / sum(scale * lr), the length of a mean update
    S    = PRIOR * size * sqrt(touched) / (highest lr * U) * exp(GAIN * rho), exp(ADVERSE * GAIN * rho) for rho < 0

A weight above 1 counts as 1, which makes a few large ones harmless, such as an output bias at the targets' mean;
`touched` counts the elements with a gradient, which are few in a large embedding; the largest of the first `BEGINNING`
counts, since layers behind one that starts at 0 have none at first. U grows as a base's momentum does.
"""

from __future__ import annotations

import math

from mechanic_plugins.core.row import Products, Row

__all__ = ["ADVERSE", "BEGINNING", "DOUBT", "GAIN", "MEMORY", "OUTLIER", "PRIOR", "advance", "walk"]

PRIOR = 0.015
"""What an update should change of the weights."""
GAIN = 4.0
"""How far the evidence moves the scale: by a factor of up to exp(4)."""
ADVERSE = 0.5
"""What of it adverse evidence does."""
DOUBT = 20.0
"""Steps without evidence that are counted in."""
MEMORY = 0.25
"""The window of the evidence, as a share of the run so far."""
BEGINNING = 3
"""Gradients in which the trained elements are counted."""
OUTLIER = 100.0
"""A gradient that much longer than any before it is skipped. Each skip raises the limit by as much, so that gradients
that have really grown are skipped once or twice only."""


def advance(row: Row, sums: Products) -> None:
    """One step: the evidence of these sums, and the next scale. `row.lr` is the highest lr so far."""
    come = sums.dg + sums.dp
    row.h = come / (row.played or 1.0)
    if sums.gg == 0:
        return
    if row.gradients == 0 and row.size == 0:  # these sums are others: see `kernels.sizes`
        row.size, row.touched, row.h = _size(sums), sums.dp, 0.0
    else:
        if row.gradients < BEGINNING:
            row.touched = max(row.touched, sums.xx)
        if row.path > 0:
            row.length = max(row.length, math.sqrt(sums.dd) / row.path)
    if row.played > 0:
        _gather(row, -come)
    row.gradients += 1
    if row.length > 0 and row.lr > 0:
        rho = _rho(row)
        first = PRIOR * row.size * math.sqrt(row.touched) / (row.lr * row.length)
        row.s = [first * math.exp(GAIN * (rho if rho > 0 else ADVERSE * rho))]


def walk(row: Row, before: float, lr: float) -> None:
    """Adds the step that is about to be made at `row.played` to the path; the first updates are not made yet."""
    if row.path >= 0 and lr > 0:
        row.path = (row.path if before > 0 else 0.0) + (row.played or 1.0) * lr


def _size(sums: Products) -> float:
    squares, nonzero = sums.xx, sums.dx
    return math.sqrt(squares / nonzero) if nonzero > 0 else 1.0


def _gather(row: Row, z: float) -> None:
    kept = 1 - 1 / (DOUBT + MEMORY * row.gradients)
    row.r = [kept * row.r[0] + z]
    row.v = [kept * row.v[0] + z * z]
    row.m = [kept * row.m[0] + 1]


def _rho(row: Row) -> float:
    energy = row.v[0] * (row.m[0] + DOUBT)
    return row.r[0] / math.sqrt(energy) if energy > 0 else 0.0
