"""The tuner's step as one GPU kernel: `mechanic_plugins.core.tuner` in Triton's dialect.

Its functions have the names of those that they stand for, in `tuner` and `gradients`; the compiler puts them all into
the kernel. `mechanic_plugins.kernels.gpu_tuner` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_rules import (
    _HASTE,
    _HINDSIGHT,
    _MAX_SCALE,
    _OPTIMISTIC,
    _S_DECAY,
    _S_INIT,
    _SMOOTHING,
    _judged,
    _place_bets,
    _usual_loss,
)


@triton.jit
def tuner_kernel(
    sums, old, new, betas, constants, counters, new_counters, scales, lrs, norm_high, norm_low, tuners,
    RULE: tl.constexpr, AUTO: tl.constexpr, SMOOTHING: tl.constexpr, CAPPED: tl.constexpr, FROZEN: tl.constexpr,
    HINDSIGHT: tl.constexpr, RESTATES: tl.constexpr, CLIPS: tl.constexpr, CLIP_EPS: tl.constexpr, LIMITS: tl.constexpr,
    LOSS_WEIGHT: tl.constexpr, LONG_STEP: tl.constexpr, SIGNS: tl.constexpr,
    RECENT: tl.constexpr, RELATIVE_EPS: tl.constexpr, START: tl.constexpr, GROWTH: tl.constexpr, OUTLIER: tl.constexpr,
    GRADIENT_GROWTH: tl.constexpr, NUMBERS: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`decide`, a tuner a program.

    A row of `old` and `new` holds s, r, m, v, q, w0 (n each), s_init, played, h, lr, gradients and longest. `lrs` has
    the base's lr of each tuner, `counters` steps and skipped. With CLIPS the gradients are taken for clipped to the
    norm that has its two halves. `scales` gets, for each tuner, before, after, whether the step is made, what delta and
    the gradients are multiplied by, and the steps so far. With LIMITS no gradient is much longer than any before it.
    """
    program = tl.program_id(0)
    clip = _clip(sums, norm_high, norm_low, tuners, CLIPS, CLIP_EPS, NUMBERS)
    is_finite, has_gradients, is_outlier = _examined(sums, old, clip, tuners, RULE, OUTLIER, NUMBERS, n)
    made = has_gradients & (is_outlier == 0)
    steps = tl.load(counters + 0) + tl.where(made, 1.0, 0.0)
    if program == 0:
        tl.store(new_counters + 0, steps)
        tl.store(new_counters + 1, tl.load(counters + 1) + tl.where(is_finite & (is_outlier == 0), 0.0, 1.0))
    sums += program * 6
    old += program * (6 * n + 6)
    last_lr, longest = tl.load(old + 6 * n + 3), tl.load(old + 6 * n + 5)
    if RULE == _OPTIMISTIC:
        norm = clip * tl.sqrt(tl.where(is_finite, tl.load(sums + 1), 0.0))
        share, remembered = _limited(norm, longest, is_outlier, LIMITS, OUTLIER, GRADIENT_GROWTH)
        clip, longest = share * clip, tl.where(has_gradients, remembered, longest)
    lr = tl.load(lrs + program)
    peak = tl.where(lr > last_lr, lr, last_lr)
    lr_ratio = tl.zeros_like(lr) + 1.0
    if RESTATES and not FROZEN:
        rises = (last_lr > 0) & (peak > last_lr)
        lr_ratio = tl.where(rises, last_lr / tl.where(rises, peak, 1.0), 1.0)
    s, r, m, v, q, w0, s_init, played, h, gradients = _advance(
        old, sums, clip, lr, peak, lr_ratio, betas, constants, RULE, AUTO, SMOOTHING, CAPPED, LOSS_WEIGHT, LONG_STEP,
        SIGNS, RECENT, RELATIVE_EPS, START, GROWTH, n, N,
    )  # fmt: skip
    keep = made & (not FROZEN)
    before = tl.load(old + 6 * n + 1)
    after = tl.where(keep, played, before)
    kept = _delta_factor(before * lr_ratio, after, constants, RULE, HINDSIGHT)
    new += program * (6 * n + 6)
    _store_where(keep, new, old, s, r, m, v, q, w0, s_init, played, h, gradients, n, N)
    tl.store(new + 6 * n + 3, tl.where(made, peak, last_lr))
    tl.store(new + 6 * n + 5, longest)
    scales += program * 6
    tl.store(scales + 0, before)
    tl.store(scales + 1, after)
    tl.store(scales + 2, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(scales + 3, tl.where(keep, kept / lr_ratio, 1.0))
    tl.store(scales + 4, tl.where(made, clip, 1.0))
    tl.store(scales + 5, steps)


@triton.jit
def _squares(sums, tuners, NUMBERS: tl.constexpr):
    """The squared norms of all tuners' gradients, or zeros where a sum is not finite; and whether all are."""
    every = tl.arange(0, NUMBERS)
    seen = tl.load(sums + every, every < tuners * 6 + 1, 0.0)
    is_finite = tl.sum(tl.where(seen - seen == 0, 0, 1)) == 0
    return tl.where(is_finite, tl.load(sums + every * 6 + 1, every < tuners, 0.0), 0.0), is_finite


@triton.jit
def _clip(sums, norm_high, norm_low, tuners, CLIPS: tl.constexpr, CLIP_EPS: tl.constexpr, NUMBERS: tl.constexpr):
    """What clipping multiplies the gradients by."""
    clip = tl.zeros_like(tl.load(sums)) + 1.0
    if CLIPS:
        squares, _ = _squares(sums, tuners, NUMBERS)
        largest = tl.zeros_like(clip) + norm_high + norm_low
        clip = tl.minimum(largest / (tl.sqrt(tl.sum(squares)) + CLIP_EPS), 1.0)
    return clip


@triton.jit
def _examined(
    sums, old, clip, tuners, RULE: tl.constexpr, OUTLIER: tl.constexpr, NUMBERS: tl.constexpr, n: tl.constexpr
):
    """Of the gradients of all tuners: whether all are finite, whether there are any, whether one is an outlier."""
    squares, is_finite = _squares(sums, tuners, NUMBERS)
    has_gradients = is_finite & (tl.load(sums + tuners * 6) > 0)
    every = tl.arange(0, NUMBERS)
    outliers = tl.zeros_like(every)
    if RULE == _OPTIMISTIC:
        longests = tl.load(old + every * (6 * n + 6) + 6 * n + 5, every < tuners, 0.0)
        outliers = tl.where((longests > 0) & (clip * tl.sqrt(squares) > OUTLIER * longests), 1, 0)
    return is_finite, has_gradients, has_gradients & (tl.sum(outliers) > 0)


@triton.jit
def _limited(norm, longest, is_outlier, LIMITS: tl.constexpr, OUTLIER: tl.constexpr, GRADIENT_GROWTH: tl.constexpr):
    """What the base sees of the gradient, as a share, and the longest one that is remembered after it."""
    mine = (longest > 0) & (norm > OUTLIER * longest)
    share = tl.zeros_like(norm) + 1.0
    if LIMITS:
        is_too_long = (longest > 0) & (norm > GRADIENT_GROWTH * longest)
        share = tl.where(is_too_long, GRADIENT_GROWTH * longest / tl.where(norm > 0, norm, 1.0), 1.0)
    seen = tl.where(is_outlier, norm, share * norm)
    return share, tl.where(mine, 10.0 * longest, tl.maximum(0.999 * longest, seen))


@triton.jit
def _advance(
    old, sums, clip, lr, peak, lr_ratio, betas, constants,
    RULE: tl.constexpr, AUTO: tl.constexpr, SMOOTHING: tl.constexpr, CAPPED: tl.constexpr, LOSS_WEIGHT: tl.constexpr,
    LONG_STEP: tl.constexpr, SIGNS: tl.constexpr, RECENT: tl.constexpr, RELATIVE_EPS: tl.constexpr,
    START: tl.constexpr, GROWTH: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`advance`, after `rescale_to_lr` by `lr_ratio`."""
    lane = tl.arange(0, N)
    inside = lane < n
    s = tl.load(old + lane, inside, 0.0) * lr_ratio
    m = tl.load(old + 2 * n + lane, inside, 0.0) / lr_ratio
    v = tl.load(old + 3 * n + lane, inside, 0.0) / (lr_ratio * lr_ratio)
    s_init = tl.load(old + 6 * n) * lr_ratio
    played = tl.load(old + 6 * n + 1) * lr_ratio
    gradients = tl.load(old + 6 * n + 4)
    gg = clip * clip * tl.load(sums + 1)
    dd = tl.load(sums + 4) / (lr_ratio * lr_ratio)
    h = _hypergradient(sums, clip, lr_ratio, gg, played, constants, RULE)
    if AUTO:
        longest = tl.load(old + 6 * n + 5)
        s_init = _initial_scale(s_init, gg, tl.load(sums + 2), dd, gradients, longest, constants, RULE, START, GROWTH)
    else:
        s_init = tl.load(constants + _S_INIT)
    seen = h
    judged = h + tl.zeros_like(m)
    if RULE == _OPTIMISTIC:  # it remembers nothing before it starts
        seen = tl.where(s_init > 0, h, 0.0)
        step = tl.zeros_like(played)
        if AUTO:
            step = tl.where(s_init > 0, tl.load(constants + _S_INIT) * played / tl.where(s_init > 0, s_init, 1.0), 0.0)
        usual = _usual_loss(m, constants, RECENT, n, N)
        judged = _judged(seen, usual, lr, peak, step, constants, AUTO, SIGNS, LOSS_WEIGHT, LONG_STEP) + tl.zeros_like(m)
    bet = s
    if SMOOTHING:
        total = tl.sum(s)
        bet = s * tl.where(total > 0, played / tl.where(total > 0, total, 1.0), 1.0)
    beta = tl.load(betas + lane, inside, 0.5)
    s, r, m, v, q, w0 = _place_bets(old, beta, m, v, s_init, bet, seen, judged, constants, RULE, RELATIVE_EPS, n, N)
    if CAPPED:
        total = tl.sum(s)
        cap = tl.load(constants + _MAX_SCALE)
        s = s * tl.where(total > cap, cap / tl.where(total > 0, total, 1.0), 1.0)
    gradients += tl.where(gg > 0, 1.0, 0.0)
    played = _next_played(tl.sum(s), played, gradients, constants, RULE, SMOOTHING)
    return s, r, m, v, q, w0, s_init, played, h, gradients


@triton.jit
def _hypergradient(sums, clip, lr_ratio, gg, played, constants, RULE: tl.constexpr):
    xx = tl.load(sums + 2)
    direction = tl.where(xx > 0, tl.load(sums + 3) / lr_ratio / tl.sqrt(tl.where(xx > 0, xx, 1.0)), 0.0)
    h = clip * tl.load(sums) / lr_ratio + tl.load(constants + _S_DECAY) * played * tl.sqrt(gg) * direction
    if RULE == _OPTIMISTIC:
        h += tl.load(sums + 5) / lr_ratio
    return h


@triton.jit
def _initial_scale(s_init, gg, xx, dd, gradients, longest, constants, RULE: tl.constexpr, START: tl.constexpr,
                   GROWTH: tl.constexpr):  # fmt: skip
    """Where it is measured."""
    measured = tl.load(constants + _S_INIT) * (1.0 + tl.sqrt(xx)) / tl.sqrt(tl.where(dd > 0, dd, 1.0))
    later = s_init
    first = tl.where(dd > 0, measured, 0.0)
    if RULE == _OPTIMISTIC:
        growth = tl.where(longest > 0, tl.sqrt(gg) / tl.where(longest > 0, longest, 1.0), float("inf"))
        may_start = (gradients >= START) & (dd > 0) & (gg > 0)
        first = tl.where(may_start, measured * gradients / tl.maximum(growth, 1.0), 0.0)
        later = tl.minimum(s_init, GROWTH * measured * tl.maximum(gradients - START, 1.0))
        later = tl.where(dd > 0, later, s_init)
    return tl.where(s_init > 0, later, first)


@triton.jit
def _next_played(total, played, gradients, constants, RULE: tl.constexpr, SMOOTHING: tl.constexpr):
    if SMOOTHING:
        c = tl.load(constants + _SMOOTHING)
        if RULE == _OPTIMISTIC:
            c = tl.minimum(c, gradients / (gradients + tl.load(constants + _HASTE)))
        one = tl.zeros_like(played) + 1.0
        logs = c * tl.log(tl.where(played > 0, played, one)) + (1.0 - c) * tl.log(tl.where(total > 0, total, one))
        average = tl.where(total > 0, tl.exp(logs), 0.0)
        total = tl.where(played > 0, average, total)
    return total


@triton.jit
def _delta_factor(before, after, constants, RULE: tl.constexpr, HINDSIGHT: tl.constexpr):
    factor = tl.zeros_like(after) + 1.0
    if HINDSIGHT:
        share = tl.load(constants + _HINDSIGHT)
        moved = share + (1.0 - share) * before / tl.where(after > 0, after, 1.0)
        factor = tl.where((before > 0) & (after > 0), moved, 1.0)
    if RULE == _OPTIMISTIC:
        factor = tl.where((before == 0) & (after > 0), 0.0, factor)
    return factor


@triton.jit
def _store_where(keep, new, old, s, r, m, v, q, w0, s_init, played, h, gradients, n: tl.constexpr, N: tl.constexpr):
    """The row after the step; elsewhere the old one."""
    lane = tl.arange(0, N)
    inside = lane < n
    tl.store(new + lane, tl.where(keep, s, tl.load(old + lane, inside)), inside)
    tl.store(new + n + lane, tl.where(keep, r, tl.load(old + n + lane, inside)), inside)
    tl.store(new + 2 * n + lane, tl.where(keep, m, tl.load(old + 2 * n + lane, inside)), inside)
    tl.store(new + 3 * n + lane, tl.where(keep, v, tl.load(old + 3 * n + lane, inside)), inside)
    tl.store(new + 4 * n + lane, tl.where(keep, q, tl.load(old + 4 * n + lane, inside)), inside)
    tl.store(new + 5 * n + lane, tl.where(keep, w0, tl.load(old + 5 * n + lane, inside)), inside)
    tl.store(new + 6 * n, tl.where(keep, s_init, tl.load(old + 6 * n)))
    tl.store(new + 6 * n + 1, tl.where(keep, played, tl.load(old + 6 * n + 1)))
    tl.store(new + 6 * n + 2, tl.where(keep, h, tl.load(old + 6 * n + 2)))
    tl.store(new + 6 * n + 4, tl.where(keep, gradients, tl.load(old + 6 * n + 4)))
