"""Where a tuner's numbers and its sums lie in a GPU's memory: `mechanic_plugins.rule.tuner` for the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.rule.sums import WIDTH, Sums
from mechanic_plugins.rule.tuner import Tuner

# Use these only on the right of an operator: Triton's interpreter accepts constants nowhere else.
_SUMS = tl.constexpr(WIDTH)
_DG, _GG, _XX, _DX, _DD, _DP = (tl.constexpr(Sums._fields.index(name)) for name in ("dg", "gg", "xx", "dx", "dd", "dp"))

_SCALE, _SIGNAL, _UNIT, _TOP_LR, _GRADIENTS, _SUM_SCALE_LR, _SUM_LR, _STEPS, _SKIPPED = (
    tl.constexpr(Tuner.floats().index(name))
    for name in (
        "scale", "signal", "unit", "top_lr", "gradients", "sum_scale_lr", "sum_lr", "steps", "skipped",
    )
)  # fmt: skip
"""A rule's own numbers come after these."""


@triton.jit
def _with(row, lane, PLACE: tl.constexpr, value, is_new):
    """The row with another number at one place, if it is new. A row is held in registers; `lane` counts its places."""
    return tl.where(is_new, tl.where(lane == PLACE, value, row), row)
