"""What the default rule measures with a run's first gradients: how large weights are, and how many are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mechanic_plugins.core.tuner_state import SUMS, sums_of

__all__ = ["add_sizes", "make_room"]

_SQUARES, _NONZERO, _TOUCHED = (SUMS.index(name) for name in ("xx", "dx", "dp"))


def make_room(out: Tensor, new: Mapping[int, bool]) -> None:
    """The places of what `add_sizes` adds; `new` tells, of tuners that begin, whether this is the first gradient."""
    for index, is_first in new.items():
        sums_of(out, index)[[_SQUARES, _NONZERO, _TOUCHED] if is_first else [_SQUARES]] = 0.0


def add_sizes(
    out: Tensor,
    tuner_index: int,
    xs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weight: float,
    *,
    is_first: bool,
) -> None:
    """With a tuner's first gradient, adds three sums where its <x, x>, <d, x> and <d, p> would be, which are 0 then.

    They are the sum of min(|x|, 1)^2, the number of weights that are not 0, and of gradients that are not 0, over the
    parameters that have a gradient. Each may be a part of a parameter: ranks add theirs up. With later gradients it
    adds the last of the three alone, where <x, x> would be.
    """
    sums = sums_of(out, tuner_index)
    for x, grad in zip(xs, grads, strict=True):
        if grad is None:
            continue
        x, grad = _real(x.detach()), _real(grad)
        if not is_first:
            sums[_SQUARES] += weight * grad.count_nonzero().to(sums)
            continue
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # adding 0 * x keeps what is not finite from being clamped away
        squares = wide.clamp(-1.0, 1.0).square_().add_(wide, alpha=0).sum(dtype=torch.float64)
        counts = x.count_nonzero(), grad.count_nonzero()
        for place, value in zip((_SQUARES, _NONZERO, _TOUCHED), (squares, *counts), strict=True):
            sums[place] += weight * value.to(sums)


def _real(tensor: Tensor) -> Tensor:
    """A complex number is two weights."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
