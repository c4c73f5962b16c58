"""The tensors that Mechanic keeps per parameter: creating them, and matching the parameter's memory layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import DELTA, MASTER, REF, is_16_bit, main_slot
from mechanic_plugins.distributed.sharding import local

__all__ = ["Slots"]

State = dict[str, Any]


class Slots:
    """What one optimizer keeps per parameter, which depends on its rule."""

    def __init__(self, rule: str, wanted: torch.dtype | None) -> None:
        """`wanted` is the option `delta_dtype`."""
        self.is_default, self.main, self._wanted = rule == "relative", main_slot(rule), wanted

    def dtypes(self, p: Tensor) -> dict[str, torch.dtype]:
        """The dtype of each slot that a parameter may have. References have the weights' unless one was chosen."""
        if is_16_bit(p.dtype):
            return {REF: p.dtype, MASTER if self.is_default else DELTA: torch.float32}
        narrows = self._wanted == torch.bfloat16 and p.dtype in (torch.float32, torch.float64)
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

    def adopt(self, p: Tensor, state: State, played: float) -> None:
        """Converts delta, from a checkpoint of format 3, to a reference: x_ref = x - played * delta."""
        if not self.is_default or DELTA not in state:
            return
        delta, x = local(state.pop(DELTA)), local(p).detach()
        if played == 0:
            self.put(p, state, REF, delta)
            return
        come = played * delta.to(torch.promote_types(x.dtype, torch.float32))
        if not is_16_bit(p.dtype):
            self.put(p, state, REF, x - come)
            return
        exact = local(state[REF]).float() + come
        self.put(p, state, MASTER, torch.where(exact.to(x.dtype) == x, exact, x.float()))

    def conform(self, p: Tensor, state: State) -> None:
        """Gives the state the parameter's memory layout, in case its memory format or dtype has changed.

        Kernels read both as flat memory. Quantized moments, which are not plain floating-point tensors, are left alone.
        """
        ours = self.dtypes(p)
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
