"""What Mechanic keeps for a parameter, and in which dtype."""

from __future__ import annotations

import torch

__all__ = ["DELTA", "MASTER", "PREFIX", "REF", "is_16_bit", "main_slot"]

PREFIX = "mechanic_"
"""All that Mechanic keeps in param groups and state dicts has keys that start so."""
REF = PREFIX + "ref"
"""The weights at the start. Before the first move, the updates that were not made. With a published rule, of 16-bit
weights only."""
MASTER = PREFIX + "master"
"""16-bit weights in float32: what the base steps. The weights are its rounding."""
DELTA = PREFIX + "delta"
"""The sum of the base's updates: with a published rule, whose scale multiplies the past."""


def main_slot(rule: str) -> str:
    """What every parameter has that was stepped, with the default rule or with a published one."""
    return REF if rule == "relative" else DELTA


def is_16_bit(dtype: torch.dtype) -> bool:
    """Whether an update may be smaller than the rounding of weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)
