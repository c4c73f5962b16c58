"""What Mechanic keeps for a parameter, and in which dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DELTA", "PREFIX", "REF", "IndexRange", "ParamState", "delta_dtype", "needs_reference"]

PREFIX = "mechanic_"
"""All that Mechanic keeps in param groups and state dicts has keys that start so."""
DELTA = PREFIX + "delta"
REF = PREFIX + "ref"


class ParamState(NamedTuple):
    """One parameter's local tensors in one step. `grad` is None where the base leaves it, `delta` before its first.

    Low-precision weights (bf16, fp16) carry a reference copy in their own dtype beside a float32 delta, so that they
    are always the rounding of an exact value; wider weights need none and move by differences.
    """

    x: Tensor
    grad: Tensor | None
    delta: Tensor | None
    ref: Tensor | None

    def is_complete(self) -> bool:
        """Whether it has all that a step needs."""
        return self.delta is not None and (self.ref is not None or not needs_reference(self.x.dtype))


class IndexRange(NamedTuple):
    """Some of a list's param_states, one after the other: those from `first` to before `last`."""

    first: int
    last: int


def needs_reference(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are too coarse to be moved by differences."""
    return dtype in (torch.bfloat16, torch.float16)


def delta_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """Delta's for weights of this dtype: float32 or wider, if not bfloat16 is wanted."""
    if wanted == torch.bfloat16 and dtype.is_floating_point:
        return wanted
    return torch.float32 if needs_reference(dtype) else dtype
