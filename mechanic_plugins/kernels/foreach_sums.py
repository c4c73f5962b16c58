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
SMALL, _ROW = 1 << 20, 1 << 26
"""Elements of a tensor that a GPU sums together with others, in copies, and of all of these at a time: one by one it
would wait for the host."""
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
        large, param_states = _large_and_rows(param_states, at_least)
        _add_dots_of_large(large, dots)
    for param_state in param_states:
        _add_dots(param_state, dots, at_least)
    return torch.stack(dots).to(device, non_blocking=True).view(-1, _DOTS).sum(0, dtype=torch.float64)


def _add_dots_of_large(param_states: Sequence[ParamState], dots: list[Tensor]) -> None:
    """The five of each tensor, the squares of all at once: half of the launches."""
    if not param_states:
        return
    xs, gs, ds = (list(tensors) for tensors in zip(*(state[:3] for state in param_states), strict=True))
    squares = [torch._foreach_pow(torch._foreach_norm(tensors), 2) for tensors in (gs, xs, ds)]
    for x, g, d, gg, xx, dd in zip(xs, gs, ds, *squares, strict=True):
        row = d.reshape(-1)
        dots += [torch.dot(row, g.reshape(-1)), gg, xx, torch.dot(row, x.reshape(-1)), dd]


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


def _large_and_rows(
    param_states: Sequence[ParamState], at_least: torch.dtype
) -> tuple[list[ParamState], list[ParamState]]:
    """Those that are long and need no copies, and the others, with the small ones in a few long rows."""
    large, others, small = list[ParamState](), list[ParamState](), list[ParamState]()
    for state in param_states:
        if state.grad is None or state.delta is None:
            others.append(state)
        elif state.x.numel() <= SMALL:
            small.append(state)
        else:
            dtypes = {state.x.dtype, state.grad.dtype, state.delta.dtype}
            is_wide = dtypes <= {torch.float32, torch.float64} and dtypes == {
                torch.promote_types(state.x.dtype, at_least)
            }
            (large if is_wide else others).append(state)
    for here in parts([state.x.numel() for state in small]):
        columns = zip(*(state[:3] for state in small[here]), strict=True)
        x, grad, delta = (_flatten_dense_tensors(reals(tensors)) for tensors in columns)  # type: ignore[no-untyped-call]
        others.append(ParamState(x, grad, delta, None))
    return large, others


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
