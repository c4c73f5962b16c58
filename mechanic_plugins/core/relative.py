"""The default rule: n steps should move the weights by PRIOR * sqrt(n) of their size, corrected by the run's evidence.

n steps of length a whose directions are mostly unrelated move the weights by a * sqrt(n). The distance from the start
therefore tells how long the base's updates are, U, and the scale follows from U. The evidence of the run corrects it:
with each gradient, z = <x_ref - x, g> tells whether the loss would now be lower had the run moved further (z > 0,
favourable) or less far (z < 0, adverse). In full:

    size = mean(|x| ** (1 / 3)) ** 3 of the nonzero weights at the start; at least |x - x_ref| / sqrt(N) / FAR
    U    = |x - x_ref| / sqrt(sum((S * lr)^2)), as a root mean square over the run; START * |u| at first
    rho  = sum(z) / sqrt(sum(z^2) * WINDOW), -1 < rho < 1
    S    = PRIOR * size * N ** POWER / (highest lr * U) * exp(GAIN * rho), with N the number of trained weights

The norm of all weights grows like the square root of N, a good step more slowly: the larger the network, the smaller
the fraction of it that one step may change. The sums of z are moving sums over the last `WINDOW` steps; early on they
hold fewer, and count for less. A step is weighted by its learning rate relative to the highest one. Where the scale is
below the run's mean, its evidence is also weighted by that ratio: steps that hardly move say little.

The cube roots tell how large a typical weight is; a root mean square would be that of an embedding or of the norms'
gains, a geometric mean that of filters that died. A weight above 1, such as an output bias, counts as 1. If all start
close to 0, their distance from there says more. N counts the weights with a gradient in one of the first `BEGINNING`
steps: layers behind a layer of zeros get none in the first one.
"""

from __future__ import annotations

import math

from mechanic_plugins.core.row import Products, Row

__all__ = ["BEGINNING", "FAR", "GAIN", "OUTLIER", "POWER", "PRIOR", "START", "WINDOW", "advance", "restart", "walk"]

PRIOR = 0.35
"""How far a step should move the weights, as a share of their size."""
POWER = 0.375
"""How the size grows with the number of weights: 1/2 would make it grow like their norm."""
_OF_ZEROS = 0.5
"""The size of a typical weight if all of them are 0."""
START = 2.0
"""The first update counts as this many times its length, because the next ones point the same way."""
GAIN = 3.0
"""How far the evidence can move the scale: by a factor of exp(3) = 20 up or down."""
WINDOW = 40.0
"""The number of steps that serve as evidence. While there are fewer, the missing ones count as undecided."""
BEGINNING = 3
"""The number of gradients from which the trained weights are counted."""
OUTLIER = 100.0
"""Gradients this many times longer than any before are skipped. Each skip raises the limit by the same factor, so that
gradients that really have grown are skipped only once or twice."""
FAR = math.exp(GAIN)
"""By how much an early update may be too long, or the weights too small at first: the evidence corrects no more."""


def advance(row: Row, sums: Products, lr: float) -> None:
    """Takes in one step's sums and sets the next scale. `row.lr` is the highest lr so far."""
    come = sums.dg + sums.dp
    row.h = come / (row.played or 1.0)
    if sums.gg == 0:
        return
    if row.gradients == 0 and row.size == 0:  # the first sums are different ones: see `kernels.dots.sizes`
        row.size, row.touched, row.h = (sums.xx / sums.dx) ** 3 if sums.dx else _OF_ZEROS, sums.dp, 0.0
    else:
        if row.gradients < BEGINNING:
            row.touched = max(row.touched, sums.xx)
        if row.played > 0:
            _gather(row, -come, sums.dd, lr / row.lr)
        elif row.path > 0:
            row.length = START * math.sqrt(sums.dd / row.path)
    row.gradients += 1
    if row.length > 0 and row.lr > 0:
        gone = math.sqrt(sums.dd / row.touched) if row.played > 0 and row.path > 0 else 0.0
        first = PRIOR * max(row.size, gone / FAR) * row.touched**POWER / (row.lr * row.length)
        row.s = [first * math.exp(GAIN * _rho(row))]


def walk(row: Row, before: float, lr: float) -> None:
    """Adds the step about to be made at `row.played` to the path; updates that are only measured do not count.

    A negative path is left alone: the run continues from another rule's scale, and its path is unknown.
    """
    if row.path < 0:
        return
    if before == 0 and (row.played > 0 or lr > 0):
        row.path = 0.0
    row.path += ((row.played or 1.0) * lr) ** 2


def restart(row: Row, dd: float) -> bool:
    """Starts over with the new update length if the last step was absurdly long. Returns whether it was."""
    if not 0 < (FAR * row.length) ** 2 * row.path < dd or row.played == 0:
        return False
    row.length = min(math.sqrt(dd / row.path), OUTLIER**2 * row.length)
    row.r, row.v, row.m = [0.0], [0.0], [0.0]
    row.path = row.travelled = row.elapsed = 0.0
    return True


def _gather(row: Row, z: float, dd: float, weight: float) -> None:
    run = row.elapsed / row.lr
    proof = weight * (min(1.0, row.played * row.elapsed / row.travelled) if row.travelled > 0 else 1.0)
    kept = 1 - proof / WINDOW
    row.r = [kept * row.r[0] + proof * z]
    row.v = [kept * row.v[0] + proof * z * z]
    row.m = [kept * row.m[0] + proof]
    if row.path > 0:
        row.length = math.sqrt((run * row.length**2 + weight * dd / row.path) / (run + weight))


def _rho(row: Row) -> float:
    window = max(row.m[0], WINDOW)  # a checkpoint from an earlier rule may hold more steps
    return row.r[0] / math.sqrt(row.v[0] * window) if row.v[0] > 0 else 0.0
