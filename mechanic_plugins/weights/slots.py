"""The tensors that Mechanic keeps for a parameter, in the base's state beside its moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels.triton_support import is_16_bit

__all__ = ["DELTA", "MASTER", "PREFIX", "REF", "Slots", "is_16_bit", "main_slot"]

State = dict[str, Any]

PREFIX = "mechanic_"
"""Prefix of every key that Mechanic adds to param groups and state dicts."""
REF = PREFIX + "ref"
"""Default rule: the weights at the start of the run; before the first move, the sum of the updates that were only
measured, in the same tensor, because engines hold views of it. Published rules: kept for 16-bit weights only."""
MASTER = PREFIX + "master"
"""Default rule: float32 copy of 16-bit weights. The base steps this copy, and the weights are its rounding."""
DELTA = PREFIX + "delta"
"""Published rules: the sum of the base's updates, because the scale also multiplies past updates."""


def main_slot(rule: str) -> str:
    """The key that every stepped parameter has under this rule."""
    return REF if rule == "relative" else DELTA


class Slots:
    """What one optimizer keeps for a parameter: depends on its rule and on the option `kept_dtype`."""

    def __init__(self, rule: str, kept_dtype: torch.dtype | None) -> None:
        self.is_default, self.main, self.kept_dtype = rule == "relative", main_slot(rule), kept_dtype

    def dtypes(self, p: Tensor) -> dict[str, torch.dtype]:
        """The dtype of each slot that a parameter may have."""
        if is_16_bit(p.dtype):
            return {REF: p.dtype, MASTER if self.is_default else DELTA: torch.float32}
        narrows = self.kept_dtype == torch.bfloat16 and p.dtype in (torch.float32, torch.float64)
        return {self.main: torch.bfloat16 if narrows else p.dtype}

    def begin(self, p: Tensor, state: State, *, has_master: bool) -> None:
        """Creates the slots as zeros: no update yet. With a published rule, 16-bit weights also get a reference."""
        if self.main not in state:
            state[self.main] = torch.zeros_like(p, dtype=self.dtypes(p)[self.main], requires_grad=False)
        if not self.is_default and is_16_bit(p.dtype) and REF not in state:
            self.put(p, state, REF, local(p))
        if has_master and MASTER not in state:
            self.put(p, state, MASTER, local(p))

    def are_complete(self, state: Mapping[Any, State], params: Iterable[Tensor]) -> bool:
        """Whether these parameters have all their slots."""
        return all(self.dtypes(p).keys() <= state.get(p, {}).keys() for p in params)

    def put(self, p: Tensor, state: State, name: str, value: Tensor) -> None:
        """Copies `value`, a local tensor, into a slot. Existing tensors are kept: engines may hold views of them."""
        if name not in state:
            state[name] = torch.empty_like(p, dtype=self.dtypes(p)[name], requires_grad=False)
        local(state[name]).copy_(value.detach())

    def conform(self, p: Tensor, state: State) -> None:
        """Adapts the state to the parameter's dtype and memory layout, which `model.to(...)` may have changed.

        Kernels read both as flat memory. Quantized moments, which are not plain floating-point tensors, are left alone.
        """
        ours = self.dtypes(p)
        if self.main in state and not ours.keys() <= state.keys() and not self.is_default:
            self.begin(p, state, has_master=False)
        for name in {DELTA, MASTER, REF} & state.keys() - ours.keys():
            del state[name]
        for name, kept in state.items():
            if _is_like(kept, p):
                state[name] = _laid_out_like(p, kept, ours.get(name, kept.dtype))


def _is_like(kept: object, p: Tensor) -> bool:
    if not isinstance(kept, Tensor) or kept.shape != p.shape or type(local(kept)) not in (Tensor, torch.nn.Parameter):
        return False
    return kept.is_floating_point() or kept.is_complex()


def _laid_out_like(p: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    if kept.dtype == dtype and local(kept).stride() == local(p).stride():
        return kept
    twin = torch.empty_like(p, dtype=dtype, device=kept.device, requires_grad=False)
    if kept.dtype == dtype and local(kept).stride() == local(twin).stride():
        return kept  # the parameter has gaps; the state has none
    local(twin).copy_(local(kept))
    return twin
