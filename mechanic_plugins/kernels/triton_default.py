"""The default rule on a GPU: `mechanic_plugins.rule.default`, after the beginning of a run, which is left to the host.

`mechanic_plugins.kernels.triton_decide` puts these functions into its kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_tuner import (
    _DD,
    _DG,
    _DP,
    _GG,
    _GRADIENTS,
    _LONGEST,
    _SCALE,
    _SIGNAL,
    _SUM_LR,
    _SUM_SCALE_LR,
    _with,
)
from mechanic_plugins.rule import default
from mechanic_plugins.rule.default import DefaultTuner

_PRIOR, _POWER, _GAIN, _START = map(tl.constexpr, (default.PRIOR, default.POWER, default.GAIN, default.START))
_WINDOW, _OUTLIER, _FAR = map(tl.constexpr, (default.WINDOW, default.OUTLIER, default.FAR))

_SIZE, _TRAINED, _LENGTH, _PATH, _Z_SUM, _Z_SQUARES, _Z_COUNT = (
    tl.constexpr(DefaultTuner.floats().index(name))
    for name in ("size", "trained", "length", "path", "z_sum", "z_squares", "z_count")
)


@triton.jit
def default_observe(row, lane, old, sums, clip, lr, whole_lr, moves):
    """`DefaultTuner.observe`: returns the row and the next scale."""
    scale, path, dd = tl.load(old + _SCALE), tl.load(old + _PATH), tl.load(sums + _DD)
    has_scale, has_path = scale > 0, path > 0
    slope = clip * tl.load(sums + _DG) + tl.load(sums + _DP)
    counts = moves & (clip * clip * tl.load(sums + _GG) > 0)
    weight = lr / tl.where(whole_lr > 0, whole_lr, 1.0)
    row = _with(row, lane, _SIGNAL, slope / tl.where(has_scale, scale, 1.0), moves)
    row, rho = _weigh_evidence(row, lane, old, -slope, tl.where(has_scale, weight, 0.0), counts)
    length = _update_length(old, dd, weight, whole_lr)
    row = _with(row, lane, _LENGTH, length, counts)
    row = _with(row, lane, _GRADIENTS, tl.load(old + _GRADIENTS) + 1.0, counts)
    trained, unit = tl.load(old + _TRAINED), whole_lr * length
    moved = tl.where(has_scale & has_path, tl.sqrt(dd / tl.where(trained > 0, trained, 1.0)), 0.0)
    size = tl.maximum(tl.load(old + _SIZE), moved / _FAR)
    prior = size * _PRIOR * tl.exp(tl.log(trained) * _POWER) / tl.where(unit > 0, unit, 1.0)
    return row, tl.where(counts & (unit > 0), prior * tl.exp(rho * _GAIN), scale)


@triton.jit
def _weigh_evidence(row, lane, old, z, weight, counts):
    """The moving sums of z, and rho. A step that says nothing has a weight of 0."""
    sum_lr, sum_scale_lr = tl.load(old + _SUM_LR), tl.load(old + _SUM_SCALE_LR)
    share = tl.load(old + _SCALE) * sum_lr / tl.where(sum_scale_lr > 0, sum_scale_lr, 1.0)
    evidence = weight * tl.where(sum_scale_lr > 0, tl.minimum(share, 1.0), 1.0)
    decay = 1.0 - evidence / _WINDOW
    z_sum = decay * tl.load(old + _Z_SUM) + evidence * z
    z_squares = decay * tl.load(old + _Z_SQUARES) + evidence * z * z
    row = _with(row, lane, _Z_SUM, z_sum, counts)
    row = _with(row, lane, _Z_SQUARES, z_squares, counts)
    row = _with(row, lane, _Z_COUNT, decay * tl.load(old + _Z_COUNT) + evidence, counts)
    energy = z_squares * _WINDOW
    return row, tl.where(energy > 0, z_sum / tl.sqrt(tl.where(energy > 0, energy, 1.0)), 0.0)


@triton.jit
def _update_length(old, dd, weight, whole_lr):
    """U: averaged over the run, or measured while there is no scale."""
    length, path = tl.load(old + _LENGTH), tl.load(old + _PATH)
    has_scale, has_path = tl.load(old + _SCALE) > 0, path > 0
    path = tl.where(has_path, path, 1.0)
    steps_so_far = tl.load(old + _SUM_LR) / tl.where(whole_lr > 0, whole_lr, 1.0)
    steps = steps_so_far + weight
    square = (steps_so_far * (length * length) + weight * dd / path) / tl.where(steps > 0, steps, 1.0)
    measured = tl.sqrt(dd / path) * _START
    return tl.where(has_path, tl.where(has_scale, tl.sqrt(square), measured), length)


@triton.jit
def default_take_step(row, lane, old, scale, lr, made):
    """`DefaultTuner.take_step`: lengthens the path."""
    starts = (tl.load(old + _SCALE) == 0) & ((scale > 0) | (lr > 0))
    step = tl.where(scale > 0, scale, 1.0) * lr
    return _with(row, lane, _PATH, tl.where(starts, 0.0, tl.load(old + _PATH)) + step * step, made)


@triton.jit
def default_longest(row, lane, old, norm, is_seen):
    """The part of `DefaultTuner.is_outlier` that remembers the longest gradient."""
    longest = tl.load(old + _LONGEST)
    limit = longest * _OUTLIER
    seen = tl.where(limit > 0, tl.minimum(norm, limit), norm)
    return _with(row, lane, _LONGEST, tl.maximum(longest, seen), is_seen)


@triton.jit
def default_has_outliers(old, squares, tuners, WIDTH: tl.constexpr, NUMBERS: tl.constexpr):
    """Whether any tuner's gradient is far longer than all before it."""
    every = tl.arange(0, NUMBERS)
    limits = tl.load(old + every * WIDTH + _LONGEST, every < tuners, 0.0) * _OUTLIER
    return tl.sum(tl.where((limits > 0) & (tl.sqrt(squares) > limits), 1, 0)) > 0
