"""The tuner's step as one GPU kernel: `mechanic_plugins.core.tuner` and the default rule in Triton.

`mechanic_plugins.kernels.gpu_tuner` launches it. The first gradients of a run, from which the rule measures, are left
to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.core import relative
from mechanic_plugins.core.tuner import CLIP_EPS

# Use these only on the right of an operator: Triton's interpreter accepts constants nowhere else.
_PRIOR, _POWER, _GAIN = map(tl.constexpr, (relative.PRIOR, relative.POWER, relative.GAIN))
_WINDOW, _OUTLIER, _FAR = map(tl.constexpr, (relative.WINDOW, relative.OUTLIER, relative.FAR))
_CLIP_EPS = tl.constexpr(CLIP_EPS)

_S, _R, _M, _V, _Q = (tl.constexpr(place) for place in range(5))
_PLAYED, _H, _LR, _GRADIENTS, _LONGEST = (tl.constexpr(place) for place in range(7, 12))
_SIZE, _LENGTH, _PATH, _TRAVELLED, _ELAPSED, _TOUCHED = (tl.constexpr(place) for place in range(12, 18))
_WIDTH = tl.constexpr(18)
"""Offsets in a row: six vectors of one number, then `mechanic_plugins.core.row.SCALARS`."""


@triton.jit
def tuner_kernel(
    sums, old, new, constants, scales, lrs, tuners,
    HOLD: tl.constexpr, CAPPED: tl.constexpr, CLIPS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """`decide`, with one program per tuner.

    `constants` holds the cap and the norm to clip to, `lrs` the base's lr for each tuner. The rows are followed by the
    numbers of steps made and skipped. `scales` receives, per tuner, the scale, whether the step is made, and `clip`.
    """
    program = tl.program_id(0)
    squares, is_finite = _squares(sums, tuners, NUMBERS)
    clip = tl.zeros_like(tl.load(sums)) + 1.0
    if CLIPS:
        clip = tl.minimum(tl.load(constants + 1) / (tl.sqrt(tl.sum(squares)) + _CLIP_EPS), 1.0)
    has_gradients = is_finite & (tl.load(sums + tuners * 6) > 0)
    is_outlier = has_gradients & _has_outlier(squares, old, clip, tuners, NUMBERS)
    made = has_gradients & (is_outlier == 0)
    if program == 0:
        _note_steps(old + tuners * _WIDTH, new + tuners * _WIDTH, made, is_finite & (is_outlier == 0))
    sums += program * 6
    old += program * _WIDTH
    new += program * _WIDTH
    _remember_longest(old, new, clip * tl.sqrt(tl.where(is_finite, tl.load(sums + 1), 0.0)), has_gradients)
    moves = made & (not HOLD)
    lr, before = tl.load(lrs + program), tl.load(old + _PLAYED)
    s = _advance(sums, old, new, clip, lr, before, moves)
    if CAPPED:
        s = tl.minimum(s, tl.load(constants))
    played = tl.where(moves, s, before)
    _put(new, old, _S, s, moves)
    _put(new, old, _PLAYED, played, moves)
    _walk(old, new, played, lr, made)
    for place in tl.static_range(_Q, _PLAYED):
        tl.store(new + place, tl.load(old + place))
    tl.store(new + _SIZE, tl.load(old + _SIZE))
    tl.store(new + _TOUCHED, tl.load(old + _TOUCHED))
    scales += program * 3
    tl.store(scales + 0, played)
    tl.store(scales + 1, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(scales + 2, tl.where(made, clip, 1.0))


@triton.jit
def _put(new, old, PLACE: tl.constexpr, value, is_new):
    tl.store(new + PLACE, tl.where(is_new, value, tl.load(old + PLACE)))


@triton.jit
def _squares(sums, tuners, NUMBERS: tl.constexpr):
    """The squared gradient norms of all tuners, with 0 for non-finite ones, and whether all sums are finite."""
    every = tl.arange(0, NUMBERS)
    seen = tl.load(sums + every, every < tuners * 6 + 1, 0.0)
    is_finite = tl.sum(tl.where(seen - seen == 0, 0, 1)) == 0
    return tl.where(is_finite, tl.load(sums + every * 6 + 1, every < tuners, 0.0), 0.0), is_finite


@triton.jit
def _has_outlier(squares, old, clip, tuners, NUMBERS: tl.constexpr):
    """Whether any tuner's gradient is an outlier."""
    every = tl.arange(0, NUMBERS)
    longests = tl.load(old + every * _WIDTH + _LONGEST, every < tuners, 0.0)
    return tl.sum(tl.where((longests > 0) & (clip * tl.sqrt(squares) > longests * _OUTLIER), 1, 0)) > 0


