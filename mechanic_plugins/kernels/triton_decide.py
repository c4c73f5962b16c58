"""The decision about a step as one GPU kernel: `mechanic_plugins.rule.decide` for both families of rules.

`mechanic_plugins.kernels.gpu_tuner` launches it.
"""

from __future__ import annotations

from typing import get_args

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_default import default_observe, default_outlier_factor
from mechanic_plugins.kernels.triton_published import published_observe
from mechanic_plugins.kernels.triton_tuner import (
    _GG,
    _SCALE,
    _SKIPPED,
    _STEPS,
    _SUM_LR,
    _SUM_SCALE_LR,
    _SUMS,
    _TOP_LR,
    _with,
)
from mechanic_plugins.rule.decide import CLIP_EPS
from mechanic_plugins.rule.settings import Rule

_RELATIVE = tl.constexpr(get_args(Rule).index("relative"))
_CLIP_EPS = tl.constexpr(CLIP_EPS)
_MAX_SCALE, _MAX_GRAD_NORM = map(tl.constexpr, (0, 1))
"""Places in `mechanic_plugins.kernels.gpu_tuner.constants_on`."""
_SCALES = tl.constexpr(5)


@triton.jit
def tuner_kernel(
    sums, old, new, constants, table, lrs, tuners,
    RULE: tl.constexpr, HOLD: tl.constexpr, CAPPED: tl.constexpr, CLIPS: tl.constexpr,
    FLOATS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """`decide`, with one program per tuner.

    `old` and `new` hold `WIDTH` numbers per tuner, `FLOATS` of them before the lists of `n`. `lrs` holds the base's lr
    for each. `table` receives the new scale, whether the step is made, the clip, the old scale, and the steps so far.
    """
    program = tl.program_id(0)
    squares, is_sound = _squares(sums, tuners, NUMBERS)
    clip = tl.zeros_like(tl.load(sums)) + 1.0
    if CLIPS:
        clip = tl.minimum(tl.load(constants + _MAX_GRAD_NORM) / (tl.sqrt(tl.sum(squares)) + _CLIP_EPS), 1.0)
    has_gradients = tl.load(sums + tuners * _SUMS) != 0
    if RULE == _RELATIVE:
        clip *= default_outlier_factor(old, squares, tuners, clip, WIDTH, NUMBERS)
    made = has_gradients & is_sound
    moves = made & (not HOLD)
    sums += program * _SUMS
    old += program * WIDTH
    new += program * WIDTH
    lane = tl.arange(0, LANES)
    row = tl.load(old + lane, lane < FLOATS, 0.0)
    lr, old_scale = tl.load(lrs + program), tl.load(old + _SCALE)
    top_lr = tl.maximum(tl.load(old + _TOP_LR), lr)
    if RULE == _RELATIVE:
        row, scale = default_observe(row, lane, old, sums, clip, lr, top_lr, made, moves)
        if CAPPED:
            scale = tl.minimum(scale, tl.load(constants + _MAX_SCALE))
    else:
        row, scale = published_observe(row, lane, old, new, sums, clip, constants, moves, RULE, CAPPED, n, N)
    scale = tl.where(moves, scale, old_scale)
    steps = tl.load(old + _STEPS) + tl.where(made, 1.0, 0.0)
    row = _with(row, lane, _SCALE, scale, made)
    row = _with(row, lane, _TOP_LR, top_lr, made)
    row = _with(row, lane, _STEPS, steps, made)
    row = _with(row, lane, _SUM_SCALE_LR, tl.load(old + _SUM_SCALE_LR) + scale * lr, made)
    row = _with(row, lane, _SUM_LR, tl.load(old + _SUM_LR) + lr, made & (scale > 0))
    row = _with(row, lane, _SKIPPED, tl.load(old + _SKIPPED) + 1.0, has_gradients & (is_sound == 0))
    tl.store(new + lane, row, lane < FLOATS)
    table += program * _SCALES
    tl.store(table + 0, scale)
    tl.store(table + 1, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(table + 2, tl.where(made, clip, 1.0))
    tl.store(table + 3, old_scale)
    tl.store(table + 4, steps)


@triton.jit
def _squares(sums, tuners, NUMBERS: tl.constexpr):
    """The squared gradient norms of all tuners, with 0 for non-finite ones, and whether all sums are finite."""
    every = tl.arange(0, NUMBERS)
    seen = tl.load(sums + every, every < tuners * _SUMS + 1, 0.0)
    is_finite = tl.sum(tl.where(seen - seen == 0, 0, 1)) == 0
    squares = tl.load(sums + every * _SUMS + _GG, every < tuners, 0.0)
    return tl.where(is_finite, squares, 0.0), is_finite
