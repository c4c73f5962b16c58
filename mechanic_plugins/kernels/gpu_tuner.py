"""The tuner's step on a GPU, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import SUMS
from mechanic_plugins.core.tuner_state import TunerState
from mechanic_plugins.kernels.cuda import is_capturing, on

__all__ = ["SCALES", "constants_on", "launch"]

SCALES = 3
"""The number of values that a tuner decides: its scale, whether the step is made, and the factor on the gradients."""


def launch(
    state: TunerState,
    sums: Tensor,
    *,
    settings: Settings,
    lrs: Sequence[float | Tensor] | Tensor,
    hold: bool,
    max_grad_norm: float | None,
) -> tuple[TunerState, Tensor]:
    """`mechanic_plugins.core.tuner.decide` for tuners that have begun. Returns the new state and each tuner's `SCALES`.

    `lrs` are the tuners' learning rates, or one float64 tensor of them on the device. While a CUDA graph is captured,
    the state is overwritten in place, where its replays read it.
    """
    from triton import next_power_of_2

    from mechanic_plugins.kernels.triton_tuner import tuner_kernel

    tuners = len(state)
    new = torch.empty_like(state.flat)
    scales = torch.empty(tuners, SCALES, dtype=torch.float64, device=sums.device)
    with on(sums.device):
        tuner_kernel[(tuners,)](
            sums,
            state.flat,
            new,
            constants_on(sums.device, settings.max_scale, max_grad_norm),
            scales,
            _column(lrs, sums.device),
            tuners,
            HOLD=hold,
            CAPPED=settings.max_scale is not None,
            CLIPS=max_grad_norm is not None and math.isfinite(max_grad_norm),
            NUMBERS=next_power_of_2(tuners * len(SUMS) + 1),
            num_warps=1,
        )
    if not is_capturing(sums.device):
        return state.with_flat(new), scales
    state.flat.copy_(new)
    return state, scales


@functools.cache
def constants_on(device: torch.device, max_scale: float | None, max_grad_norm: float | None) -> Tensor:
    """The cap and the clipping norm, copied to the device once: captured graphs read them there."""
    return torch.tensor([max_scale or 0.0, max_grad_norm or 0.0], dtype=torch.float64, device=device)


def _column(numbers: Sequence[float | Tensor] | Tensor, device: torch.device) -> Tensor:
    """One number per tuner, without waiting for the device or copying to it."""
    if isinstance(numbers, Tensor):
        return numbers
    cells = (
        number.to(device, torch.float64).reshape(())
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    )
    return torch.stack(list(cells))
