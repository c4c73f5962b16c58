"""The sums of a step by torch operations: see `mechanic_plugins.kernels.foreach`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mechanic_plugins.kernels.replays import Replays

__all__ = ["SMALL", "local_sums", "parts", "reals", "row_of", "waits_for_host"]

_CHUNK = {"cpu": 1 << 18}
"""Elements that are summed in float32 before float64 takes over. A CPU's sums are off by about 1e-7 then; GPUs add in
trees, and have few launches to give."""
SMALL, _ROW = 1 << 24, 1 << 26
"""Elements of a tensor that a GPU takes together with others, and of all of these at a time: one by one it would wait
for the host."""
_SHORT, _LONG = 1 << 18, 1 << 22
"""Elements of a tensor up to which it costs a GPU less to copy it than to look at it by itself, and from which on more
to copy its gradient than the host would need to start an inner product."""
_KEPT = 1 << 22
"""Elements of all short tensors up to which their sums are recorded: a CUDA graph keeps the copies."""
_DOTS = 5
"""Inner products of a tensor's weights, gradient and delta."""

_Row: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""A parameter's weights, gradient and delta."""
_WholeRow: TypeAlias = tuple[Tensor, Tensor, Tensor]


def local_sums(
    xs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    deltas: Sequence[Tensor | None],
    *,
    device: torch.device,
    with_dx: bool,
    replays: Replays | None = None,
) -> Tensor:
    """<d, g>, <g, g>, <x, x>, <d, x> and <d, d> over tensors of one device, in float64 on `device`.

    Without <d, x> there is 0 in its place. `replays` of the same parameters: the sums are good until the next ones.

    Squares of finite float32 numbers overflow from 1.8e19 on. A CPU then sums once more in float64; to find out on a
    GPU would mean waiting for it.
    """
    rows = list(zip(xs, grads, deltas, strict=True))
    if xs[0].is_complex():
        rows = [_in_pairs(row) for row in rows]
    sums = _sums(rows, device=device, with_dx=with_dx, replays=replays)
    if sums.device.type == "cpu" and not all(map(math.isfinite, sums.tolist())):
        return _sums(rows, device=device, with_dx=with_dx, at_least=torch.float64)
    return sums


def _sums(
    rows: Sequence[_Row],
    *,
    device: torch.device,
    with_dx: bool,
    at_least: torch.dtype = torch.float32,
    replays: Replays | None = None,
) -> Tensor:
    found: list[Tensor] = []
    if waits_for_host(rows[0][0].device):
        short, middling, long, rows = _by_length(rows)
        if short or middling:
            found.append(_sums_together(short, middling, at_least, with_dx=with_dx, replays=replays))
        if long:
            found.append(_sums_of_long(long, at_least, with_dx=with_dx))
    dots: list[Tensor] = []
    for row in rows:
        _add_dots(row, dots, at_least, with_dx=with_dx)
    if dots:
        found.append(torch.stack(dots).to(device, non_blocking=True).view(-1, _DOTS).sum(0, dtype=torch.float64))
    return functools.reduce(torch.add, (part.to(device, non_blocking=True) for part in found))


def _add_dots(row: _Row, dots: list[Tensor], at_least: torch.dtype, *, with_dx: bool) -> None:
    """The five of each chunk, in turn."""
    x, g, d = (None if t is None else t.reshape(-1) for t in row)
    assert x is not None
    wide = torch.promote_types(x.dtype, at_least)
    chunk = _CHUNK.get(x.device.type, _ROW)
    zero = x.new_zeros((), dtype=wide) if g is None or d is None or not with_dx else x
    longest = max(1, *(t.numel() for t in (x, g, d) if t is not None))
    for at in range(0, longest, chunk):
        y = _part(x, at, chunk, wide)
        h, e = (None if t is None else _part(t, at, chunk, wide) for t in (g, d))
        dots.append(zero if e is None or h is None else torch.dot(e, h))
        dots.append(zero if h is None else torch.dot(h, h))
        dots.append(torch.dot(y, y))
        dots.append(zero if e is None or not with_dx else torch.dot(e, y))
        dots.append(zero if e is None else torch.dot(e, e))


def _part(row: Tensor, at: int, size: int, dtype: torch.dtype) -> Tensor:
    """Most rows are one part. Each operation that a CPU need not start counts where tensors are small."""
    part = row if at == 0 and row.numel() <= size else row[at : at + size]
    return part if part.dtype == dtype else part.to(dtype)


def _by_length(rows: Sequence[_Row]) -> tuple[list[_WholeRow], list[_WholeRow], list[_WholeRow], list[_Row]]:
    """Short ones, middling ones, long ones, and those that are longer still or lack something."""
    short, middling, long, others = list[_WholeRow](), list[_WholeRow](), list[_WholeRow](), list[_Row]()
    for x, grad, delta in rows:
        numel = x.numel()
        if grad is None or delta is None or numel > SMALL:
            others.append((x, grad, delta))
        else:
            (short if numel < _SHORT else middling if numel < _LONG else long).append((x, grad, delta))
    return short, middling, long, others


