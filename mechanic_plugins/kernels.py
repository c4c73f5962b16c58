"""The two passes over memory that Mechanic adds to a step: the local sums, and the move.

Tensors in these functions are local: a rank's own part of a parameter, never a DTensor. Low-precision weights
(bf16, fp16) carry a reference copy in their own dtype beside a float32 delta, so that they are always the rounding
of an exact value; wider weights need none and move by differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Slot", "delta_dtype", "local_sums", "move", "needs_reference", "restore"]

_CHUNK = 1 << 22
"""Elements of a product that are held at once while summing (16 MB in float32)."""


class Slot(NamedTuple):
    """One parameter's local tensors in one step. `grad` is None where the base leaves it, `delta` before its first."""

    x: Tensor
    grad: Tensor | None
    delta: Tensor | None
    ref: Tensor | None


def needs_reference(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are too coarse to be moved by differences."""
    return dtype in (torch.bfloat16, torch.float16)


def delta_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.float32 if needs_reference(dtype) else dtype


def local_sums(slots: Sequence[Slot], *, maximize: bool, device: torch.device) -> Tensor:
    """<d, g>, <g, g>, <x, x>, <d, x> and <d, d> over the slots, in float64 on `device`."""
    total = torch.zeros(5, dtype=torch.float64, device=device)
    for slot in slots:
        total += torch.stack(_sums_of(slot, maximize=maximize)).to(device, non_blocking=True)
    return total


def _sums_of(slot: Slot, *, maximize: bool) -> list[Tensor]:
    x, g, d = _required(slot.x), _real(slot.grad), _real(slot.delta)
    zero = torch.zeros((), dtype=_accumulator(x), device=x.device)
    dg = zero if d is None or g is None else _dot(d, g)
    return [
        -dg if maximize else dg,
        zero if g is None else _dot(g, g),
        _dot(x, x),
        zero if d is None else _dot(d, x),
        zero if d is None else _dot(d, d),
    ]


def _real(t: Tensor | None) -> Tensor | None:
    """Complex parameters are pairs of real ones."""
    return torch.view_as_real(t) if t is not None and t.is_complex() else t


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product, accumulated in float64; products of low-precision tensors are taken in float32."""
    return sum(
        ((p.to(delta_dtype(p.dtype)) * q).sum(dtype=_accumulator(p)) for p, q in _chunks(a, b)),
        start=torch.zeros((), dtype=_accumulator(a), device=a.device),
    )


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if a.numel() <= _CHUNK or not (a.is_contiguous() and b.is_contiguous()):
        return iter([(a, b)])
    return zip(torch.split(a.view(-1), _CHUNK), torch.split(b.view(-1), _CHUNK), strict=True)


def _accumulator(t: Tensor) -> torch.dtype:
    return torch.float32 if t.device.type == "mps" else torch.float64


def move(slots: Sequence[Slot], olds: Sequence[Tensor], *, before: Tensor, after: Tensor) -> None:
    """From the base's weights to Mechanic's: x = old + (after - before) * delta + after * u; delta += u.

    u = x - old is what the base did. `olds` is read only, so that a caller can go back to it if anything raises.
    All slots have a delta and share one device and dtype.
    """
    if needs_reference(slots[0].x.dtype):
        for slot, old in zip(slots, olds, strict=True):
            _move_rounded(slot, old, before=before.float(), after=after.float())
        return
    xs, deltas = [_required(s.x) for s in slots], [_required(s.delta) for s in slots]
    olds = [_required(old) for old in olds]
    step = (after - before).to(xs[0].dtype)
    torch._foreach_sub_(xs, olds)  # u
    torch._foreach_add_(deltas, xs)
    torch._foreach_mul_(xs, before.to(xs[0].dtype))
    for x, delta in zip(xs, deltas, strict=True):
        x.addcmul_(delta, step)  # before * u + (after - before) * (delta + u): the whole move, small beside x ...
    torch._foreach_add_(xs, olds)  # ... so that x is rounded once


def _required(t: Tensor | None) -> Tensor:
    real = _real(t)
    assert real is not None
    return real


def _move_rounded(slot: Slot, old: Tensor, *, before: Tensor, after: Tensor) -> None:
    """Low precision: x is the rounding of ref + scale * delta. Weights that somebody else moved take ref with them."""
    delta, ref = _required(slot.delta), _required(slot.ref)
    expected = torch.addcmul(ref.float(), delta, before)
    moved_outside = old != expected.to(old.dtype)
    ref.copy_(torch.where(moved_outside, old.float() - before * delta, ref.float()))
    delta.add_(slot.x.float() - old.float())
    slot.x.copy_(torch.addcmul(ref.float(), delta, after))


def restore(slots: Sequence[Slot], olds: Sequence[Tensor]) -> None:
    """The weights as they were before the base touched them."""
    torch._foreach_copy_([s.x for s in slots], list(olds))
