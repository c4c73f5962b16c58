r"""The tuner: one number a step in, a learning-rate scale out.

Mechanic (Cutkosky, Defazio, Mehta: "Mechanic: A Learning Rate Tuner", arXiv 2306.00144) plays
x_t = x_ref + S_t * Delta_t, where Delta_t is the sum of the base optimizer's updates. Each step it sees

    h = <Delta, g> + lambda * S * |g| * <Delta, x> / |x|

and moves n coin bettors, one for each beta (Algorithm 1):

    m = max(beta * m, |h|)                      the largest h seen, forgotten slowly
    v = beta^2 * v + h^2                        the energy of h
    r = max(0, beta * r - s * h)                the reward of what was bet
    s = (s_init * m / n + r) / (sqrt(v) + eps)  the next bet; S = sum(s)

That is `rule="paper"`. The default, `rule="optimistic"`, differs in these ways, each for a reason that was measured:

- A loss (h > 0) counts less than a gain while the learning rate is near its peak, since much of it is noise that the
  schedule's fall will remove: `loss_weight`.
- sqrt(v) has a floor relative to the longest memory's, instead of an absolute eps: near zero loss h fades away, and a
  bettor with a short memory would raise its bet without limit. So nothing depends on the scale of the loss either.
- The first bet is placed after `START` gradients, not one, and is measured again as long as the updates grow.
- A gradient `OUTLIER` times as long as any before it is skipped, like one that is not finite: `gradient_limit`.

Three options go beyond the paper with any rule: `smoothing` plays a log-average of S, with a `hindsight` below 1 the
weights follow a change of S only in part (`delta_factor`), and `own_warmup` cancels a schedule's warm-up
(`rescale_to_lr`).

The paper's letters live in this module only: elsewhere S is `scale`, Delta is `delta`, lambda is `s_decay`.

Everything here is a pure function of tensors. Nothing waits for the device. Vectors are float64 of shape
(tuners, n), one row for all parameters or one for each param group; scalars have shape (tuners, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.settings import Settings

__all__ = [
    "LOSS_WEIGHT",
    "OUTLIER",
    "RELATIVE_EPS",
    "SCALARS",
    "START",
    "SUMS",
    "WINDOW",
    "Sums",
    "TunerState",
    "advance",
    "column",
    "delta_factor",
    "gradient_limit",
    "initial_state",
    "keep_where",
    "noted",
    "rescale_to_lr",
    "was_outlier",
]

LOSS_WEIGHT = 0.1
"""The optimistic rule: how much a loss counts beside a gain, at the peak of the schedule."""
RELATIVE_EPS = 1e-3
"""The optimistic rule: the floor under sqrt(v), as a share of the largest of all bettors."""
START = 2
"""The optimistic rule: how many gradients come before the first bet."""
WINDOW = 8
"""The optimistic rule smooths over an eighth of the steps so far, until `smoothing` limits it."""
OUTLIER = 100.0
"""The optimistic rule: a gradient that much longer than any before it is skipped."""

SUMS = ("dg", "gg", "xx", "dx", "dd")
"""The five inner products a step needs, of delta (d), gradient (g) and weights (x), in this order."""


class Sums(NamedTuple):
    """The five global inner products, each of shape (tuners, 1)."""

    dg: Tensor
    gg: Tensor
    xx: Tensor
    dx: Tensor
    dd: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Sums:
        """From a (tuners, 5) tensor."""
        return cls(*(column.unsqueeze(-1) for column in table.unbind(-1)))


class TunerState(NamedTuple):
    """All that the tuner remembers.

    `q` and `w0` serve `rule="theory"` alone and are zero elsewhere. `played` is the scale that made the current
    weights, `h` what the last step saw, `lr` the base's highest learning rate so far, `gradients` the number of
    those that were not zero, and `longest` the norm of the longest.
    """

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    q: Tensor
    w0: Tensor
    s_init: Tensor
    played: Tensor
    h: Tensor
    lr: Tensor
    gradients: Tensor
    longest: Tensor


SCALARS = ("s_init", "played", "h", "lr", "gradients", "longest")
"""The fields of `TunerState` that hold one number for each tuner."""


class _Bets(NamedTuple):
    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    q: Tensor
    w0: Tensor


def initial_state(settings: Settings, *, tuners: int, device: torch.device) -> TunerState:
    """The state before the first step."""
    n = len(settings.betas)
    sizes = {name: 1 if name in SCALARS else n for name in TunerState._fields}
    zeros = {name: torch.zeros(tuners, k, dtype=torch.float64, device=device) for name, k in sizes.items()}
    if settings.rule in ("experiments", "optax") and settings.s_init != "auto":
        zeros["s"] += settings.s_init
    return TunerState(**zeros)


def advance(state: TunerState, sums: Sums, *, settings: Settings, betas: Tensor, lr: Tensor) -> TunerState:
    """One step of the tuner: what it will play next, given the sums at the weights it plays now.

    Args:
        state: The tuner before the step, its `lr` the highest so far, this step's included.
        sums: The inner products over all parameters of all shards.
        settings: The constants, in the units of delta.
        betas: `settings.betas` as a tensor on the state's device, so that no step copies it there.
        lr: The base's learning rate in this step, of shape (tuners, 1).
    """
    h = _hypergradient(state, sums, s_decay=settings.s_decay)
    gradients = state.gradients + (sums.gg > 0)
    state = state._replace(gradients=gradients, s_init=_initial_scale(state, sums, settings))
    bets = _bets(state, h, _placed_bet(state, settings), settings, betas, lr)
    s = _capped(bets.s, settings.max_scale)
    played = _next_played(state, s, settings)
    return TunerState(
        s, bets.r, bets.m, bets.v, bets.q, bets.w0, state.s_init, played, h, state.lr, gradients, state.longest
    )


def gradient_limit(longest: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a gradient is an outlier, and the longest one that is remembered after it.

    The memory fades over a thousand steps. An outlier raises it tenfold: gradients that have really grown are skipped
    a few times only.
    """
    is_outlier = (longest > 0) & (norm > OUTLIER * longest)
    return is_outlier, torch.where(is_outlier, 10 * longest, torch.maximum(0.999 * longest, norm))


