"""The rules by which the bettors move, given h: one function for each, all with one signature.

`_paper` is Algorithm 1. See `mechanic_plugins.core.tuner` for the letters and for what the default changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import TunerState

__all__ = [
    "LONG_STEP",
    "LOSS_WEIGHT",
    "RELATIVE_EPS",
    "USUAL_LOSS_IF_STEPS_GROW",
    "Bets",
    "gain_weight",
    "loss_weight",
    "place_bets",
    "recent_bettor",
    "usual_loss",
]

LOSS_WEIGHT = 0.1
"""The optimistic rule: how much a loss counts beside a gain, at the peak of the schedule."""
LONG_STEP = 0.2
"""The optimistic rule: losses count in full where steps as long as the first would be this share of the first weights,
and beyond it gains count less, by the square. Where the gradient is mostly noise, nothing else would stop the scale;
and at a loss near 0 weight decay makes gains for ever, by what it takes away."""
USUAL_LOSS_IF_STEPS_GROW = 0.5
"""The optimistic rule: a loss beyond `Settings.usual_loss` of the largest |h| so far counts in full: a run may be
diverging. For a base whose steps grow with the gradient it is this share of the largest |h| of the last hundred steps
or so: it diverges sooner, and an |h| from its first steps would hide that."""
RELATIVE_EPS = 1e-2
"""The optimistic rule: the floor under sqrt(v), as a share of the largest of all bettors. With a tenth of it a network
that had learned all its samples at a constant lr raised the scale until it broke."""


class Bets(NamedTuple):
    """The fields of `TunerState` that a rule moves."""

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    q: Tensor
    w0: Tensor


def place_bets(state: TunerState, h: Tensor, bet: Tensor, settings: Settings, betas: Tensor, lr: Tensor) -> Bets:
    """The bettors after a step that saw `h`, where `bet` is what each of them had placed."""
    if settings.rule == "optimistic":
        h = h * (state.s_init > 0)  # it remembers nothing before it starts
        return _optimistic(state, h, _judged(state, h, settings, lr), bet, betas, settings.eps)
    return _RULES[settings.rule](state, h, bet, betas, settings.eps)


def loss_weight(state: TunerState, lr: Tensor, settings: Settings) -> Tensor:
    """From the least at the schedule's peak to 1 where the learning rate has fallen to 0, or the steps are long."""
    share = (lr / state.lr).nan_to_num(1.0)  # 0 / 0 for a base that ignores a schedule
    weight = 1 - (1 - LOSS_WEIGHT) * share.clamp(0, 1) ** (1 / 3)
    return torch.maximum(weight, (_step_length(state, settings) / LONG_STEP).clamp(max=1.0) ** 2)


def gain_weight(state: TunerState, settings: Settings) -> Tensor:
    """1, and less where steps are long; for a base that steps by signs, wherever the scale is above the first one.

    Signs are as long where the gradient is mere noise: at the scale that would be best for the first hundred steps the
    weights grow, and the run does not recover.
    """
    if settings.s_init != "auto":
        return torch.ones_like(state.played)
    allowed = settings.first_move if settings.steps == "signs" else LONG_STEP
    return (allowed / _step_length(state, settings).clamp(min=allowed)) ** 2


def _step_length(state: TunerState, settings: Settings) -> Tensor:
    """Of an update as long as the first, as a share of the first weights; 0 where nobody knows how long that was."""
    if settings.s_init != "auto":
        return torch.zeros_like(state.played)
    return (settings.first_move * state.played / state.s_init).nan_to_num(0.0)  # 0 / 0 before the first bet


def recent_bettor(betas: Sequence[float]) -> int:
    """The one whose memory is nearest to a hundred steps."""
    return min(range(len(betas)), key=lambda index: abs(betas[index] - 0.99))


def _judged(state: TunerState, h: Tensor, settings: Settings, lr: Tensor) -> Tensor:
    """What is rewarded: gains and losses by their weights."""
    usual = usual_loss(state.m, settings)
    loss = loss_weight(state, lr, settings) * torch.minimum(h, usual) + (h - usual).clamp(min=0)
    return torch.where(h > 0, loss, gain_weight(state, settings) * h)


def _optimistic(state: TunerState, h: Tensor, judged: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
    """Algorithm 1 with weights on gains and losses, and a relative floor under sqrt(v)."""
    n = beta.numel()
    m = torch.maximum(beta * state.m, h.abs())
    v = beta**2 * state.v + h**2
    r = (beta * state.r - bet * judged).clamp(min=0)
    root = v.sqrt()
    floor = eps + RELATIVE_EPS * root.amax(-1, keepdim=True)
    s = torch.where(v > 0, (state.s_init * m / n + r) / (root + floor), 0.0)
    return Bets(s, r, m, v, state.q, state.w0)


def usual_loss(m: Tensor, settings: Settings) -> Tensor:
    """What of a loss is weighed; beyond it a loss counts in full."""
    if settings.steps != "growing":
        return settings.usual_loss * m.amax(-1, keepdim=True)
    recent = recent_bettor(settings.betas)
    return USUAL_LOSS_IF_STEPS_GROW * m[..., recent : recent + 1]


_Rule = Callable[[TunerState, Tensor, Tensor, Tensor, float], Bets]


def _paper(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
    """Algorithm 1. |h| in m is what the paper means: with the sign as printed, a first h < 0 leaves s at 0 for ever."""
    n = beta.numel()
    m = torch.maximum(beta * state.m, h.abs())
    v = beta**2 * state.v + h**2
    r = (beta * state.r - bet * h).clamp(min=0)
    s = torch.where(v > 0, (state.s_init * m / n + r) / (v.sqrt() + eps), 0.0)
    return Bets(s, r, m, v, state.q, state.w0)


def _unclamped(state: TunerState, h: Tensor, h_of_r: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
    n = beta.numel()
    m = torch.maximum(beta * state.m, h.abs() + eps)
    v = beta**2 * state.v + h**2
    r = beta * state.r - bet * h_of_r
    s = (state.s_init * m / n + r.clamp(min=0)) / (v.sqrt() + eps)
    return Bets(s, r, m, v, state.q, state.w0)


def _experiments(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
    """The code of the paper's experiments: s starts at s_init, r may fall below 0 and is clamped in the wealth."""
    return _unclamped(state, h, h, bet, beta, eps)


def _optax(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
    """optax.contrib: as `experiments`, and the h that is rewarded is clipped to the largest one seen before."""
    return _unclamped(state, h, torch.clamp(h, -state.m, state.m), bet, beta, eps)


def _theory(state: TunerState, h: Tensor, bet: Tensor, beta: Tensor, eps: float) -> Bets:
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
    return Bets(s, r, m, v, q, w0)


_RULES: dict[str, _Rule] = {"paper": _paper, "experiments": _experiments, "optax": _optax, "theory": _theory}
