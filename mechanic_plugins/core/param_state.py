"""What Mechanic keeps for a parameter, and in which dtype."""

from __future__ import annotations

import torch

__all__ = ["DELTA", "MASTER", "PREFIX", "REF", "is_16_bit", "main_slot"]

PREFIX = "mechanic_"
"""Prefix of every key that Mechanic adds to param groups and state dicts."""
REF = PREFIX + "ref"
"""The weights at the start of the run; before the first move, the sum of the updates that were only measured. With a
published rule, kept for 16-bit weights only."""
MASTER = PREFIX + "master"
"""float32 copy of 16-bit weights. The base steps this copy, and the weights are its rounding."""
DELTA = PREFIX + "delta"
"""The sum of the base's updates, kept with a published rule, whose scale also multiplies past updates."""


def main_slot(rule: str) -> str:
    """The key that every stepped parameter has under this rule."""
    return REF if rule == "relative" else DELTA


def is_16_bit(dtype: torch.dtype) -> bool:
    """Whether an update may be smaller than the rounding of weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)
