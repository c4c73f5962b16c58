"""The tuner's step on a GPU, in one launch: `mechanic_plugins.tuner.advance` and whether the step is made."""

from __future__ import annotations

import torch
from torch import Tensor

from mechanic_plugins.settings import Settings
from mechanic_plugins.tuner import TunerState

__all__ = ["advance", "constants_of"]

_RULES = ("paper", "experiments", "optax", "theory")


def advance(
    state: TunerState,
    sums: Tensor,
    counters: Tensor,
    *,
    settings: Settings,
    betas: Tensor,
    constants: Tensor,
    hold: bool,
    in_place: bool,
) -> tuple[TunerState, Tensor, Tensor]:
    """`tuner.advance` in one launch, with the decision whether the step is made.

    Args:
        state: The tuner before the step.
        sums: Five for each tuner, and the number of gradients.
        counters: Steps made, and steps skipped.
        settings: The constants, in the units of delta.
        betas: `settings.betas` on the device.
        constants: What `constants_of` says, on the device.
        hold: Leave the tuner as it is.
        in_place: Write over the state and the counters: what a captured graph needs, which reads them where they were.

    Returns:
        The next state, the next counters, and for each tuner what `Decision.scales` says.
    """
    from mechanic_plugins import triton_kernels as kernels

    tuners, n = state.s.shape
    width = 6 * n + 3
    old = _packed(state)
    out = torch.empty(tuners * (width + 4) + 2, dtype=torch.float64, device=sums.device)
    new, scales, new_counters = torch.split(out, [tuners * width, tuners * 4, 2])
    kernels.tuner_kernel[(tuners,)](
        sums,
        old,
        new,
        betas,
        constants,
        counters,
        new_counters,
        scales,
        tuners,
        RULE=_RULES.index(settings.rule),
        AUTO=settings.s_init == "auto",
        SMOOTHING=settings.smoothing != 0,
        CAPPED=settings.max_scale is not None,
        FROZEN=hold,
        HINDSIGHT=settings.hindsight != 1,
        NUMBERS=_power(tuners * 5 + 1),
        n=n,
        N=_power(n),
        num_warps=1,
    )
    after = _unpacked(new.view(tuners, width))
    if not in_place:
        return after, new_counters, scales.view(tuners, 4)
    for theirs, ours in zip((*state, counters), (*after, new_counters), strict=True):
        theirs.copy_(ours)
    return state, counters, scales.view(tuners, 4)


def constants_of(settings: Settings) -> tuple[float, ...]:
    """s_decay, eps, s_init or its fraction, the cap, the smoothing and the hindsight."""
    s_init = settings.first_move if settings.s_init == "auto" else settings.s_init
    return settings.s_decay, settings.eps, s_init, settings.max_scale or 0.0, settings.smoothing, settings.hindsight


def _packed(state: TunerState) -> Tensor:
    """One row for each tuner."""
    base = state.s._base
    if base is not None and state.h._base is base and base.dim() == 1 and state.s.stride(0) == 6 * state.s.shape[1] + 3:
        return state.s
    return torch.cat(list(state), dim=1)


def _unpacked(table: Tensor) -> TunerState:
    """Views of the rows."""
    n = (table.shape[1] - 3) // 6
    return TunerState(*torch.split(table, [n] * 6 + [1] * 3, dim=1))


def _power(number: int) -> int:
    """The next power of two: what Triton can hold."""
    return 1 << max(number - 1, 0).bit_length()
