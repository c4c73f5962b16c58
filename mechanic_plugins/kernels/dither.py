"""Rounds Delta to bfloat16, up or down at random, so that it is right on average.

An update is small beside the sum of all before it, and would be lost in rounding to the nearest. The random numbers are
a hash of the number of the step and the place in memory: a run can be repeated and resumed to the last bit, and ranks
that hold the same shard stay equal. `mechanic_plugins.kernels.triton_move` has the same hash.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dithered"]

_MASK = 0xFFFFFFFF


def dithered(wide: Tensor, *, place: int, step: float) -> Tensor:
    """The numbers in float32, rounded to ones that bfloat16 has.

    Args:
        wide: Any floating-point numbers.
        place: That of the first one in a list of tensors: `mechanic_plugins.kernels.table.places_of`.
        step: How many steps were made, with this one.
    """
    seed = (int(step) * 0x9E3779B9) & _MASK
    bits = (torch.arange(place, place + wide.numel(), device=wide.device) & _MASK) ^ seed
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    noise = ((bits ^ (bits >> 16)) & 0xFFFF).to(torch.int32)
    flat = wide.float().reshape(-1).view(torch.int32)
    return ((flat + noise) & -0x10000).view(torch.float32).view(wide.shape)
