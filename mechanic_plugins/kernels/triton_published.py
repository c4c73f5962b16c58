"""The published rules on a GPU: `mechanic_plugins.rule.published`.

`mechanic_plugins.kernels.triton_decide` puts these functions into its kernel.
"""

from __future__ import annotations

from typing import get_args

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_tuner import (
    _DG,
    _DX,
    _GG,
    _GRADIENTS,
    _SCALE,
    _SIGNAL,
    _UNIT,
    _XX,
    _with,
)
from mechanic_plugins.rule.published import PublishedTuner
from mechanic_plugins.rule.settings import Rule

_PAPER, _EXPERIMENTS, _OPTAX, _THEORY = (
    tl.constexpr(get_args(Rule).index(name)) for name in ("paper", "experiments", "optax", "theory")
)
_FLOATS = tl.constexpr(len(PublishedTuner.floats()))
_S, _R, _M, _V, _Q, _W0 = (tl.constexpr(PublishedTuner.lists().index(name)) for name in ("s", "r", "m", "v", "q", "w0"))
_MAX_SCALE, _S_INIT, _S_DECAY, _EPS, _BETAS = map(tl.constexpr, (0, 2, 3, 4, 5))
"""Places in `mechanic_plugins.kernels.gpu_tuner.constants_on`."""


@triton.jit
def published_observe(
    row, lane, old, new, sums, clip, constants, moves,
    RULE: tl.constexpr, CAPPED: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`PublishedTuner.observe` and `limit`: stores the learners' lists, and returns the row and the next scale."""
    gg, xx, unit = clip * clip * tl.load(sums + _GG), tl.load(sums + _XX), tl.load(old + _UNIT)
    direction = tl.where(xx > 0, tl.load(sums + _DX) / tl.sqrt(tl.where(xx > 0, xx, 1.0)), 0.0)
    h = clip * tl.load(sums + _DG)
    h += tl.load(constants + _S_DECAY) * unit * tl.load(old + _SCALE) * tl.sqrt(gg) * direction
    row = _with(row, lane, _SIGNAL, h, moves)
    row = _with(row, lane, _GRADIENTS, tl.load(old + _GRADIENTS) + 1.0, moves & (gg > 0))
    old += _FLOATS
    new += _FLOATS
    s, r, m, v, q, w0 = _next_bets(old, h, unit, constants, RULE, n, N)
    scale = tl.sum(s)
    if CAPPED:
        cap = tl.load(constants + _MAX_SCALE)
        s = tl.where(scale > cap, s * (cap / tl.where(scale > 0, scale, 1.0)), s)
        scale = tl.minimum(scale, cap)
    _put(new, old, _S, s, moves, n, N)
    _put(new, old, _R, r, moves, n, N)
    _put(new, old, _M, m, moves, n, N)
    _put(new, old, _V, v, moves, n, N)
    _put(new, old, _Q, q, moves, n, N)
    _put(new, old, _W0, w0, moves, n, N)
    return row, scale


@triton.jit
def _next_bets(old, h, unit, constants, RULE: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    """All rules at once: the code that they share stands here once."""
    each = tl.arange(0, N)
    s, r, m = _list(old, _S, n, N), _list(old, _R, n, N), _list(old, _M, n, N)
    v, q, w0 = _list(old, _V, n, N), _list(old, _Q, n, N), _list(old, _W0, n, N)
    beta = tl.load(constants + _BETAS + each, each < n, 0.5)
    s_init, eps = tl.load(constants + _S_INIT) / unit / n, tl.load(constants + _EPS) * unit
    rewarded = h + tl.zeros_like(m)
    if RULE == _OPTAX or RULE == _THEORY:
        rewarded = tl.minimum(tl.maximum(rewarded, -m), m)
    r = beta * r - s * rewarded
    if RULE == _PAPER:
        r = tl.maximum(r, 0.0)
    if RULE == _EXPERIMENTS or RULE == _OPTAX:
        m = tl.maximum(beta * m, tl.abs(h) + eps)
    else:
        m = tl.maximum(beta * m, tl.abs(h))
    if RULE == _THEORY:
        v = beta * beta * v + rewarded * rewarded
        q = beta * q - rewarded
        w0 = tl.where(w0 > 0, w0, s_init * m)
        root = tl.sqrt(4.0 * m * m + v)
        divisor = root + eps
        share = tl.minimum(tl.maximum(q / tl.where(root > 0, root, 1.0), 0.0), 1.0)
        s = tl.where(m > 0, (w0 + r) / tl.where(divisor > 0, divisor, 1.0) * share, 0.0)
    else:
        v = beta * beta * v + h * h
        divisor = tl.sqrt(v) + eps
        s = (s_init * m + tl.maximum(r, 0.0)) / tl.where(divisor > 0, divisor, 1.0)
        if RULE == _PAPER:
            s = tl.where(v > 0, s, 0.0)
    return tl.where(each < n, s, 0.0), r, m, v, q, w0


@triton.jit
def _list(old, LIST: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    each = tl.arange(0, N)
    return tl.load(old + LIST * n + each, each < n, 0.0)


@triton.jit
def _put(new, old, LIST: tl.constexpr, values, is_new, n: tl.constexpr, N: tl.constexpr):
    each = tl.arange(0, N)
    tl.store(new + LIST * n + each, tl.where(is_new, values, _list(old, LIST, n, N)), each < n)
