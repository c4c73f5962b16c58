"""What the default rule measures once, with the first gradient: how large weights are, and how many are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mechanic_plugins.core.tuner_state import sums_of

__all__ = ["add_sizes"]


def add_sizes(
    out: Tensor, tuner_index: int, xs: Sequence[Tensor], grads: Sequence[Tensor | None], weight: float
) -> None:
    """Puts three sums where a tuner's <x, x>, <d, x> and <d, p> would be.

    They are the sum of |x|^(1/2), the number of weights that are not 0, and of gradients that are not 0, over the
    parameters that have a gradient. Each may be a part of a parameter: ranks add theirs up.
    """
    sums = sums_of(out, tuner_index)
    for x, grad in zip(xs, grads, strict=True):
        if grad is None:
            continue
        roots = x.detach().abs().to(torch.promote_types(x.abs().dtype, torch.float32)).sqrt_().sum(dtype=torch.float64)
        for place, value in ((2, roots), (3, x.count_nonzero()), (5, grad.count_nonzero())):
            sums[place] += weight * value.to(sums)
