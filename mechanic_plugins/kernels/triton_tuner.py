"""The tuner's step as one GPU kernel: `mechanic_plugins.core.tuner`, `relative` and `published` in Triton's dialect.

`mechanic_plugins.kernels.gpu_tuner` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAPER, _EXPERIMENTS, _OPTAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_THEORY, _RELATIVE = tl.constexpr(3), tl.constexpr(4)
"""`RULE`: the rules in the order of `mechanic_plugins.kernels.gpu_tuner`."""
_MAX_SCALE, _S_DECAY, _EPS, _S_INIT, _BETAS = (tl.constexpr(place) for place in range(5))
"""Places in `constants`: see `mechanic_plugins.kernels.gpu_tuner.constants_of`."""
_PLAYED, _H, _LR, _GRADIENTS, _LONGEST = (tl.constexpr(place) for place in range(1, 6))
_SIZE, _LENGTH, _PATH, _TRAVELLED, _ELAPSED, _TOUCHED = (tl.constexpr(place) for place in range(6, 12))
_SCALARS = tl.constexpr(12)
"""Places of the scalars in a row, behind its six vectors (`mechanic_plugins.core.row.SCALARS`); s_init is the first."""


@triton.jit
def tuner_kernel(
    sums, old, new, constants, counters, new_counters, scales, lrs, norm_high, norm_low, tuners,
    RULE: tl.constexpr, HOLD: tl.constexpr, CAPPED: tl.constexpr, CLIPS: tl.constexpr, CLIP_EPS: tl.constexpr,
    PRIOR: tl.constexpr, GAIN: tl.constexpr, ADVERSE: tl.constexpr, DOUBT: tl.constexpr, MEMORY: tl.constexpr,
    BEGINNING: tl.constexpr, OUTLIER: tl.constexpr, NUMBERS: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`decide`, a tuner a program.

    `lrs` has the base's lr of each tuner, `counters` steps and skipped. With CLIPS the gradients are taken for clipped
    to the norm that has its two halves. `scales` gets, for each tuner, before, after, whether the step is made, what
    delta and the gradients are multiplied by, and the steps so far.
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
    old += program * (6 * n + _SCALARS)
    new += program * (6 * n + _SCALARS)
    scalars = old + 6 * n
    lane = tl.arange(0, N)
    inside = lane < n
    lr = tl.load(lrs + program)
    last_lr, before = tl.load(scalars + _LR), tl.load(scalars + _PLAYED)
    peak = tl.where(lr > last_lr, lr, last_lr)
    q, w0 = tl.load(old + 4 * n + lane, inside, 0.0), tl.load(old + 5 * n + lane, inside, 0.0)
    size, length, touched = tl.load(scalars + _SIZE), tl.load(scalars + _LENGTH), tl.load(scalars + _TOUCHED)
    longest = tl.load(scalars + _LONGEST)
    if RULE == _RELATIVE:
        s, r, m, v, h, gradients, size, length, touched = _relative(
            sums, old, clip, peak, size, length, touched, PRIOR, GAIN, ADVERSE, DOUBT, MEMORY, BEGINNING, n, N
        )
        norm = clip * tl.sqrt(tl.where(is_finite, tl.load(sums + 1), 0.0))
        mine = (longest > 0) & (norm > OUTLIER * longest)
        raised = tl.maximum(longest, tl.where(mine, OUTLIER * longest, norm))
        longest = tl.where(has_gradients, raised, longest)
    else:
        s, r, m, v, q, w0, h, gradients = _published(sums, old, clip, q, w0, constants, RULE, n, N)
    if CAPPED:
        total = tl.sum(s)
        cap = tl.load(constants + _MAX_SCALE)
        s = s * tl.where(total > cap, cap / tl.where(total > 0, total, 1.0), 1.0)
    keep = made & (not HOLD)
    played = tl.where(keep, tl.sum(s), before)
    factor = tl.zeros_like(played) + 1.0
    if RULE == _RELATIVE:
        factor = tl.where(played > 0, before / tl.where(played > 0, played, 1.0), 1.0)
    _store_where(keep, new, old, s, r, m, v, q, w0, n, N)
    tl.store(new + 6 * n, tl.where(keep, tl.load(constants + _S_INIT), tl.load(scalars)))
    tl.store(new + 6 * n + _PLAYED, played)
    tl.store(new + 6 * n + _H, tl.where(keep, h, tl.load(scalars + _H)))
    tl.store(new + 6 * n + _GRADIENTS, tl.where(keep, gradients, tl.load(scalars + _GRADIENTS)))
    tl.store(new + 6 * n + _LONGEST, longest)
    tl.store(new + 6 * n + _SIZE, tl.where(keep, size, tl.load(scalars + _SIZE)))
    tl.store(new + 6 * n + _LENGTH, tl.where(keep, length, tl.load(scalars + _LENGTH)))
    tl.store(new + 6 * n + _TOUCHED, tl.where(keep, touched, tl.load(scalars + _TOUCHED)))
    _walk(scalars, new + 6 * n, before, played, lr, peak, made)
    scales += program * 6
    tl.store(scales + 0, before)
    tl.store(scales + 1, played)
    tl.store(scales + 2, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(scales + 3, tl.where(made, factor, 1.0))
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
    if RULE == _RELATIVE:
        longests = tl.load(old + every * (6 * n + _SCALARS) + 6 * n + _LONGEST, every < tuners, 0.0)
        outliers = tl.where((longests > 0) & (clip * tl.sqrt(squares) > OUTLIER * longests), 1, 0)
    return is_finite, has_gradients, has_gradients & (tl.sum(outliers) > 0)


@triton.jit
def _walk(scalars, new, before, played, lr, peak, made):
    """`walk`, and what `Row.travelled` and `elapsed` add up, for a step that is made."""
    path = tl.load(scalars + _PATH)
    further = tl.where(before > 0, path, 0.0) + tl.where(played > 0, played, 1.0) * lr
    tl.store(new + _PATH, tl.where(made & (path >= 0) & (lr > 0), further, path))
    tl.store(new + _TRAVELLED, tl.load(scalars + _TRAVELLED) + tl.where(made, played * lr, 0.0))
    tl.store(new + _ELAPSED, tl.load(scalars + _ELAPSED) + tl.where(made & (played > 0), lr, 0.0))
    tl.store(new + _LR, tl.where(made, peak, tl.load(scalars + _LR)))


@triton.jit
def _relative(sums, old, clip, peak, size, length, touched, PRIOR: tl.constexpr, GAIN: tl.constexpr,
              ADVERSE: tl.constexpr, DOUBT: tl.constexpr, MEMORY: tl.constexpr, BEGINNING: tl.constexpr,
              n: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """`relative.advance`, with vectors of one lane."""
    lane = tl.arange(0, N)
    scalars = old + 6 * n
    gradients, played, path = tl.load(scalars + _GRADIENTS), tl.load(scalars + _PLAYED), tl.load(scalars + _PATH)
    has_gradient = tl.load(sums + 1) > 0
    is_first = has_gradient & (gradients == 0) & (size == 0)
    squares, nonzero, last = tl.load(sums + 2), tl.load(sums + 3), tl.load(sums + 5)
    measured = tl.sqrt(tl.where(nonzero > 0, squares / tl.where(nonzero > 0, nonzero, 1.0), 1.0))
    counted = tl.where(has_gradient & (gradients < BEGINNING), tl.maximum(touched, squares), touched)
    touched = tl.where(is_first, last, counted)
    size = tl.where(is_first, measured, size)
    moved = tl.where(played > 0, played, 1.0) * tl.sqrt(tl.load(sums + 4)) / tl.where(path > 0, path, 1.0)
    length = tl.where(has_gradient & (is_first == 0) & (path > 0), tl.maximum(length, moved), length)
    h = tl.where(is_first, 0.0, clip * tl.load(sums) + last)
    z = -played * h
    kept = 1.0 - 1.0 / (DOUBT + MEMORY * gradients)
    gathers = has_gradient & (played > 0)
    r, m, v = tl.load(old + n + lane), tl.load(old + 2 * n + lane), tl.load(old + 3 * n + lane)
    r = tl.where(gathers, kept * r + z, r)
    m = tl.where(gathers, kept * m + 1.0, m)
    v = tl.where(gathers, kept * v + z * z, v)
    energy = v * (m + DOUBT)
    rho = tl.where(energy > 0, r / tl.sqrt(tl.where(energy > 0, energy, 1.0)), 0.0)
    rho = tl.where(rho > 0, rho, ADVERSE * rho)
    unit = peak * length
    scale = PRIOR * size * tl.sqrt(touched) / tl.where(unit > 0, unit, 1.0) * tl.exp(GAIN * rho)
    s = tl.where(has_gradient & (unit > 0), scale, tl.load(old + lane))
    return s, r, m, v, h, gradients + tl.where(has_gradient, 1.0, 0.0), size, length, touched


@triton.jit
def _published(sums, old, clip, q, w0, constants, RULE: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    """`published.advance`, all rules at once."""
    scalars = old + 6 * n
    lane = tl.arange(0, N)
    inside = lane < n
    eps, s_init = tl.load(constants + _EPS), tl.load(constants + _S_INIT)
    gg, xx = clip * clip * tl.load(sums + 1), tl.load(sums + 2)
    direction = tl.where(xx > 0, tl.load(sums + 3) / tl.sqrt(tl.where(xx > 0, xx, 1.0)), 0.0)
    h = clip * tl.load(sums) + tl.load(constants + _S_DECAY) * tl.load(scalars + _PLAYED) * tl.sqrt(gg) * direction
    beta = tl.load(constants + _BETAS + lane, inside, 0.5)
    s = tl.load(old + lane, inside, 0.0)
    m = tl.load(old + 2 * n + lane, inside, 0.0)
    v = tl.load(old + 3 * n + lane, inside, 0.0)
    seen = h + tl.zeros_like(m)
    if RULE == _OPTAX or RULE == _THEORY:
        seen = tl.minimum(tl.maximum(seen, -m), m)
    r = beta * tl.load(old + n + lane, inside, 0.0) - s * seen
    if RULE == _PAPER:
        r = tl.maximum(r, 0.0)
    if RULE == _EXPERIMENTS or RULE == _OPTAX:
        m = tl.maximum(beta * m, tl.abs(h) + eps)
    else:
        m = tl.maximum(beta * m, tl.abs(h))
    if RULE == _THEORY:
        v = beta * beta * v + seen * seen
        q = beta * q - seen
        w0 = tl.where(w0 > 0, w0, s_init * m / n)
        root = tl.sqrt(4.0 * m * m + v)
        share = tl.minimum(tl.maximum(q / tl.where(root > 0, root, 1.0), 0.0), 1.0)
        s = tl.where(m > 0, (w0 + r) * share / (root + eps), 0.0)
    else:
        v = beta * beta * v + h * h
        divisor = tl.sqrt(v) + eps
        s = (s_init * m / n + tl.maximum(r, 0.0)) / tl.where(divisor > 0, divisor, 1.0)
        if RULE == _PAPER:
            s = tl.where(v > 0, s, 0.0)
    gradients = tl.load(scalars + _GRADIENTS) + tl.where(gg > 0, 1.0, 0.0)
    return tl.where(inside, s, 0.0), r, m, v, q, w0, h, gradients


@triton.jit
def _store_where(keep, new, old, s, r, m, v, q, w0, n: tl.constexpr, N: tl.constexpr):
    """The vectors after the step; elsewhere the old ones."""
    lane = tl.arange(0, N)
    inside = lane < n
    tl.store(new + lane, tl.where(keep, s, tl.load(old + lane, inside)), inside)
    tl.store(new + n + lane, tl.where(keep, r, tl.load(old + n + lane, inside)), inside)
    tl.store(new + 2 * n + lane, tl.where(keep, m, tl.load(old + 2 * n + lane, inside)), inside)
    tl.store(new + 3 * n + lane, tl.where(keep, v, tl.load(old + 3 * n + lane, inside)), inside)
    tl.store(new + 4 * n + lane, tl.where(keep, q, tl.load(old + 4 * n + lane, inside)), inside)
    tl.store(new + 5 * n + lane, tl.where(keep, w0, tl.load(old + 5 * n + lane, inside)), inside)
