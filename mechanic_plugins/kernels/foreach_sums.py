"""The sums of a step by torch operations: see `mechanic_plugins.kernels.foreach`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from mechanic_plugins.core.param_state import ParamState

__all__ = ["SMALL", "local_sums", "parts", "reals", "waits_for_host"]

_CHUNK = {"cpu": 1 << 18}
"""Elements that are summed in float32 before float64 takes over. A CPU's sums are off by about 1e-7 then; GPUs add in
trees, and have few launches to give."""
SMALL, _ROW = 1 << 24, 1 << 26
"""Elements of a tensor that a GPU takes together with others, and of all of these at a time: one by one it would wait
for the host."""
_DOTS = 5
"""Inner products of a tensor's weights, gradient and delta."""


def local_sums(param_states: Sequence[ParamState], *, device: torch.device) -> Tensor:
    """<d, g>, <g, g>, <x, x>, <d, x> and <d, d> over param_states of one device and dtype, in float64 on `device`.

    Squares of finite float32 numbers overflow from 1.8e19 on. A CPU then sums once more in float64; to find out on a
    GPU would mean waiting for it.
    """
    sums = _sums(param_states, device=device)
    if sums.device.type == "cpu" and not all(map(math.isfinite, sums.tolist())):
        return _sums(param_states, device=device, at_least=torch.float64)
    return sums


def _sums(param_states: Sequence[ParamState], *, device: torch.device, at_least: torch.dtype = torch.float32) -> Tensor:
    dots: list[Tensor] = []
    if waits_for_host(param_states[0].x.device):
        param_states = _in_rows(param_states)
    for param_state in param_states:
        _add_dots(param_state, dots, at_least)
    return torch.stack(dots).to(device, non_blocking=True).view(-1, _DOTS).sum(0, dtype=torch.float64)


def _add_dots(param_state: ParamState, dots: list[Tensor], at_least: torch.dtype) -> None:
    """The five of each chunk, in turn."""
    x = _real(param_state.x).reshape(-1)
    g, d = (None if t is None else _real(t).reshape(-1) for t in (param_state.grad, param_state.delta))
    wide = torch.promote_types(x.dtype, at_least)
    chunk = _CHUNK.get(x.device.type, _ROW)
    zero = x.new_zeros((), dtype=wide) if g is None or d is None else x
    for at in range(0, max(x.numel(), 1), chunk):
        here = slice(at, at + chunk)
        y = x[here].to(wide)
        h, e = (None if t is None else t[here].to(wide) for t in (g, d))
        dots.append(zero if e is None or h is None else torch.dot(e, h))
        dots.append(zero if h is None else torch.dot(h, h))
        dots.append(torch.dot(y, y))
        dots.append(zero if e is None else torch.dot(e, y))
        dots.append(zero if e is None else torch.dot(e, e))


def _in_rows(param_states: Sequence[ParamState]) -> list[ParamState]:
    """Those that are long or lack something, and copies of the others in a few long rows."""
    alone, small = list[ParamState](), list[ParamState]()
    for state in param_states:
        is_small = state.x.numel() <= SMALL and state.grad is not None and state.delta is not None
        (small if is_small else alone).append(state)
    for here in parts([state.x.numel() for state in small]):
        columns = zip(*(state[:3] for state in small[here]), strict=True)
        x, grad, delta = (_flatten_dense_tensors(reals(tensors)) for tensors in columns)  # type: ignore[no-untyped-call]
        alone.append(ParamState(x, grad, delta, None))
    return alone


def waits_for_host(device: torch.device) -> bool:
    """Whether operations are queued: then many small ones take as long as the host needs to start them."""
    return device.type != "cpu"


def _real(t: Tensor) -> Tensor:
    """Complex parameters are pairs of real ones."""
    return torch.view_as_real(t) if t.is_complex() else t


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of tensors that are all complex, or none."""
    return [torch.view_as_real(t) for t in tensors] if tensors and tensors[0].is_complex() else list(tensors)


def parts(numels: Sequence[int]) -> Iterator[slice]:
    """One after the other, of up to `_ROW` elements where no tensor has more."""
    first, size = 0, 0
    for index, numel in enumerate(numels):
        if index > first and size + numel > _ROW:
            yield slice(first, index)
            first, size = index, 0
        size += numel
    if numels:
        yield slice(first, len(numels))
