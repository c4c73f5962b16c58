"""How long a gradient may be beside those before it: the optimistic rule's guards against a few that decide a run."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GRADIENT_GROWTH", "OUTLIER", "gradient_limit", "limited", "was_outlier"]

OUTLIER = 100.0
"""A gradient that much longer than any before it is skipped."""
GRADIENT_GROWTH = 1.25
"""A base whose steps grow with the gradient sees none that is more than that much longer than any before it. Networks
without normalisation leave the plateau they start on by gradients that grow a hundredfold within a few steps, and the
learning rate was learned before."""


def gradient_limit(longest: Tensor, norm: Tensor, share: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Whether a gradient is an outlier, and the longest one that is remembered after it.

    The memory fades over a thousand steps. An outlier raises it tenfold: gradients that have really grown are skipped
    a few times only.

    Args:
        longest: What was remembered before.
        norm: Of the gradient.
        share: What the base sees of it, if not all: see `limited`.
    """
    is_outlier = (longest > 0) & (norm > OUTLIER * longest)
    seen = norm if share is None else torch.where(is_outlier.any(), norm, share * norm)
    return is_outlier, torch.where(is_outlier, 10 * longest, torch.maximum(0.999 * longest, seen))


def limited(longest: Tensor, norm: Tensor) -> Tensor | None:
    """What each tuner's gradients are multiplied by so that they are no longer than they may be.

    None where a CPU sees that none is too long.
    """
    is_too_long = (longest > 0) & (norm > GRADIENT_GROWTH * longest)
    if is_too_long.device.type == "cpu" and not is_too_long.any():
        return None
    return torch.where(is_too_long, GRADIENT_GROWTH * longest / norm, 1.0)


def was_outlier(longest: Tensor, norm: Tensor) -> Tensor:
    """Whether the longest gradient so far is an outlier beside this one."""
    return (norm > 0) & (longest > OUTLIER * norm)
