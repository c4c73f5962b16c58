"""The tuner's step on a GPU, in one launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core import gradients, rules, tuner
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import Outcome
from mechanic_plugins.core.tuner_state import CLIP_EPS, SCALARS, SUMS, TunerState, column
from mechanic_plugins.kernels.cuda import is_capturing, on

__all__ = ["constants_of", "decide", "packed_copy", "unpacked"]

_VECTORS = len(TunerState._fields) - len(SCALARS)
_SCALES = 6
"""The columns of `Decision.scales`."""
_RULES = ("paper", "experiments", "optax", "theory", "optimistic")


def decide(
    state: TunerState,
    sums: Tensor,
    counters: Tensor,
    *,
    settings: Settings,
    betas: Tensor,
    constants: Tensor,
    lrs: Sequence[float | Tensor] | Tensor,
    hold: bool,
    max_grad_norm: float | None = None,
) -> tuple[Outcome, Tensor]:
    """`mechanic_plugins.core.tuner.decide` in one launch, and for each tuner what `Decision.scales` says.

    `constants` are what `constants_of` says, on the device; `lrs` the learning rates of the tuners, or all of them in
    float64 on the device. While a CUDA graph is captured, the state and the counters are written over: its replays read
    them where they were.
    """
    from mechanic_plugins.kernels.triton_tuner import tuner_kernel

    tuners, n = state.s.shape
    width, limits = _width(n), tuner.limits_growth(settings) and not hold
    out = torch.empty(tuners * (width + _SCALES) + 2, dtype=torch.float64, device=sums.device)
    new, new_counters, scales = torch.split(out, [tuners * width, 2, tuners * _SCALES])
    tensors = (sums, _packed(state), new, betas, constants, counters, new_counters, scales, column(lrs, sums.device))
    with on(sums.device):
        tuner_kernel[(tuners,)](
            *tensors,
            *_halves(max_grad_norm),
            tuners,
            FROZEN=hold,
            CLIPS=max_grad_norm is not None and max_grad_norm < torch.finfo(torch.float32).max,
            CLIP_EPS=CLIP_EPS,
            LIMITS=limits,
            NUMBERS=_power(tuners * len(SUMS) + 1),
            n=n,
            N=_power(n),
            num_warps=1,
            **_variant(settings),
        )
    after, table = _state_of(new.view(tuners, width)), scales.view(tuners, _SCALES)
    if is_capturing(sums.device):
        after, new_counters = _written_over(state, counters, after, new_counters)
    clip = table[:, 4] if limits else None if max_grad_norm is None else table[0, 4]
    return Outcome(after, new_counters, table[0, 2], table[:, 3:4], clip), table


def packed_copy(state: TunerState, counters: Tensor) -> tuple[Tensor, TunerState, Tensor]:
    """All that a step changes in one row of memory, where it can be written at once, and views of it."""
    row = torch.cat([torch.cat(list(state), dim=1).flatten(), counters])
    return row, *unpacked(row, tuners=len(state.s))


def unpacked(row: Tensor, *, tuners: int) -> tuple[TunerState, Tensor]:
    """The views of such a row: the tuner, and its counters."""
    return _state_of(row[:-2].view(tuners, -1)), row[-2:]


def _written_over(
    state: TunerState, counters: Tensor, after: TunerState, new_counters: Tensor
) -> tuple[TunerState, Tensor]:
    for theirs, ours in zip((*state, counters), (*after, new_counters), strict=True):
        theirs.copy_(ours)
    return state, counters


def _variant(settings: Settings) -> dict[str, Any]:
    """What is compiled into the kernel."""
    return {
        "RULE": _RULES.index(settings.rule),
        "AUTO": settings.s_init == "auto",
        "SMOOTHING": settings.smoothing != 0,
        "CAPPED": settings.max_scale is not None,
        "HINDSIGHT": settings.hindsight != 1,
        "RESTATES": settings.own_warmup,
        "LOSS_WEIGHT": rules.LOSS_WEIGHT,
        "SIGNS": settings.steps == "signs",
        "LONG_STEP": rules.LONG_STEP,
        "RECENT": rules.recent_bettor(settings.betas) if settings.steps == "growing" else -1,
        "RELATIVE_EPS": rules.RELATIVE_EPS,
        "START": tuner.START,
        "GROWTH": tuner.GROWTH,
        "OUTLIER": gradients.OUTLIER,
        "GRADIENT_GROWTH": gradients.GRADIENT_GROWTH,
    }


def constants_of(settings: Settings) -> tuple[float, ...]:
    """s_decay, eps, s_init or its fraction, the cap, smoothing, hindsight, haste, and how large a usual loss may be."""
    s_init = settings.first_move if settings.s_init == "auto" else settings.s_init
    usual = rules.USUAL_LOSS_IF_STEPS_GROW if settings.steps == "growing" else settings.usual_loss
    played = (settings.max_scale or 0.0, settings.smoothing, settings.hindsight, tuner.haste_of(settings))
    return (settings.s_decay, settings.eps, s_init, *played, usual)


def _packed(state: TunerState) -> Tensor:
    """One row for each tuner."""
    base = state.s._base
    if (
        base is not None
        and state.longest._base is base
        and base.dim() == 1
        and state.s.stride(0) == _width(state.s.shape[1])
    ):
        return state.s
    return torch.cat(list(state), dim=1)


def _state_of(table: Tensor) -> TunerState:
    """Views of the rows."""
    n = (table.shape[1] - len(SCALARS)) // _VECTORS
    return TunerState(*torch.split(table, [n] * _VECTORS + [1] * len(SCALARS), dim=1))


def _width(n: int) -> int:
    return _VECTORS * n + len(SCALARS)


def _halves(number: float | None) -> tuple[float, float]:
    """A number as two of float32, which is what a kernel takes: together they have 48 of its 53 bits."""
    if number is None or not math.isfinite(number):
        return 0.0, 0.0
    high = ctypes.c_float(number).value
    return high, ctypes.c_float(number - high).value


def _power(number: int) -> int:
    """The next power of two: what Triton can hold."""
    return 1 << max(number - 1, 0).bit_length()