@triton.jit
def _note_steps(old, new, made, is_sound):
    """Counts the steps made, and those skipped because of their gradients."""
    tl.store(new, tl.load(old) + tl.where(made, 1.0, 0.0))
    tl.store(new + 1, tl.load(old + 1) + tl.where(is_sound, 0.0, 1.0))


@triton.jit
def _remember_longest(old, new, norm, has_gradients):
    longest = tl.load(old + _LONGEST)
    limit = longest * _OUTLIER
    raised = tl.maximum(longest, tl.where((longest > 0) & (norm > limit), limit, norm))
    tl.store(new + _LONGEST, tl.where(has_gradients, raised, longest))


@triton.jit
def _advance(sums, old, new, clip, lr, played, moves):
    """`relative.advance` after the first gradients. Stores the evidence and returns the next scale."""
    has_gradient, peak = tl.load(sums + 1) > 0, tl.maximum(tl.load(old + _LR), lr)
    come = clip * tl.load(sums) + tl.load(sums + 5)
    weight = tl.where(has_gradient & (played > 0), lr / tl.where(peak > 0, peak, 1.0), 0.0)
    r, m, v, length = _gather(old, -come, tl.load(sums + 4), weight, peak)
    _put(new, old, _R, r, moves)
    _put(new, old, _M, m, moves)
    _put(new, old, _V, v, moves)
    _put(new, old, _H, come / tl.where(played > 0, played, 1.0), moves)
    _put(new, old, _LENGTH, length, moves)
    _put(new, old, _GRADIENTS, tl.load(old + _GRADIENTS) + tl.where(has_gradient, 1.0, 0.0), moves)
    energy = v * tl.where(m > _WINDOW, m, m * 0.0 + _WINDOW)
    rho = tl.where(energy > 0, r / tl.sqrt(tl.where(energy > 0, energy, 1.0)), 0.0)
    unit = peak * length
    touched, size = tl.load(old + _TOUCHED), tl.load(old + _SIZE)
    gone = tl.where((played > 0) & (tl.load(old + _PATH) > 0), tl.load(sums + 4) / touched, 0.0)
    size = tl.maximum(size, tl.sqrt(gone) / _FAR) * tl.exp(tl.log(touched) * _POWER)
    scale = size * _PRIOR / tl.where(unit > 0, unit, 1.0) * tl.exp(rho * _GAIN)
    return tl.where(has_gradient & (unit > 0), scale, tl.load(old + _S))


@triton.jit
def _gather(old, z, dd, weight, peak):
    """`relative._gather`. A step that does not count has a weight of 0."""
    elapsed, travelled = tl.load(old + _ELAPSED), tl.load(old + _TRAVELLED)
    run = elapsed / tl.where(peak > 0, peak, 1.0)
    share = tl.load(old + _PLAYED) * elapsed / tl.where(travelled > 0, travelled, 1.0)
    proof = weight * tl.where(travelled > 0, tl.minimum(share, 1.0), 1.0)
    kept = 1.0 - proof / _WINDOW
    r = kept * tl.load(old + _R) + proof * z
    v = kept * tl.load(old + _V) + proof * z * z
    m = kept * tl.load(old + _M) + proof
    path, length = tl.load(old + _PATH), tl.load(old + _LENGTH)
    counts = (weight > 0) & (path > 0)
    square = run * length * length + weight * dd / tl.where(path > 0, path, 1.0)
    return r, m, v, tl.where(counts, tl.sqrt(square / tl.where(counts, run + weight, 1.0)), length)


@triton.jit
def _walk(old, new, played, lr, made):
    """`relative.walk`, and the sums behind the learned rate."""
    path = tl.load(old + _PATH)
    _put(new, old, _PATH, path + played * lr * (played * lr), made & (path >= 0))
    _put(new, old, _TRAVELLED, tl.load(old + _TRAVELLED) + played * lr, made)
    _put(new, old, _ELAPSED, tl.load(old + _ELAPSED) + lr, made)
    _put(new, old, _LR, tl.maximum(tl.load(old + _LR), lr), made)