def was_outlier(longest: Tensor, norm: Tensor) -> Tensor:
    """Whether the longest gradient so far is an outlier beside this one."""
    return (norm > 0) & (longest > OUTLIER * norm)


def column(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """One number for each tuner, of shape (tuners, 1), without waiting for the device or copying to it."""
    cells = (
        number.to(device, torch.float64).reshape(())
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    )
    return torch.stack(list(cells)).unsqueeze(1)


def rescale_to_lr(state: TunerState, sums: Sums, lr: Tensor) -> tuple[TunerState, Sums, Tensor]:
    """As if all updates so far had been made at `lr`, where that is a new maximum.

    Delta grows by as much as the scale falls, so the weights stay where they are, and the learning rate in force
    continues from where it was: the scale's own rise takes the place of the schedule's.

    Args:
        state: The tuner before the step.
        sums: Of this step, with delta as it is.
        lr: The base's learning rate in this step, of shape (tuners, 1).

    Returns:
        The state and the sums in the new unit, and what delta is to be divided by.
    """
    lr_ratio = torch.where((state.lr > 0) & (lr > state.lr), state.lr / lr, 1.0)
    state = state._replace(
        s=state.s * lr_ratio,
        m=state.m / lr_ratio,
        v=state.v / lr_ratio**2,
        s_init=state.s_init * lr_ratio,
        played=state.played * lr_ratio,
        lr=torch.where(lr > state.lr, lr, state.lr),
    )
    return state, sums._replace(dg=sums.dg / lr_ratio, dx=sums.dx / lr_ratio, dd=sums.dd / lr_ratio**2), lr_ratio


def noted(state: TunerState, lr: Tensor) -> TunerState:
    """Only remembers a new maximum of the learning rate; an lr of NaN is none."""
    return state._replace(lr=torch.where(lr > state.lr, lr, state.lr))


def keep_where(condition: Tensor, new: TunerState, old: TunerState) -> TunerState:
    """`new` where the condition holds, else `old`: decided on the device."""
    return TunerState(*(torch.where(condition, a, b) for a, b in zip(new, old, strict=True)))


def delta_factor(before: TunerState, after: TunerState, *, hindsight: float) -> Tensor:
    """What delta is multiplied by as the scale changes, so that x = x_ref + scale * delta holds; of shape (tuners, 1).

    The updates that made the weights were played at the scales of their time. With a hindsight of 1, as published, all
    of them are played again at the new scale, and delta stays; with 0 the weights stay, and delta takes up the change.
    """
    if hindsight == 1:
        return torch.ones_like(after.played)
    was_played = (before.played > 0) & (after.played > 0)
    return torch.where(was_played, hindsight + (1 - hindsight) * before.played / after.played, 1.0)


def _hypergradient(state: TunerState, sums: Sums, *, s_decay: float) -> Tensor:
    direction = torch.where(sums.xx > 0, sums.dx / sums.xx.sqrt(), 0.0)
    return sums.dg + s_decay * state.played * sums.gg.sqrt() * direction


def _initial_scale(state: TunerState, sums: Sums, settings: Settings) -> Tensor:
    """A number is what the settings say; "auto" makes the first move the share `first_move` of the weights' norm.

    1 is added to the norm for weights that start at 0. The optimistic rule waits for a second gradient, expects the
    next update to be longer if the gradient is, and lowers the scale when updates turn out longer than at first.
    """
    if settings.s_init != "auto":
        return torch.full_like(state.s_init, settings.s_init)
    measured = settings.first_move * (1 + sums.xx.sqrt()) / sums.dd.sqrt()
    if settings.rule != "optimistic":
        return torch.where(state.s_init > 0, state.s_init, torch.where(sums.dd > 0, measured, 0.0))
    measured = measured * state.gradients.clamp(min=START) / START
    first = measured / (sums.gg.sqrt() / state.longest).clamp(min=1.0)
    may_start = (state.gradients >= START) & (sums.dd > 0) & (sums.gg > 0)
    return torch.where(
        state.s_init > 0,
        torch.where(sums.dd > 0, torch.minimum(state.s_init, measured), state.s_init),
        torch.where(may_start, first, 0.0),
    )


def _placed_bet(state: TunerState, settings: Settings) -> Tensor:
    """The bets as they were played: with smoothing, each one shares the smoothed scale's fate."""
    if settings.smoothing == 0:
        return state.s
    total = state.s.sum(-1, keepdim=True)
    return state.s * torch.where(total > 0, state.played / total, 1.0)


def _next_played(state: TunerState, s: Tensor, settings: Settings) -> Tensor:
    total = s.sum(-1, keepdim=True)
    if settings.smoothing == 0:
        return total
    c = torch.full_like(total, settings.smoothing)
    if settings.rule == "optimistic":
        c = torch.minimum(c, state.gradients / (state.gradients + WINDOW))
    averaged = torch.exp(c * state.played.log() + (1 - c) * total.log())
    return torch.where(state.played > 0, averaged, total)


def _capped(s: Tensor, max_scale: float | None) -> Tensor:
    if max_scale is None:
        return s
    return s * (max_scale / s.sum(-1, keepdim=True)).clamp(max=1.0)


def _bets(state: TunerState, h: Tensor, bet: Tensor, settings: Settings, betas: Tensor, lr: Tensor) -> _Bets:
    if settings.rule == "optimistic":
        return _optimistic(state, h, bet, betas, settings.eps, loss_weight(state, lr))
    return _RULES[settings.rule](state, h, bet, betas, settings.eps)


def loss_weight(state: TunerState, lr: Tensor) -> Tensor:
    """From LOSS_WEIGHT at the schedule's peak to 1 where the learning rate has fallen to 0."""
    share = torch.where(state.lr > 0, lr / state.lr, 1.0)
    return 1 - (1 - LOSS_WEIGHT) * share.clamp(0, 1).sqrt()


def _optimistic(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float, weight: Tensor) -> _Bets:
    """Algorithm 1 with a weight on losses and a relative floor under sqrt(v); it remembers nothing before it starts."""
    n = beta.numel()
    h = torch.where(state.s_init > 0, h, 0.0)
    m = torch.maximum(beta * state.m, h.abs())
    v = beta**2 * state.v + h**2
    r = (beta * state.r - bet * torch.where(h > 0, weight * h, h)).clamp(min=0)
    root = v.sqrt()
    floor = eps + RELATIVE_EPS * root.amax(-1, keepdim=True)
    s = torch.where(v > 0, (state.s_init * m / n + r) / (root + floor), 0.0)
    return _Bets(s, r, m, v, state.q, state.w0)


_Rule = Callable[[TunerState, Tensor, Tensor, Tensor, float], _Bets]


def _paper(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> _Bets:
    """Algorithm 1. |h| in m is what the paper means: with the sign as printed, a first h < 0 leaves s at 0 for ever."""
    n = beta.numel()
    m = torch.maximum(beta * state.m, h.abs())
    v = beta**2 * state.v + h**2
    r = (beta * state.r - bet * h).clamp(min=0)
    s = torch.where(v > 0, (state.s_init * m / n + r) / (v.sqrt() + eps), 0.0)
    return _Bets(s, r, m, v, state.q, state.w0)


def _unclamped(state: TunerState, h: Tensor, h_of_r: Tensor, bet: Tensor, beta: Tensor, eps: float) -> _Bets:
    n = beta.numel()
    m = torch.maximum(beta * state.m, h.abs() + eps)
    v = beta**2 * state.v + h**2
    r = beta * state.r - bet * h_of_r
    s = (state.s_init * m / n + r.clamp(min=0)) / (v.sqrt() + eps)
    return _Bets(s, r, m, v, state.q, state.w0)


def _experiments(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> _Bets:
    """The code of the paper's experiments: s starts at s_init, r may fall below 0 and is clamped in the wealth."""
    return _unclamped(state, h, h, bet, beta, eps)


def _optax(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> _Bets:
    """optax.contrib: as `experiments`, and the h that is rewarded is clipped to the largest one seen before."""
    return _unclamped(state, h, torch.clamp(h, -state.m, state.m), bet, beta, eps)


def _theory(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> _Bets:
    """Algorithm 2, for the regret bound.

    q has the sign that the proof uses (as printed, s would be positive only where it loses). The initial wealth is
    s_init times the first |h| that is not 0: no bet stands before it, so it is a constant of the game.
    """
    n = beta.numel()
    clipped = torch.clamp(h, -state.m, state.m)
    m = torch.maximum(beta * state.m, h.abs())
    v = beta**2 * state.v + clipped**2
    r = beta * state.r - bet * clipped
    q = beta * state.q - clipped
    w0 = torch.where(state.w0 > 0, state.w0, state.s_init * m / n)
    root = (4 * m**2 + v).sqrt()
    s = torch.where(m > 0, (w0 + r) / (root + eps) * (q / root).clamp(0, 1), 0.0)
    return _Bets(s, r, m, v, q, w0)


_RULES: dict[str, _Rule] = {"paper": _paper, "experiments": _experiments, "optax": _optax, "theory": _theory}
