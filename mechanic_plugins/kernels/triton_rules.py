"""The rules by which the bettors move: `mechanic_plugins.core.rules` in Triton's dialect.

The compiler puts these functions into the kernel of `mechanic_plugins.kernels.triton_tuner`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAPER, _EXPERIMENTS, _OPTAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_THEORY, _OPTIMISTIC = tl.constexpr(3), tl.constexpr(4)
"""`RULE`: the rules in the order of `mechanic_plugins.kernels.gpu_tuner`."""
_S_DECAY, _EPS, _S_INIT, _MAX_SCALE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SMOOTHING, _HINDSIGHT, _HASTE, _USUAL_LOSS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
"""Places in `constants`: see `mechanic_plugins.kernels.gpu_tuner.constants_of`."""


@triton.jit
def _usual_loss(m, constants, RECENT: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    lane = tl.arange(0, N)
    if RECENT < 0:
        largest = tl.max(tl.where(lane < n, m, 0.0))
    else:
        largest = tl.sum(tl.where(lane == RECENT, m, 0.0))
    return tl.load(constants + _USUAL_LOSS) * largest


@triton.jit
def _judged(h, usual, lr, peak, step, constants, AUTO: tl.constexpr, SIGNS: tl.constexpr, LOSS_WEIGHT: tl.constexpr,
            LONG_STEP: tl.constexpr):  # fmt: skip
    """With the weights of losses and of gains; `step` is what `_step_length` says."""
    share = tl.where(peak > 0, lr / tl.where(peak > 0, peak, 1.0), 1.0)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    root = tl.where(share > 0, tl.exp(tl.log(tl.where(share > 0, share, 1.0)) / 3.0), 0.0)
    long = tl.minimum(step / LONG_STEP, 1.0)
    loss_weight = tl.maximum(1.0 - (1.0 - LOSS_WEIGHT) * root, long * long)
    gain_weight = tl.zeros_like(loss_weight) + 1.0
    if AUTO:
        allowed = LONG_STEP + tl.zeros_like(step)
        if SIGNS:
            allowed = tl.load(constants + _S_INIT)
        short = allowed / tl.maximum(step, allowed)
        gain_weight = short * short
    loss = loss_weight * tl.minimum(h, usual) + tl.maximum(h - usual, 0.0)
    return tl.where(h > 0, loss, gain_weight * h)


@triton.jit
def _place_bets(old, beta, m, v, s_init, bet, h, judged, constants, RULE: tl.constexpr, RELATIVE_EPS: tl.constexpr,
                n: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """All rules at once: what they share is written once."""
    lane = tl.arange(0, N)
    inside = lane < n
    eps = tl.load(constants + _EPS)
    q = tl.load(old + 4 * n + lane, inside, 0.0)
    w0 = tl.load(old + 5 * n + lane, inside, 0.0)
    if RULE == _OPTAX or RULE == _THEORY:
        judged = tl.minimum(tl.maximum(judged, -m), m)
    r = beta * tl.load(old + n + lane, inside, 0.0) - bet * judged
    if RULE == _PAPER or RULE == _OPTIMISTIC:
        r = tl.maximum(r, 0.0)
    if RULE == _EXPERIMENTS or RULE == _OPTAX:
        m = tl.maximum(beta * m, tl.abs(h) + eps)
    else:
        m = tl.maximum(beta * m, tl.abs(h))
    if RULE == _THEORY:
        v = beta * beta * v + judged * judged
        q = beta * q - judged
        w0 = tl.where(w0 > 0, w0, s_init * m / n)
        root = tl.sqrt(4.0 * m * m + v)
        share = tl.minimum(tl.maximum(q / tl.where(root > 0, root, 1.0), 0.0), 1.0)
        s = tl.where(m > 0, (w0 + r) * share / (root + eps), 0.0)
    else:
        v = beta * beta * v + h * h
        divisor = tl.sqrt(v) + eps
        if RULE == _OPTIMISTIC:
            divisor += RELATIVE_EPS * tl.max(tl.where(inside, tl.sqrt(v), 0.0))
        s = (s_init * m / n + tl.maximum(r, 0.0)) / tl.where(divisor > 0, divisor, 1.0)
        if RULE == _PAPER or RULE == _OPTIMISTIC:
            s = tl.where(v > 0, s, 0.0)
    return tl.where(inside, s, 0.0), r, m, v, q, w0
