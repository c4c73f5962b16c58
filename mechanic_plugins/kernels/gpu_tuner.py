"""The tuner's step on a GPU, in one launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mechanic_plugins.core import relative
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import CLIP_EPS, SUMS
from mechanic_plugins.core.tuner_state import TunerState, column
from mechanic_plugins.kernels.cuda import is_capturing, on

__all__ = ["constants_of", "decide", "packed_copy"]

_SCALES = 6
"""The columns of `Decision.scales`."""
_RULES = ("paper", "experiments", "optax", "theory", "relative")


def decide(
    state: TunerState,
    sums: Tensor,
    counters: Tensor,
    *,
    settings: Settings,
    constants: Tensor,
    lrs: Sequence[float | Tensor] | Tensor,
    hold: bool,
    max_grad_norm: float | None = None,
) -> tuple[TunerState, Tensor, Tensor]:
    """`mechanic_plugins.core.tuner.decide` in one launch: the state and counters after it, and `Decision.scales`.

    `constants` are what `constants_of` says, on the device; `lrs` the learning rates of the tuners, or all of them in
    float64 on the device. While a CUDA graph is captured, the state and the counters are written over: its replays read
    them where they were.
    """
    from mechanic_plugins.kernels.triton_tuner import tuner_kernel

    tuners, width = state.table.shape
    out = torch.empty(tuners * (width + _SCALES) + 2, dtype=torch.float64, device=sums.device)
    new, new_counters, scales = torch.split(out, [tuners * width, 2, tuners * _SCALES])
    with on(sums.device):
        tuner_kernel[(tuners,)](
            sums,
            state.table,
            new,
            constants,
            counters,
            new_counters,
            scales,
            column(lrs, sums.device),
            *_halves(max_grad_norm),
            tuners,
            RULE=_RULES.index(settings.rule),
            HOLD=hold,
            CAPPED=settings.max_scale is not None,
            CLIPS=max_grad_norm is not None and max_grad_norm < torch.finfo(torch.float32).max,
            CLIP_EPS=CLIP_EPS,
            PRIOR=relative.PRIOR,
            GAIN=relative.GAIN,
            ADVERSE=relative.ADVERSE,
            BEGINNING=relative.BEGINNING,
            DOUBT=relative.DOUBT,
            MEMORY=relative.MEMORY,
            OUTLIER=relative.OUTLIER,
            NUMBERS=_power(tuners * len(SUMS) + 1),
            n=state.n,
            N=_power(state.n),
            num_warps=1,
        )
    after = TunerState(new.view(tuners, width), state.n)
    if is_capturing(sums.device):
        state.table.copy_(after.table)
        counters.copy_(new_counters)
        after, new_counters = state, counters
    return after, new_counters, scales.view(tuners, _SCALES)


def packed_copy(state: TunerState, counters: Tensor) -> tuple[Tensor, TunerState, Tensor]:
    """All that a step changes in one row of memory, where it can be written at once, and views of it."""
    row = torch.cat([state.table.flatten(), counters])
    return row, TunerState(row[:-2].view(state.table.shape), state.n), row[-2:]


def constants_of(settings: Settings) -> tuple[float, ...]:
    """The cap, and of a published rule s_decay, eps, s_init and the betas."""
    cap = settings.max_scale or 0.0
    if settings.rule == "relative":
        return cap, 0.0, 0.0, 0.0, 1.0
    return cap, settings.s_decay, settings.eps, settings.s_init, *settings.betas


def _halves(number: float | None) -> tuple[float, float]:
    """A number as two of float32, which is what a kernel takes: together they have 48 of its 53 bits."""
    if number is None or not math.isfinite(number):
        return 0.0, 0.0
    high = ctypes.c_float(number).value
    return high, ctypes.c_float(number - high).value


def _power(number: int) -> int:
    """The next power of two: what Triton can hold."""
    return 1 << max(number - 1, 0).bit_length()
