"""The sums of a step by torch operations: see `mechanic_plugins.kernels.foreach`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mechanic_plugins.core.param_state import ParamState

__all__ = ["SMALL", "local_sums", "parts", "reals", "row_of", "waits_for_host"]

_CHUNK = {"cpu": 1 << 18}
"""Elements that are summed in float32 before float64 takes over. A CPU's sums are off by about 1e-7 then; GPUs add in
trees, and have few launches to give."""
SMALL, _ROW = 1 << 24, 1 << 26
"""Elements of a tensor that a GPU takes together with others, and of all of these at a time: one by one it would wait
for the host."""
_MANY = 1 << 18
"""Elements of a tensor from which on a GPU would rather read it in place: to copy it takes longer than to be told."""
_DOTS = 5
"""Inner products of a tensor's weights, gradient and delta."""


def local_sums(param_states: Sequence[ParamState], *, device: torch.device, with_dx: bool) -> Tensor:
    """<d, g>, <g, g>, <x, x>, <d, x> and <d, d> over param_states of one device and dtype, in float64 on `device`.

    Without <d, x> there is 0 in its place.

    Squares of finite float32 numbers overflow from 1.8e19 on. A CPU then sums once more in float64; to find out on a
    GPU would mean waiting for it.
    """
    sums = _sums(param_states, device=device, with_dx=with_dx)
    if sums.device.type == "cpu" and not all(map(math.isfinite, sums.tolist())):
        return _sums(param_states, device=device, with_dx=with_dx, at_least=torch.float64)
    return sums


def _sums(
    param_states: Sequence[ParamState], *, device: torch.device, with_dx: bool, at_least: torch.dtype = torch.float32
) -> Tensor:
    dots: list[Tensor] = []
    if waits_for_host(param_states[0].x.device):
        short, middling, param_states = _by_length(param_states)
        _add_dots_together(middling, dots, at_least, with_dx=with_dx)
        param_states = [*param_states, *_in_rows(short)]
    for param_state in param_states:
        _add_dots(param_state, dots, at_least, with_dx=with_dx)
    return torch.stack(dots).to(device, non_blocking=True).view(-1, _DOTS).sum(0, dtype=torch.float64)


def _add_dots(param_state: ParamState, dots: list[Tensor], at_least: torch.dtype, *, with_dx: bool) -> None:
    """The five of each chunk, in turn."""
    x = _real(param_state.x).reshape(-1)
    g, d = (None if t is None else _real(t).reshape(-1) for t in (param_state.grad, param_state.delta))
    wide = torch.promote_types(x.dtype, at_least)
    chunk = _CHUNK.get(x.device.type, _ROW)
    zero = x.new_zeros((), dtype=wide) if g is None or d is None or not with_dx else x
    longest = max(1, *(t.numel() for t in (x, g, d) if t is not None))
    for at in range(0, longest, chunk):
        here = slice(at, at + chunk)
        y = x[here].to(wide)
        h, e = (None if t is None else t[here].to(wide) for t in (g, d))
        dots.append(zero if e is None or h is None else torch.dot(e, h))
        dots.append(zero if h is None else torch.dot(h, h))
        dots.append(torch.dot(y, y))
        dots.append(zero if e is None or not with_dx else torch.dot(e, y))
        dots.append(zero if e is None else torch.dot(e, e))


def _by_length(param_states: Sequence[ParamState]) -> tuple[list[ParamState], list[ParamState], list[ParamState]]:
    """Short ones, middling ones, and those that are long or lack something."""
    short, middling, others = list[ParamState](), list[ParamState](), list[ParamState]()
    for state in param_states:
        numel = state.x.numel()
        if state.grad is None or state.delta is None or numel > SMALL:
            others.append(state)
        else:
            (short if numel < _MANY else middling).append(state)
    return short, middling, others


def _in_rows(short: Sequence[ParamState]) -> Iterator[ParamState]:
    """Copies of weights, gradients and deltas in a few long rows."""
    for here in parts([state.x.numel() for state in short]):
        x, grad, delta = map(_row, zip(*(state[:3] for state in short[here]), strict=True))
        yield ParamState(x, grad, delta, None)


def _row(tensors: Sequence[Tensor]) -> Tensor:
    row: Tensor = _flatten_dense_tensors(reals(tensors))  # type: ignore[no-untyped-call]
    return row


def _add_dots_together(
    middling: Sequence[ParamState], dots: list[Tensor], at_least: torch.dtype, *, with_dx: bool
) -> None:
    """The five of each: nothing is copied, and the norms of all are one operation."""
    if not middling:
        return
    xs, grads, deltas = map(reals, zip(*(state[:3] for state in middling), strict=True))
    wide = torch.promote_types(xs[0].dtype, at_least)
    zero = xs[0].new_zeros((), dtype=wide)
    squares = [torch._foreach_norm(tensors, dtype=wide) for tensors in (grads, xs, deltas)]
    for norms in squares:
        torch._foreach_mul_(norms, norms)
    for x, grad, delta, gg, xx, dd in zip(xs, grads, deltas, *squares, strict=True):
        d = _flat(delta, wide)
        dots += [torch.dot(d, _flat(grad, wide)), gg, xx, torch.dot(d, _flat(x, wide)) if with_dx else zero, dd]


def _flat(t: Tensor, dtype: torch.dtype) -> Tensor:
    row = t.reshape(-1)
    return row if t.dtype == dtype else row.to(dtype)


def row_of(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies of tensors in one row of memory, and views of it. torch.cat takes a GPU twice as long."""
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors})
    row = tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype)
    views = list(_unflatten_dense_tensors(row, tensors))  # type: ignore[no-untyped-call]
    torch._foreach_copy_(views, list(tensors))
    return row, views


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
