"""What the tuner sees and remembers, and how both lie in memory.

A step's sums are one float64 vector: six inner products for each tuner, then the number of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.settings import Settings

__all__ = [
    "CLIP_EPS",
    "SCALARS",
    "SUMS",
    "Sums",
    "TunerState",
    "clipped",
    "column",
    "empty_sums",
    "gradient_count",
    "gradient_norm",
    "initial_state",
    "keep_where",
    "sums_of",
    "with_scaled_gradients",
]

SUMS = ("dg", "gg", "xx", "dx", "dd", "dp")
"""The inner products a step needs, of delta (d), gradient (g), weights (x), and the gradient of the penalty that the
base minimises beside the loss (p: the weights times their weight decay), in this order."""

CLIP_EPS = 1e-6
"""Added to the norm that is clipped, as torch.nn.utils.clip_grad_norm_ does."""


class Sums(NamedTuple):
    """The global inner products, each of shape (tuners, 1)."""

    dg: Tensor
    gg: Tensor
    xx: Tensor
    dx: Tensor
    dd: Tensor
    dp: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Sums:
        """From a (tuners, 6) tensor."""
        return cls(*table.unsqueeze(-1).unbind(-2))

    @classmethod
    def of_vector(cls, vector: Tensor) -> Sums:
        """From the vector of a step."""
        return cls.of(vector[:-1].view(-1, len(SUMS)))


def empty_sums(tuners: int, device: torch.device) -> Tensor:
    """The vector of a step before anything was added to it."""
    return torch.zeros(len(SUMS) * tuners + 1, dtype=torch.float64, device=device)


def sums_of(vector: Tensor, tuner_index: int) -> Tensor:
    """One tuner's inner products, as a view."""
    return vector[len(SUMS) * tuner_index : len(SUMS) * (tuner_index + 1)]


def gradient_count(vector: Tensor) -> Tensor:
    """How many gradients there are, as a view."""
    return vector[-1:]


def gradient_norm(vector: Tensor) -> Tensor:
    """The norm of all gradients together, 0-dim."""
    return Sums.of_vector(vector).gg.sum().sqrt()


def with_scaled_gradients(vector: Tensor, factor: Tensor) -> Tensor:
    """The vector of a step whose gradients are multiplied by `factor`: dg is linear in them, gg quadratic.

    One factor for all, 0-dim, or one for each tuner, of shape (tuners, 1).
    """
    one = torch.ones_like(factor)
    powers = torch.cat([{"dg": factor, "gg": factor**2}.get(name, one).view(-1, 1) for name in SUMS], dim=1)
    return torch.cat([(vector[:-1].view(-1, len(SUMS)) * powers).flatten(), gradient_count(vector)])


def clipped(vector: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The vector of a step whose gradients are clipped, and the factor: that of `torch.nn.utils.clip_grad_norm_`."""
    factor = (max_norm / (gradient_norm(vector) + CLIP_EPS)).clamp(max=1.0)
    return with_scaled_gradients(vector, factor), factor


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


def initial_state(settings: Settings, *, tuners: int, device: torch.device) -> TunerState:
    """The state before the first step."""
    n = len(settings.betas)
    sizes = {name: 1 if name in SCALARS else n for name in TunerState._fields}
    zeros = {name: torch.zeros(tuners, k, dtype=torch.float64, device=device) for name, k in sizes.items()}
    if settings.rule in ("experiments", "optax") and settings.s_init != "auto":
        zeros["s"] += settings.s_init
    return TunerState(**zeros)


def column(numbers: Sequence[float | Tensor] | Tensor, device: torch.device) -> Tensor:
    """One number for each tuner, of shape (tuners, 1), without waiting for the device or copying to it."""
    if isinstance(numbers, Tensor):
        return numbers.view(-1, 1)
    if device.type == "cpu" and not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    cells = (
        number.to(device, torch.float64).reshape(())
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    )
    return torch.stack(list(cells)).unsqueeze(1)


def keep_where(condition: Tensor, new: TunerState, old: TunerState) -> TunerState:
    """`new` where the condition holds, else `old`: decided on the device."""
    return TunerState(*(torch.where(condition, a, b) for a, b in zip(new, old, strict=True)))
