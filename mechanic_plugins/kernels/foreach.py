"""The two passes over memory that Mechanic adds to a step, by torch operations: the local sums, and the move.

Tensors here are local: a rank's own part of a parameter, never a DTensor. This is the way on CPUs, and for tensors that
are no plain rows in memory; `mechanic_plugins.kernels.triton_batch` is the way on a GPU with Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import IndexRange, ParamState, needs_reference
from mechanic_plugins.core.tuner_state import gradient_count, sums_of
from mechanic_plugins.kernels.cuda import is_capturing
from mechanic_plugins.kernels.dither import dithered
from mechanic_plugins.kernels.foreach_sums import SMALL, local_sums, parts, reals, row_of, waits_for_host
from mechanic_plugins.kernels.replays import Replays
from mechanic_plugins.kernels.triton_support import ALIGNED

__all__ = ["ForeachBatch", "has_fused_sgd", "move"]

_CACHED = 1 << 20
"""Elements that stay in a CPU's cache from one operation to the next; fewer would pay more for starting them."""


class ForeachBatch:
    """The deltas and references of param_states of one device and dtype, and the passes over them and their weights.

    Weights and gradients are handed in for each pass and never kept: a gradient kept is memory that the next forward
    pass lacks, and FSDP may put another tensor in a weight's place.
    """

    def __init__(self, param_states: Sequence[ParamState]) -> None:
        self.deltas = [param_state.delta for param_state in param_states]
        self.refs = [param_state.ref for param_state in param_states]
        self.sizes = [param_state.x.numel() * param_state.x.element_size() for param_state in param_states]
        self._device, self._dtype = param_states[0].x.device, param_states[0].x.dtype
        self._places = [0, *accumulate(-(-state.x.numel() // ALIGNED) * ALIGNED for state in param_states)]
        self._layouts = [(param_state.x.shape, param_state.x.stride()) for param_state in param_states]
        self._is_flat = [
            state.x.is_contiguous() and delta is not None and delta.is_contiguous()
            for state, delta in zip(param_states, self.deltas, strict=True)
        ]
        self.gradients = 0
        """How many there are in this step."""
        self._sums_replays, self._move_replays = Replays(self._device), Replays(self._device)
        self._scales: Tensor | None = None
        """Where recorded moves read them."""

    def refresh_pointers(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether weights and gradients are still what they were."""
        dtype, device = self._dtype, self._device
        for x, grad, layout in zip(xs, grads, self._layouts, strict=True):
            if x.dtype != dtype or x.device != device or (x.shape, x.stride()) != layout:
                return False
            if grad is not None and grad.layout != torch.strided:
                return False
        self.gradients = len(grads) - sum(grad is None for grad in grads)
        return True

    def add_sums(
        self,
        xs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        out: Tensor,
        *,
        tuner_index: int,
        weight: float,
        maximize: bool,
        penalty: float,
        with_dx: bool,
    ) -> None:
        """Adds this list's share to a tuner's sums, and its gradients to the count at the end.

        Without `with_dx` <d, x> is left out, unless the penalty needs it.
        """
        with_dx |= penalty != 0
        sums = local_sums(xs, grads, self.deltas, device=out.device, with_dx=with_dx, replays=self._sums_replays)
        if maximize:
            sums[0].neg_()
        if penalty:
            sums = torch.cat([sums, penalty * sums[3:4]])
        sums_of(out, tuner_index)[: len(sums)].add_(sums, alpha=weight)
        gradient_count(out).add_(sum(grad is not None for grad in grads))

    def snapshot(self, part: IndexRange, xs: Sequence[Tensor]) -> list[Tensor]:
        """Copies of a part's weights."""
        if self._dtype.is_complex or not waits_for_host(self._device):
            return [x.clone() for x in xs]
        if all(self._is_flat[part.first : part.last]):
            return row_of(xs)[1]
        return list(torch._foreach_mul(list(xs), 1))  # exact, and keeps their order in memory

    def restore(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Sequence[Tensor]) -> None:
        """The weights as they were before the base touched them."""
        torch._foreach_copy_(list(xs), list(snapshot))

    def float_copies(self, part: IndexRange, xs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """A part's weights in float32; see `TritonBatch.float_copies`."""
        return [x.detach().to(torch.float32) for x in xs], None

    def begin_moves(self, parts: Sequence[IndexRange]) -> None:
        """The parts whose moves will make up the whole."""

    def move(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Sequence[Tensor], scales: Tensor) -> None:
        """From the base's weights to Mechanic's."""
        here = slice(part.first, part.last)
        deltas, places, is_flat = _all_of(self.deltas[here]), self._places[here], self._is_flat[here]

        def launch(scales: Tensor) -> None:
            move(xs, deltas, self.refs[here], snapshot, scales, places=places, is_flat=is_flat)

        makes_no_copies = all(is_flat) and has_fused_sgd(xs[0]) and deltas[0].dtype == xs[0].dtype
        if not makes_no_copies or is_capturing(self._device):
            launch(scales)
            return
        self._scales = kept = scales.clone() if self._scales is None else self._scales.copy_(scales)
        key = part, *(t.data_ptr() for tensors in (xs, deltas, snapshot) for t in tensors)
        self._move_replays(key, lambda: launch(kept))
        torch.autograd.graph.increment_version(xs)

    def move_to(
        self, part: IndexRange, xs: Sequence[Tensor], stepped: Sequence[Tensor], row: Tensor | None, scales: Tensor
    ) -> None:
        """The same where the base has stepped float32 copies and left the weights `xs` alone."""
        here = slice(part.first, part.last)
        kept = _all_of(self.deltas[here]), _all_of(self.refs[here])
        _move_rounded(xs, *kept, xs, stepped, scales, places=self._places[here])

    def finish_moves(self, xs: Sequence[Tensor]) -> None:
        """All parts have moved."""


def move(
    xs: Sequence[Tensor],
    deltas: Sequence[Tensor],
    refs: Sequence[Tensor | None],
    olds: Sequence[Tensor],
    scales: Tensor,
    *,
    places: Sequence[int],
    is_flat: Sequence[bool],
) -> None:
    """From the base's weights to Mechanic's: delta = kept * delta + u, and x = x_ref + after * delta.

    u = x - old is what the base did. `olds` is read only, so that a caller can go back to it if anything raises.
    All share one device and dtype. `places` is for a delta in bfloat16: see `dithered`. `is_flat` says which
    weights and deltas are contiguous.
    """
    if needs_reference(xs[0].dtype):
        _move_rounded(xs, deltas, _all_of(refs), olds, xs, scales, places=places)
        return
    before, after, _, kept, _, step = scales.unbind()
    before = before / torch.where(kept > 0, kept, 1.0)  # where nothing is kept, nothing was played
    if not needs_reference(deltas[0].dtype):
        _move_by_difference(xs, deltas, olds, before=before, after=after, kept=kept, is_flat=is_flat)
        return
    for x, delta, old, place, flat in zip(xs, deltas, olds, places, is_flat, strict=True):
        wide = delta.to(x.dtype)
        _move_by_difference([x], [wide], [old], before=before, after=after, kept=kept, is_flat=[flat])
        delta.copy_(dithered(wide, place=place, step=step))


def _move_by_difference(
    xs: Sequence[Tensor],
    deltas: Sequence[Tensor],
    olds: Sequence[Tensor],
    *,
    before: Tensor,
    after: Tensor,
    kept: Tensor,
    is_flat: Sequence[bool],
) -> None:
    """Here `before` is the scale for the new delta that the weights were made at."""
    xs, deltas, olds = map(reals, (xs, deltas, olds))
    # before * u + (after - before) * delta, the new one: the whole move, small beside x, so that x is rounded once
    if not waits_for_host(xs[0].device):
        factor, scale, share = before.item(), after.item(), kept.item()
        for x, delta, old in zip(*_in_cache(xs, deltas, olds), strict=True):
            torch.add(x.sub_(old), delta, alpha=share, out=delta)  # x holds u
            if scale == 0:
                x.mul_(factor).add_(delta, alpha=-factor).add_(old)
            else:  # the same in fewer operations
                torch.lerp(x, delta, (scale - factor) / scale, out=x)
                torch.add(old, x, alpha=scale, out=x)
        return
    before, step, kept = (t.to(xs[0].dtype) for t in (before, after - before, kept))
    is_small = [x.numel() <= SMALL for x in xs]
    for x, delta, old, small in zip(xs, deltas, olds, is_small, strict=True):
        if not small:  # fewer passes over memory than together
            torch.addcmul(x.sub_(old), delta, kept, out=delta)
            x.mul_(before).addcmul_(delta, step).add_(old)
    xs, deltas, olds = (list(itertools.compress(tensors, is_small)) for tensors in (xs, deltas, olds))
    if not xs:
        return
    torch._foreach_sub_(xs, olds)  # xs hold u
    torch._foreach_mul_(deltas, kept)
    torch._foreach_add_(deltas, xs)
    torch._foreach_mul_(xs, before)
    _add_multiple(xs, deltas, step, is_flat=all(itertools.compress(is_flat, is_small)))
    torch._foreach_add_(xs, olds)


def _add_multiple(xs: list[Tensor], deltas: list[Tensor], factor: Tensor, *, is_flat: bool) -> None:
    """Adds factor * delta. Only SGD's kernel takes a factor from the device's memory and makes one pass of it.

    It walks flat memory.
    """
    if is_flat and has_fused_sgd(xs[0]):
        torch._fused_sgd_(
            xs, deltas, [], lr=factor, maximize=True,
            weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
        )  # fmt: skip
        return
    for here in parts([x.numel() for x in xs]):
        torch._foreach_add_(xs[here], torch._foreach_mul(deltas[here], factor))


def has_fused_sgd(x: Tensor) -> bool:
    """Its factor has float32's digits."""
    return x.device.type == "cuda" and x.dtype == torch.float32


def _in_cache(*lists: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Long rows cut into batches that stay in a CPU's cache from one operation to the next."""
    cut: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for tensors in zip(*lists, strict=True):
        whole = tensors[0].numel() <= _CACHED or not all(t.is_contiguous() for t in tensors)
        for batches, t in zip(cut, tensors, strict=True):
            batches += [t] if whole else torch.split(t.view(-1), _CACHED)
    return cut


def _move_rounded(
    xs: Sequence[Tensor],
    deltas: Sequence[Tensor],
    refs: Sequence[Tensor],
    olds: Sequence[Tensor],
    news: Sequence[Tensor],
    scales: Tensor,
    *,
    places: Sequence[int],
) -> None:
    """Low precision: x is the rounding of ref + scale * delta. Weights changed from outside take ref with them.

    The base went from `olds` to `news`.
    """
    before, after, _, kept, *_ = scales.float().unbind()
    for x, delta, ref, old, new, place in zip(xs, deltas, refs, olds, news, places, strict=True):
        wide = delta.float()
        expected = torch.addcmul(ref.float(), wide, before)
        moved_outside = old != expected.to(old.dtype)
        ref.copy_(torch.where(moved_outside, old.float() - before * wide, ref.float()))
        wide = torch.addcmul(new.float() - old.float(), wide, kept)
        if needs_reference(delta.dtype):
            wide = dithered(wide, place=place, step=scales[5])
        delta.copy_(wide)
        x.copy_(torch.addcmul(ref.float(), wide, after))


def _all_of(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The same tensors: none is missing where weights are moved."""
    return [t for t in tensors if t is not None]
