"""The tuner's step on a GPU, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from mechanic_plugins.kernels.cuda import is_capturing, on
from mechanic_plugins.rule.settings import Rule, Settings
from mechanic_plugins.rule.sums import WIDTH
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["SCALES", "constants_on", "launch"]

SCALES = 5
"""The columns of the table: new scale, whether the step is made, the factor on the gradients, old scale, and the number
of steps, with this one. The kernels that move the weights read one row."""


def launch(
    flat: Tensor,
    sums: Tensor,
    *,
    kind: type[Tuner],
    settings: Settings,
    lrs: Sequence[float | Tensor] | Tensor,
    hold: bool,
    max_grad_norm: float | None,
) -> tuple[Tensor, Tensor]:
    """`mechanic_plugins.rule.decide.decide`: returns the tuners' new numbers and a table of one row per tuner.

    The default rule's tuners must have a scale, and the published ones must know their unit.

    Args:
        flat: The tuners' numbers, `Tuner.numbers` for each. While a CUDA graph is captured they are overwritten in
            place, where its replays read them.
        sums: As in `mechanic_plugins.rule.sums`, on the same device.
        kind: The tuners' class.
        settings: The constants.
        lrs: The tuners' learning rates, or one float64 tensor of them on the device.
        hold: Leave the scale as it is.
        max_grad_norm: Clip the gradients to this norm.
    """
    from triton import next_power_of_2

    from mechanic_plugins.kernels.triton_decide import tuner_kernel

    n, width, floats = settings.n, kind.width(settings.n), len(kind.floats())
    tuners, device = len(flat) // width, sums.device
    new = torch.empty_like(flat)
    table = torch.empty(tuners, SCALES, dtype=torch.float64, device=device)
    with on(device):
        tuner_kernel[(tuners,)](
            sums,
            flat,
            new,
            constants_on(device, settings, max_grad_norm),
            table,
            _column(lrs, device),
            tuners,
            RULE=get_args(Rule).index(settings.rule),
            HOLD=hold,
            CAPPED=settings.max_scale is not None,
            CLIPS=max_grad_norm is not None and math.isfinite(max_grad_norm),
            FLOATS=floats,
            LANES=next_power_of_2(floats),
            WIDTH=width,
            n=n,
            N=next_power_of_2(n),
            NUMBERS=next_power_of_2(tuners * WIDTH + 1),
            num_warps=1,
        )
    if not is_capturing(device):
        return new, table
    flat.copy_(new)
    return flat, table


@functools.cache
def constants_on(device: torch.device, settings: Settings, max_grad_norm: float | None) -> Tensor:
    """What the kernel reads of the settings, copied to the device once. Call it before a capture, which cannot copy."""
    numbers = settings.max_scale, max_grad_norm, settings.s_init, settings.s_decay, settings.eps
    betas = settings.betas or ()
    return torch.tensor([*(number or 0.0 for number in numbers), *betas], dtype=torch.float64, device=device)


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
