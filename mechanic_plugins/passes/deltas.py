"""A parameter's delta, and the reference of one of 16 bits: made, and laid out in memory as the parameter is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.param_state import DELTA, REF, delta_dtype, needs_reference
from mechanic_plugins.distributed.sharding import local

__all__ = ["complete", "conform", "zeros_like"]


def complete(base: Optimizer, p: Tensor, old: Tensor, wanted: torch.dtype | None) -> None:
    """Gives a parameter the delta, and the reference, that it has not yet; `old` is what the reference is to hold."""
    state = base.state[p]
    if DELTA not in state:
        state[DELTA] = zeros_like(p, wanted)
    if REF not in state and needs_reference(p.dtype):
        state[REF] = torch.empty_like(p, requires_grad=False)
        local(state[REF]).copy_(old)


def conform(base: Optimizer, p: Tensor, wanted: torch.dtype | None) -> None:
    """Has the state lie in memory as the parameter does, whose memory format or dtype somebody may have changed.

    Kernels walk both as flat memory. Quantized moments, which are no plain floating tensors, are left alone.
    """
    state = base.state.get(p)
    if not state:
        return
    if REF in state and not needs_reference(p.dtype):
        del state[REF]
    ours = {DELTA: delta_dtype(p.dtype, wanted), REF: p.dtype}
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
        return kept  # the parameter has gaps, which the state has not
    local(twin).copy_(local(kept))
    return twin


def zeros_like(p: Tensor, wanted: torch.dtype | None) -> Tensor:
    """A new delta, of the parameter's own tensor type."""
    return torch.zeros_like(p, dtype=delta_dtype(p.dtype, wanted), requires_grad=False)
