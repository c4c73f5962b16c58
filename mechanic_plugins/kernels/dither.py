"""Rounds delta to bfloat16 at random, up or down, so that it is right on average.

An update is small beside the sum of all before it: rounded to the nearest, it would be lost. The random numbers are a
hash of the number of the step and the place in memory, so that a run can be repeated and resumed to the last bit, and
ranks that hold the same shard stay equal. The kernels take the same hash.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dithered"]

_MASK = 0xFFFFFFFF


def dithered(wide: Tensor, *, place: int, step: Tensor) -> Tensor:
    """Float32 numbers, rounded to ones that bfloat16 has; `place` is that of the first in its list of tensors."""
    seed = (step.long() * 0x9E3779B9) & _MASK
    bits = (torch.arange(place, place + wide.numel(), device=wide.device) & _MASK) ^ seed.to(wide.device)
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    noise = ((bits ^ (bits >> 16)) & 0xFFFF).to(torch.int32)
    flat = wide.float().reshape(-1).view(torch.int32)
    return ((flat + noise) & -0x10000).view(torch.float32).view(wide.shape)