def _sums_together(
    short: Sequence[_WholeRow],
    middling: Sequence[_WholeRow],
    at_least: torch.dtype,
    *,
    with_dx: bool,
    replays: Replays | None,
) -> Tensor:
    """The five over all of them, by operations that take many tensors at once, and that a CUDA graph can hold.

    Not so torch.dot: its library works in memory that belongs to the stream it was captured on.
    """
    tensors = [t for row in (*short, *middling) for t in row]
    wide = torch.promote_types(tensors[0].dtype, at_least)
    numels = [row[0].numel() for row in middling]
    pieces = list(parts(numels))
    room = tensors[0].new_empty(max((sum(numels[piece]) for piece in pieces), default=0), dtype=wide)

    def launch() -> Tensor:
        found = [_dots_of_copies(copies, wide, with_dx=with_dx) for copies in _joined(short)]
        found += [_dots_in(room, middling[piece], with_dx=with_dx) for piece in pieces]
        return torch.stack(found).sum(0, dtype=torch.float64)

    if replays is None or not _can_record(tensors, short, wide):
        return launch()
    return replays((with_dx, room.data_ptr(), *map(Tensor.data_ptr, tensors)), launch)  # type: ignore[no-any-return]


def _can_record(tensors: Sequence[Tensor], short: Sequence[_WholeRow], wide: torch.dtype) -> bool:
    """Whether a graph would have to keep no copies but of short tensors, and of few."""
    are_plain = all(t.dtype == wide and t.is_contiguous() for t in tensors)
    return are_plain and sum(row[0].numel() for row in short) <= _KEPT


def _joined(short: Sequence[_WholeRow]) -> Iterator[_WholeRow]:
    """Copies of weights, gradients and deltas in a few long rows of memory."""
    for here in parts([row[0].numel() for row in short]):
        x, grad, delta = (_flatten_dense_tensors(each) for each in zip(*short[here], strict=True))  # type: ignore[no-untyped-call]
        yield x, grad, delta


def _dots_of_copies(rows: _WholeRow, wide: torch.dtype, *, with_dx: bool) -> Tensor:
    x, g, d = (row.to(wide) for row in rows)
    gg, xx, dd = (torch.linalg.vector_norm(row).square() for row in (g, x, d))
    dx = (d * x).sum() if with_dx else torch.zeros_like(xx)
    return torch.stack([(d * g).sum(), gg, xx, dx, dd])


def _dots_in(room: Tensor, rows: Sequence[_WholeRow], *, with_dx: bool) -> Tensor:
    """Copies only the gradients, into `room`, to multiply them there."""
    xs, grads, deltas = map(list, zip(*rows, strict=True))
    row = room[: sum(x.numel() for x in xs)]
    views = list(_unflatten_dense_tensors(row, xs))  # type: ignore[no-untyped-call]
    torch._foreach_copy_(views, grads)
    gg = torch.linalg.vector_norm(row).square()
    torch._foreach_mul_(views, deltas)
    dg = row.sum()
    norms = torch.stack([*torch._foreach_norm(xs, dtype=room.dtype), *torch._foreach_norm(deltas, dtype=room.dtype)])
    xx, dd = norms.square().view(2, -1).sum(1)
    dx = torch.zeros_like(xx)
    if with_dx:
        torch._foreach_copy_(views, deltas)
        torch._foreach_mul_(views, xs)
        dx = row.sum()
    return torch.stack([dg, gg, xx, dx, dd])


def _sums_of_long(long: Sequence[_WholeRow], at_least: torch.dtype, *, with_dx: bool) -> Tensor:
    """Nothing is copied, and the norms of all are one operation."""
    xs, grads, deltas = map(list, zip(*long, strict=True))
    wide = torch.promote_types(xs[0].dtype, at_least)
    norms = [norm for tensors in (grads, xs, deltas) for norm in torch._foreach_norm(tensors, dtype=wide)]
    gg, xx, dd = torch.stack(norms).square().view(3, -1).sum(1, dtype=torch.float64)
    dg = _sum_of_dots(deltas, grads, wide)
    dx = _sum_of_dots(deltas, xs, wide) if with_dx else torch.zeros_like(gg)
    return torch.stack([dg, gg, xx, dx, dd])


def _sum_of_dots(some: Sequence[Tensor], others: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    dots = [torch.dot(a.reshape(-1).to(dtype), b.reshape(-1).to(dtype)) for a, b in zip(some, others, strict=True)]
    return torch.stack(dots).sum(dtype=torch.float64)


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


def _in_pairs(row: _Row) -> _Row:
    """What `reals` does, of a complex parameter that may lack something."""
    x, grad, delta = (None if t is None else torch.view_as_real(t) for t in row)
    assert x is not None
    return x, grad, delta


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex parameters are pairs of real ones: of tensors that are all complex, or none."""
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
