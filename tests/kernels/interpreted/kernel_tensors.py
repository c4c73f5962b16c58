"""Tensors for the kernels' own tests, which need no optimizer.

Without the interpreter these tests run on a GPU, by the compiled kernels.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.triton_support import is_16_bit

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The relative rounding error of a product or sum.
EPS = {torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float64: 1.2e-16, torch.float16: 5e-4}
SHAPES = [(3, 5), (4097,), (0,), (), (17, 33), (2, 3, 4, 5)]
SCALE = 0.75
"""At which Delta has moved 16-bit weights."""


class Tensors(NamedTuple):
    xs: list[Tensor]
    grads: list[Tensor | None]
    kept: list[Kept]


def made(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    *,
    ktype: torch.dtype | None = None,
    summed: bool = False,
) -> Tensors:
    """Makes tensors: the second has no gradient, and some 16-bit weights were changed from outside.

    `summed`: with Delta, as for a published rule, in place of the reference.
    """
    generator = torch.Generator().manual_seed(seed)
    found = Tensors([], [], [])
    for index, shape in enumerate(shapes):
        x, g, kept = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3))
        x, other = x.to(dtype), None
        if is_16_bit(dtype) and summed:
            other, x = x.clone(), (x.float() + SCALE * kept).to(dtype)
        elif is_16_bit(dtype):
            other, kept = x.float(), kept.to(dtype)
        if other is not None and index % 2:
            other += 1
        found.xs.append(x)
        found.grads.append(None if index == 1 else g.to(dtype))
        found.kept.append(Kept(kept.to(ktype or (kept.dtype if is_16_bit(dtype) else dtype)), other))
    return found


def row(new: float, *, made: bool = True, clip: float = 1.0, old: float = SCALE, step: int = 1) -> Tensor:
    """One row of the table that the tuner's kernel writes."""
    return torch.tensor([new, float(made), clip, old, step], dtype=torch.float64, device=DEVICE)
