"""The two passes over memory that Mechanic adds to a step: the local sums, and the move.

Tensors in these functions are local: a rank's own part of a parameter, never a DTensor. On a GPU with Triton both
passes are a launch or two for all tensors together; elsewhere, and for tensors that are not plain rows in memory, they
are torch operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from mechanic_plugins import multi_tensor
from mechanic_plugins.multi_tensor import Workspace
from mechanic_plugins.slots import Slot as Slot
from mechanic_plugins.slots import delta_dtype, needs_reference

__all__ = ["local_sums", "move", "restore"]

_CHUNK = {"cpu": 1 << 17}
"""Elements that are summed in float32 before float64 takes over. A CPU's sums are off by about 1e-7 then; GPUs add in
trees, and have few launches to give."""
_OTHER_CHUNK = 1 << 26


def local_sums(
    slots: Sequence[Slot],
    *,
    maximize: bool,
    device: torch.device,
    workspace: Workspace | None = None,
) -> Tensor:
    """<d, g>, <g, g>, <x, x>, <d, x> and <d, d> over the slots, in float64 on `device`.

    With a workspace, slots that allow it are summed by a GPU kernel.
    """
    rows, others = _split(slots, workspace)
    total = torch.zeros(5, dtype=torch.float64, device=device)
    for kind in rows:
        assert workspace is not None
        total += multi_tensor.sums(kind, workspace).to(device, non_blocking=True)
    for slot in others:
        total += _sums_of(slot).to(device, non_blocking=True)
    if maximize:
        total[0].neg_()
    return total


def _split(slots: Sequence[Slot], workspace: Workspace | None) -> tuple[list[list[Slot]], list[Slot]]:
    """Lists of one kind each for the kernels, and the rest."""
    if workspace is None or not slots or not multi_tensor.can_run(slots[0].x.device):
        return [], list(slots)
    kinds, others = defaultdict(list), []
    for slot in slots:
        if multi_tensor.fits(slot) and multi_tensor.can_run(slot.x.device):
            kinds[multi_tensor.kind_of(slot)].append(slot)
        else:
            others.append(slot)
    return list(kinds.values()), others


def _sums_of(slot: Slot) -> Tensor:
    x, g, d = (None if t is None else _required(t).reshape(-1) for t in (slot.x, slot.grad, slot.delta))
    assert x is not None
    chunk = _CHUNK.get(x.device.type, _OTHER_CHUNK)
    total = _dots(x, g, d, slice(0, chunk))
    for at in range(chunk, x.numel(), chunk):
        total = total.double() + _dots(x, g, d, slice(at, at + chunk))
    return total


def _dots(x: Tensor, g: Tensor | None, d: Tensor | None, here: slice) -> Tensor:
    wide = delta_dtype(x.dtype)
    x = x[here].to(wide)
    g, d = (None if t is None else t[here].to(wide) for t in (g, d))
    zero = x.new_zeros(())
    return torch.stack(
        [
            zero if d is None or g is None else torch.dot(d, g),
            zero if g is None else torch.dot(g, g),
            torch.dot(x, x),
            zero if d is None else torch.dot(d, x),
            zero if d is None else torch.dot(d, d),
        ]
    )


def _required(t: Tensor | None) -> Tensor:
    """Complex parameters are pairs of real ones."""
    assert t is not None
    return torch.view_as_real(t) if t.is_complex() else t


def move(
    slots: Sequence[Slot], olds: Sequence[Tensor], *, before: Tensor, after: Tensor, workspace: Workspace | None = None
) -> None:
    """From the base's weights to Mechanic's: x = old + (after - before) * delta + after * u; delta += u.

    u = x - old is what the base did. `olds` is read only, so that a caller can go back to it if anything raises.
    All slots have a delta and share one device and dtype.
    """
    if workspace is not None and multi_tensor.can_run(slots[0].x.device) and all(map(multi_tensor.fits, slots)):
        multi_tensor.move(slots, olds, torch.stack([before, after]), workspace)
    elif needs_reference(slots[0].x.dtype):
        for slot, old in zip(slots, olds, strict=True):
            _move_rounded(slot, old, before=before.float(), after=after.float())
    else:
        _move_by_difference(slots, olds, before=before, after=after)


def _move_by_difference(slots: Sequence[Slot], olds: Sequence[Tensor], *, before: Tensor, after: Tensor) -> None:
    xs, deltas = [_required(s.x) for s in slots], [_required(s.delta) for s in slots]
    olds = [_required(old) for old in olds]
    if xs[0].device.type == "cpu":
        xs, deltas, olds = _in_cache(xs, deltas, olds)
    before, step = before.to(xs[0].dtype), (after - before).to(xs[0].dtype)
    for x, delta, old in zip(xs, deltas, olds, strict=True):
        delta.add_(x.sub_(old))  # u
        # before * u + (after - before) * (delta + u): the whole move, small beside x, so that x is rounded once
        x.mul_(before).addcmul_(delta, step).add_(old)


def _in_cache(*lists: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Long rows cut into pieces that stay in a CPU's cache from one operation to the next."""
    chunk = _CHUNK["cpu"]
    cut: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for tensors in zip(*lists, strict=True):
        whole = tensors[0].numel() <= chunk or not all(t.is_contiguous() for t in tensors)
        for pieces, t in zip(cut, tensors, strict=True):
            pieces += [t] if whole else torch.split(t.view(-1), chunk)
    return cut


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
