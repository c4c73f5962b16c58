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
  schedule's fall will remove: `loss_weight`. In full counts only what is beyond the usual size (`usual_loss`), the sign
  of a run that diverges, and all of it where steps have become long (`LONG_STEP`), since noise alone would raise S.
  Gains count less then, and sooner where a base steps by signs (`gain_weight`).
- sqrt(v) has a floor relative to the longest memory's, instead of an absolute eps: near zero loss h fades away, and a
  bettor with a short memory would raise its bet without limit. So nothing depends on the scale of the loss either.
- h is the slope of all that the base minimises: of the loss and, where weight decay is added to the gradient, of the
  penalty (`Sums.dp`).
- The first bet is placed after `START` gradients, not one, and is measured again as long as the updates grow. What was
  gathered before it is dropped.
- A gradient a hundred times as long as any before it is skipped, like one that is not finite, and a base whose steps
  grow with the gradient sees none that is much longer than any before: `mechanic_plugins.core.gradients`.

Three options go beyond the paper with any rule: `smoothing` plays a log-average of S, with a `hindsight` below 1 the
weights follow a change of S only in part (`delta_factor`), and `own_warmup` cancels a schedule's warm-up
(`rescale_to_lr`).

The paper's letters live in this module only: elsewhere S is `scale`, Delta is `delta`, lambda is `s_decay`.

