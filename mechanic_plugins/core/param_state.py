"""What Mechanic keeps for a parameter, and in which dtype."""

from __future__ import annotations

import torch

__all__ = ["DELTA", "MASTER", "PREFIX", "REF", "delta_dtype", "is_16_bit", "main_slot", "ref_dtype"]

PREFIX = "mechanic_"
"""All that Mechanic keeps in param groups and state dicts has keys that start so."""
REF = PREFIX + "ref"
"""The weights at the start. Before the first move, the updates that were not made. With a published rule, of 16-bit
weights only."""
MASTER = PREFIX + "master"
"""16-bit weights in float32: what the base steps. The weights are its rounding."""
DELTA = PREFIX + "delta"
"""The sum of the base's updates: with a published rule, whose scale multiplies the past."""


def main_slot(*, is_default: bool) -> str:
    """What every parameter has that was stepped, with the default rule or with a published one."""
    return REF if is_default else DELTA


def is_16_bit(dtype: torch.dtype) -> bool:
    """Whether an update may be smaller than the rounding of weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def ref_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """The reference's for weights of this dtype: their own, unless bfloat16 is wanted."""
    return torch.bfloat16 if wanted == torch.bfloat16 and dtype in (torch.float32, torch.float64) else dtype


def delta_dtype(dtype: torch.dtype) -> torch.dtype:
    """Delta's for weights of this dtype: float32 or wider."""
    return torch.float32 if is_16_bit(dtype) else dtype
