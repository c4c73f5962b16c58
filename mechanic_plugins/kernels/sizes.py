"""What the default rule measures with a run's first gradients: how large weights are, and how many are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["count_nonzero", "sizes"]


def sizes(xs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[float]:
    """The sum of min(|x|, 1)^2, the number of weights that are not 0, and of gradients that are not 0.

    Waits for the device. Each may be a part of a parameter: ranks add theirs up.
    """
    found = [torch.stack([_squares(x), x.count_nonzero().double()]) for x in xs]
    squares, nonzero = torch.stack(found).sum(0).tolist()
    return [squares, nonzero, count_nonzero(grads)]


def count_nonzero(grads: Sequence[Tensor]) -> float:
    """Over all of them. Waits for the device."""
    return float(torch.stack([grad.count_nonzero() for grad in grads]).sum())


def _squares(x: Tensor) -> Tensor:
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    # adding 0 * x keeps what is not finite from being clamped away
    return wide.clamp(-1.0, 1.0).square_().add_(wide, alpha=0).sum(dtype=torch.float64)
