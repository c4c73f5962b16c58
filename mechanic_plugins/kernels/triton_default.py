"""The default rule on a GPU: `mechanic_plugins.rule.default`. The steps that are measured are left to the host.

`mechanic_plugins.kernels.triton_decide` puts these functions into its kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_tuner import (
    _DG,
    _DP,
    _GG,
    _GRADIENTS,
    _SCALE,
    _SIGNAL,
    _with,
)
from mechanic_plugins.rule import default
from mechanic_plugins.rule.default import DefaultTuner

_TARGET, _RAMP, _WINDOW, _PATIENCE, _TOP, _FALL, _FALLEN, _CLIP = map(
    tl.constexpr,
    (
        default.TARGET, default.RAMP, default.WINDOW, default.PATIENCE, default.TOP, default.FALL, default.FALLEN,
        default.CLIP,
    ),
)  # fmt: skip
_CHANGE_SQUARE, _NORM_SQUARE, _FULL_STEPS, _EVIDENCE, _BONUS, _Z_SQUARES, _Z_COUNT, _G_SQUARES, _G_COUNT = (
    tl.constexpr(DefaultTuner.floats().index(name))
    for name in (
        "change_square", "norm_square", "full_steps", "evidence", "bonus", "z_squares", "z_count", "g_squares",
        "g_count",
    )
)  # fmt: skip


@triton.jit
def default_observe(row, lane, old, sums, clip, lr, top_lr, made, moves):
    """`DefaultTuner.observe` and the gradients' norms: returns the row and the next scale."""
    scale, square = tl.load(old + _SCALE), clip * clip * tl.load(sums + _GG)
    has_scale, counts = scale > 0, moves & (square > 0) & (top_lr > 0)
    decay = 1.0 - 1.0 / tl.full([], _WINDOW, tl.float64)
    g_squares, g_count = decay * tl.load(old + _G_SQUARES) + square, decay * tl.load(old + _G_COUNT) + 1.0
    is_seen = made & (square > 0) & (moves | (lr > 0))
    row = _with(row, lane, _G_SQUARES, g_squares, is_seen)
    row = _with(row, lane, _G_COUNT, g_count, is_seen)
    slope = clip * tl.load(sums + _DG) + tl.load(sums + _DP)
    row = _with(row, lane, _SIGNAL, slope / tl.where(has_scale, scale, 1.0), moves)
    gradients = tl.load(old + _GRADIENTS) + 1.0
    row = _with(row, lane, _GRADIENTS, gradients, counts)
    ramp = tl.minimum(gradients / _RAMP, 1.0)
    weight = ramp * lr / tl.where(top_lr > 0, top_lr, 1.0)
    full_steps = tl.load(old + _FULL_STEPS)
    row, lift = _weigh_evidence(row, lane, old, slope, weight, full_steps, lr < top_lr * _FALLEN, counts & has_scale)
    change_square, norm_square = tl.load(old + _CHANGE_SQUARE), tl.load(old + _NORM_SQUARE)
    is_known = counts & (change_square > 0)
    row = _with(row, lane, _FULL_STEPS, full_steps + weight, is_known)
    growth = tl.where(norm_square > 0, g_squares / g_count / tl.where(norm_square > 0, norm_square, 1.0), 1.0)
    change = tl.sqrt(change_square * tl.maximum(growth, 1.0)) * top_lr
    next_scale = ramp * _TARGET / tl.where(is_known, change, 1.0) * tl.exp(lift)
    return row, tl.where(is_known, next_scale, scale)


@triton.jit
def _weigh_evidence(row, lane, old, slope, weight, full_steps, has_fallen, counts):
    """The moving sums of z, and the logarithm of the scale's correction."""
    evidence, bonus = tl.load(old + _EVIDENCE), tl.load(old + _BONUS)
    share, decay = weight / (full_steps + _PATIENCE), 1.0 - weight / _WINDOW
    z_squares = decay * tl.load(old + _Z_SQUARES) + weight * slope * slope
    z_count = decay * tl.load(old + _Z_COUNT) + weight
    has_energy = z_squares > 0
    q = -slope * tl.sqrt(z_count / tl.where(has_energy, z_squares, 1.0))
    q = tl.minimum(tl.maximum(q, -1.0), 1.0) + tl.where(has_fallen, 0.0, tl.zeros_like(q) + _TOP)
    evidence = tl.where(counts, evidence + tl.where(has_energy, share * q, 0.0), evidence)
    bonus = tl.where(counts, tl.where(has_fallen, bonus + share * _FALL, 0.0), bonus)
    row = _with(row, lane, _Z_SQUARES, z_squares, counts)
    row = _with(row, lane, _Z_COUNT, z_count, counts)
    row = _with(row, lane, _EVIDENCE, evidence, counts)
    row = _with(row, lane, _BONUS, bonus, counts)
    return row, evidence + bonus


@triton.jit
def default_outlier_factor(old, squares, tuners, clip, WIDTH: tl.constexpr, NUMBERS: tl.constexpr):
    """`decide._outlier_factor`: shortens gradients that are far longer than the last ones."""
    every = tl.arange(0, NUMBERS)
    mine = every < tuners
    counts = tl.load(old + every * WIDTH + _G_COUNT, mine, 0.0)
    means = tl.load(old + every * WIDTH + _G_SQUARES, mine, 0.0) / tl.where(counts > 0, counts, 1.0)
    has_first = tl.sum(tl.where(mine & (counts == 0) & (squares > 0), 1, 0)) > 0
    limit = tl.sqrt(tl.sum(tl.where(mine & (counts > 0), means, 0.0))) * _CLIP
    norm = clip * tl.sqrt(tl.sum(squares))
    is_outlier = (has_first == 0) & (limit > 0) & (norm > limit)
    return tl.where(is_outlier, limit / tl.where(norm > 0, norm, 1.0), 1.0)