Everything here is a pure function of tensors. Nothing waits for the device. Vectors are float64 of shape
(tuners, n), one row for all parameters or one for each param group; scalars have shape (tuners, 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.gradients import gradient_limit, limited
from mechanic_plugins.core.rules import place_bets
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import (
    Sums,
    TunerState,
    clipped,
    gradient_count,
    keep_where,
    with_scaled_gradients,
)

__all__ = [
    "GROWTH",
    "HASTY_MOVE",
    "START",
    "Outcome",
    "advance",
    "decide",
    "delta_factor",
    "haste_of",
    "limits_growth",
    "noted",
    "rescale_to_lr",
]

START = 2
"""The optimistic rule: how many gradients come before the first bet."""
GROWTH = 2.0
"""The optimistic rule: updates that are up to that much longer than the first ones leave the first bet as it is."""
HASTY_MOVE = 6e-3
"""The optimistic rule smooths over as many steps as there were so far if the first move was so long, over twice as many
if it was half as long, until `smoothing` limits it; over fewer where the run is short (`Settings.haste`). A scale that
shoots up at first does lasting harm in a long run."""


class Outcome(NamedTuple):
    """What came of a step. `applied` is 0-dim, `delta_factor` of shape (tuners, 1).

    `clip` is what the base's gradients are to be multiplied by, 0-dim or for each tuner; None for nothing.
    """

    state: TunerState
    counters: Tensor
    applied: Tensor
    delta_factor: Tensor
    clip: Tensor | None = None


def decide(
    state: TunerState,
    sums: Tensor,
    counters: Tensor,
    *,
    settings: Settings,
    betas: Tensor,
    lr: Tensor,
    hold: bool,
    max_grad_norm: float | None = None,
) -> Outcome:
    """Whether a step is applied, and the tuner after it. `mechanic_plugins.kernels.gpu_tuner` does it in one launch.

    A step is skipped, and counted as skipped, where a sum is not finite or the gradient an outlier. One without any
    gradient is not applied either.

    Args:
        state: The tuner before the step.
        sums: The vector of the step, over all parameters of all ranks.
        counters: Steps applied and steps skipped.
        settings: The constants, in the units of delta.
        betas: `settings.betas` on the state's device.
        lr: The base's learning rate in this step, of shape (tuners, 1).
        hold: Leave the scale as it is.
        max_grad_norm: Take the gradients for clipped to this norm.
    """
    clip = None
    if max_grad_norm is not None:
        sums, clip = clipped(sums, max_grad_norm)
    finite = sums.isfinite().all()
    has_gradients = finite & (gradient_count(sums)[0] > 0)
    products, longest, fits, applied = Sums.of_vector(sums), state.longest, finite, has_gradients
    if settings.rule == "optimistic":
        norms, share = products.gg.sqrt(), None
        if limits_growth(settings) and not hold:
            share = limited(longest, norms)
        if share is not None:
            clip = share[:, 0] if clip is None else share[:, 0] * clip
            products = Sums.of_vector(with_scaled_gradients(sums, share))
        outliers, remembered = gradient_limit(longest, norms, share)
        is_usual, longest = ~(has_gradients & outliers.any()), torch.where(has_gradients, remembered, longest)
        fits, applied = finite & is_usual, has_gradients & is_usual
    counters = counters + torch.stack([applied, ~fits])
    skipped = state._replace(longest=longest)
    if applied.device.type == "cpu" and not applied:
        return Outcome(skipped, counters, applied, torch.ones_like(lr))
    new, factor = _tuned(state, products, settings=settings, betas=betas, lr=lr, hold=hold)
    new = new._replace(longest=longest)
    if applied.device.type != "cpu":
        new, factor = keep_where(applied, new, skipped), torch.where(applied, factor, 1.0)
        clip = None if clip is None else torch.where(applied, clip, 1.0)
    return Outcome(new, counters, applied, factor, clip)


def _tuned(
    state: TunerState, sums: Sums, *, settings: Settings, betas: Tensor, lr: Tensor, hold: bool
) -> tuple[TunerState, Tensor]:
    """The tuner after a step that is applied, and what delta is multiplied by."""
    if hold:
        return noted(state, lr), torch.ones_like(lr)
    may_rise = lr.device.type != "cpu" or bool((lr > state.lr).any())
    if not (settings.own_warmup and may_rise):
        state = noted(state, lr) if may_rise else state
        new = advance(state, sums, settings=settings, betas=betas, lr=lr)
        return new, delta_factor(state, new, settings)
    state, sums, lr_ratio = rescale_to_lr(state, sums, lr)
    new = advance(state, sums, settings=settings, betas=betas, lr=lr)
    return new, delta_factor(state, new, settings) / lr_ratio


def advance(state: TunerState, sums: Sums, *, settings: Settings, betas: Tensor, lr: Tensor) -> TunerState:
    """One step of the tuner: what it will play next, given the sums at the weights it plays now.

    Args:
        state: The tuner before the step, its `lr` the highest so far, this step's included.
        sums: The inner products over all parameters of all shards.
        settings: The constants, in the units of delta.
        betas: `settings.betas` as a tensor on the state's device, so that no step copies it there.
        lr: The base's learning rate in this step, of shape (tuners, 1).
    """
    h = _hypergradient(state, sums, settings)
    gradients = state.gradients + (sums.gg > 0)
    state = state._replace(gradients=gradients, s_init=_initial_scale(state, sums, settings))
    bets = place_bets(state, h, _placed_bet(state, settings), settings, betas, lr)
    s = _capped(bets.s, settings.max_scale)
    played = _next_played(state, s, settings)
    return TunerState(
        s, bets.r, bets.m, bets.v, bets.q, bets.w0, state.s_init, played, h, state.lr, gradients, state.longest
    )


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
    dg, dx, dp = (product / lr_ratio for product in (sums.dg, sums.dx, sums.dp))
    return state, sums._replace(dg=dg, dx=dx, dd=sums.dd / lr_ratio**2, dp=dp), lr_ratio


def noted(state: TunerState, lr: Tensor) -> TunerState:
    """Only remembers a new maximum of the learning rate; an lr of NaN is none."""
    return state._replace(lr=torch.where(lr > state.lr, lr, state.lr))


def delta_factor(before: TunerState, after: TunerState, settings: Settings) -> Tensor:
    """What delta is multiplied by as the scale changes, so that x = x_ref + scale * delta holds; of shape (tuners, 1).

    The updates that made the weights were played at the scales of their time. With a hindsight of 1, as published, all
    of them are played again at the new scale, and delta stays; with 0 the weights stay, and delta takes up the change.

    The updates before the first bet were all made at the same weights. Played at once they would be one step, several
    times as long: the optimistic rule drops them.
    """
    was_played, is_played = before.played > 0, after.played > 0
    factor = torch.ones_like(after.played)
    if settings.rule == "optimistic":
        factor = (was_played | ~is_played).to(factor.dtype)
    if settings.hindsight == 1:
        return factor
    moved = settings.hindsight + (1 - settings.hindsight) * before.played / after.played
    return torch.where(was_played & is_played, moved, factor)


def _hypergradient(state: TunerState, sums: Sums, settings: Settings) -> Tensor:
    h = sums.dg
    if settings.s_decay != 0:
        direction = torch.where(sums.xx > 0, sums.dx / sums.xx.sqrt(), 0.0)
        h = h + settings.s_decay * state.played * sums.gg.sqrt() * direction
    return h + sums.dp if settings.rule == "optimistic" else h


def _initial_scale(state: TunerState, sums: Sums, settings: Settings) -> Tensor:
    """A number is what the settings say; "auto" makes the first move the share `first_move` of the weights' norm.

    1 is added to the norm for weights that start at 0. The optimistic rule waits for a second gradient, expects the
    next update to be longer if the gradient is, and lowers the scale when updates turn out much longer than at first.
    """
    if settings.s_init != "auto":
        return torch.full_like(state.s_init, settings.s_init)
    measured = settings.first_move * (1 + sums.xx.sqrt()) / sums.dd.sqrt()
    if settings.rule != "optimistic":
        return torch.where(state.s_init > 0, state.s_init, torch.where(sums.dd > 0, measured, 0.0))
    # of one update: delta holds as many as there were gradients, and the first few no more after the first bet
    later = torch.minimum(state.s_init, GROWTH * measured * (state.gradients - START).clamp(min=1))
    has_started = state.s_init > 0
    if has_started.device.type == "cpu" and has_started.all():
        return later
    first = measured * state.gradients / (sums.gg.sqrt() / state.longest).clamp(min=1.0)
    may_start = (state.gradients >= START) & (sums.dd > 0) & (sums.gg > 0)
    return torch.where(has_started, later, torch.where(may_start, first, 0.0))


def _placed_bet(state: TunerState, settings: Settings) -> Tensor:
    """The bets as they were played: with smoothing, each one shares the smoothed scale's fate."""
    if settings.smoothing == 0:
        return state.s
    return state.s * (state.played / state.s.sum(-1, keepdim=True)).nan_to_num(1.0)  # 0 / 0 before the first bet


def _next_played(state: TunerState, s: Tensor, settings: Settings) -> Tensor:
    total = s.sum(-1, keepdim=True)
    if settings.smoothing == 0:
        return total
    c: float | Tensor = settings.smoothing
    if settings.rule == "optimistic":
        c = (state.gradients / (state.gradients + haste_of(settings))).clamp(max=c)
    averaged = torch.exp(c * state.played.log() + (1 - c) * total.log())
    return torch.where(state.played > 0, averaged, total)


def limits_growth(settings: Settings) -> bool:
    """Whether the base sees only part of gradients that are much longer than any before."""
    return settings.rule == "optimistic" and settings.steps == "growing"


def haste_of(settings: Settings) -> float:
    """How little the scale is smoothed at first: over the number of steps so far, divided by this."""
    return settings.haste * settings.first_move / HASTY_MOVE


def _capped(s: Tensor, max_scale: float | None) -> Tensor:
    if max_scale is None:
        return s
    return s * (max_scale / s.sum(-1, keepdim=True)).clamp(max=1.0)
