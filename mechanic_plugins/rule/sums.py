"""A step's sums: one vector of float64 numbers, six inner products for each tuner and then the number of gradients.

This page alone knows the order. The sums of all ranks are added up by one all-reduce of the vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WIDTH", "Sizes", "Sums", "empty", "gradient_norm", "with_scaled_gradients"]


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

    def sizes(self) -> Sizes:
        """What the first steps of the default rule measure in place of xx, dx and dp."""
        return Sizes(self.xx, self.dx, self.dp)


class Sizes(NamedTuple):
    """How many weights are trained, and how large they are at the start."""

    trained: float
    """How many weights have a gradient that is not 0."""
    roots: float
    """The sum of min(|x|, 1)^(1/3). Only the first step measures this and the next."""
    nonzero: float
    """How many weights are not 0."""


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
