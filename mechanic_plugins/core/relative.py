"""The default rule: after n steps the weights should have moved by PRIOR * sqrt(n) of their size, or by what pays.

A step of length a, repeated n times, moves the weights by a * sqrt(n) where the steps go all ways, which most of them
do. So the distance from the start tells how long an update of the base is, U, and the scale follows from that. It is
corrected by the evidence of the run: every gradient shows by z = <x_ref - x, g> whether the loss would be lower had the
run moved further (z > 0, favourable) or less far (z < 0, adverse). In full:

    size = the root mean square of the weights that are not 0, times N ** POWER, with N the number that is trained
    U    = |x - x_ref| / sqrt(sum((S * lr)^2)), a root mean square over the run, at first START * |u|
    rho  = sum(z) / sqrt(sum(z^2) * WINDOW), -1 < rho < 1
    S    = PRIOR * size / (highest lr * U) * exp(GAIN * rho)

The norm of all weights grows as the square root of N, a good step less: the larger a network, the smaller the part of
it that a step may change. The sums of z fade: they hold the last `WINDOW` steps, and at first fewer, which prove less.
A step counts by its learning rate beside the highest, and its evidence by the scale beside the run's mean where it is
below that: steps that hardly move prove little.

A weight above 1 counts as 1, which makes a few large ones harmless, such as an output bias at the targets' mean. What
is trained has a gradient in one of the first `BEGINNING` steps: few rows of a large embedding have, and layers behind
one that starts at 0 have none in the first.
"""

from __future__ import annotations

import math

from mechanic_plugins.core.row import Products, Row

__all__ = ["BEGINNING", "GAIN", "OUTLIER", "POWER", "PRIOR", "START", "WINDOW", "advance", "restart", "walk"]

PRIOR = 0.2
"""The share of the weights' size that a step should change."""
POWER = 0.375
"""How the size grows with the number of weights: 1/2 would be their norm, so of ten million a step changes 2.7%."""
START = 2.0
"""How many times its length the first update is taken for, since the next ones go the same way."""
GAIN = 3.0
"""How far the evidence moves the scale: up or down by a factor of exp(3), 20, at most."""
WINDOW = 40.0
"""Steps that are evidence. Fewer are taken for as many of which the rest say nothing."""
BEGINNING = 3
"""Gradients in which the trained elements are counted."""
OUTLIER = 100.0
"""A gradient that much longer than any before it is skipped. Each skip raises the limit by as much, so that gradients
that have really grown are skipped once or twice only."""


def advance(row: Row, sums: Products, lr: float) -> None:
    """One step: the evidence of these sums, and the next scale. `row.lr` is the highest lr so far."""
    come = sums.dg + sums.dp
    row.h = come / (row.played or 1.0)
    if sums.gg == 0:
        return
    if row.gradients == 0 and row.size == 0:  # these sums are others: see `kernels.dots.sizes`
        row.size, row.touched, row.h = _size(sums), sums.dp, 0.0
    else:
        if row.gradients < BEGINNING:
            row.touched = max(row.touched, sums.xx)
        if row.played > 0:
            _gather(row, -come, sums.dd, lr / row.lr)
        elif row.path > 0:
            row.length = START * math.sqrt(sums.dd / row.path)
    row.gradients += 1
    if row.length > 0 and row.lr > 0:
        first = PRIOR * row.size * row.touched**POWER / (row.lr * row.length)
        row.s = [first * math.exp(GAIN * _rho(row))]


def walk(row: Row, before: float, lr: float) -> None:
    """Adds the step that is about to be made at `row.played` to the path, which updates only measured do not belong to.

    A path below 0 stays: the run went on from another rule's scale, and its length is not known.
    """
    if row.path < 0:
        return
    if before == 0 and (row.played > 0 or lr > 0):
        row.path = 0.0
    row.path += ((row.played or 1.0) * lr) ** 2


def restart(row: Row, dd: float) -> bool:
    """Begins again if the step just made was so long that the weights are lost, with that length. Whether it was."""
    if not 0 < (OUTLIER * row.length) ** 2 * row.path < dd or row.played == 0:
        return False
    row.length = min(math.sqrt(dd / row.path), OUTLIER**2 * row.length)
    row.r, row.v, row.m = [0.0], [0.0], [0.0]
    row.path = row.travelled = row.elapsed = 0.0
    return True


def _size(sums: Products) -> float:
    squares, nonzero = sums.xx, sums.dx
    return math.sqrt(squares / nonzero) if nonzero > 0 else 1.0


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
    window = max(row.m[0], WINDOW)  # a checkpoint of an earlier rule may hold more steps
    return row.r[0] / math.sqrt(row.v[0] * window) if row.v[0] > 0 else 0.0
