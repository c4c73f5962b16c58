"""A step's sums: one vector of float64 numbers, six inner products for each tuner and then the number of gradients.

This page alone knows the order. The sums of all ranks are added up by one all-reduce of the vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WIDTH", "Sums", "empty", "gradient_norm", "with_scaled_gradients"]


class Sums(NamedTuple):
    """One tuner's inner products of the gradient g, the weights x, d, and the gradient p of a penalty the base adds.

    d is what has been added to the weights since the start: x - x_ref, or with a published rule the updates' sum.
    """

    dg: float
    gg: float
    xx: float
    dx: float
    dd: float
    dp: float


WIDTH = len(Sums._fields)


def empty(tuners: int, device: torch.device) -> Tensor:
    """The vector before anything is added."""
    return torch.zeros(WIDTH * tuners + 1, dtype=torch.float64, device=device)


def gradient_norm(vector: Tensor) -> Tensor:
    """The norm of all gradients, as a 0-dim tensor."""
    return vector[1:-1:WIDTH].sum().sqrt()


def with_scaled_gradients(vector: Tensor, factor: Tensor) -> Tensor:
    """The vector for gradients multiplied by `factor`, a 0-dim tensor: dg is linear in them, gg quadratic."""
    scaled = vector.clone()
    scaled[0:-1:WIDTH] *= factor
    scaled[1:-1:WIDTH] *= factor**2
    return scaled
