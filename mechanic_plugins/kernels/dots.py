"""The sums of a step by torch operations.

Tensors here are local: a rank's own part of a parameter, never a DTensor. Small ones are joined into rows, large ones
cut into rows, and float64 adds up what float32 found in each: on a CPU the sums are off by about 1e-7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

__all__ = ["Dots", "reals", "runs_of"]

_ROW = {"cpu": 1 << 18}
_ROW_ELSEWHERE = 1 << 24
"""Elements of a row. Other devices add in trees, and have few launches to give."""


class Dots:
    """The inner products of a list of tensors with equal dtypes and one device, in this order: dg, gg, dd, dx, xx.

    `d` is x - ref, or ref itself. Sums that are not wanted are 0.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.runs = list(runs_of(numels, _ROW.get(device.type, _ROW_ELSEWHERE)))

    def of(
        self,
        xs: Sequence[Tensor],
        refs: Sequence[Tensor] | None,
        grads: Sequence[Tensor] | None,
        *,
        is_difference: bool = True,
        with_dx: bool = False,
        with_xx: bool = False,
    ) -> list[float]:
        """Waits for the device.

        Squares of finite float32 numbers overflow from 1.8e19 on: float64 then sums once more.
        """
        wanted = is_difference, with_dx, with_xx
        sums = self._sums(xs, refs, grads, torch.float32, *wanted)
        if not all(map(math.isfinite, sums)):
            return self._sums(xs, refs, grads, torch.float64, *wanted)
        return sums

    def _sums(
        self,
        xs: Sequence[Tensor],
        refs: Sequence[Tensor] | None,
        grads: Sequence[Tensor] | None,
        at_least: torch.dtype,
        *wanted: bool,
    ) -> list[float]:
        dots: list[Tensor] = []
        places: list[int] = []
        for run in self.runs:
            x, ref, grad = (None if tensors is None else _row(tensors, run) for tensors in (xs, refs, grads))
            assert x is not None
            wide = torch.promote_types(x.dtype, at_least)
            for part in _parts(x, ref, grad):
                for place, dot in _products(*part, wide, *wanted):
                    places.append(place)
                    dots.append(dot)
        sums = [0.0] * 5
        if dots:
            for place, number in zip(places, torch.stack(dots).tolist(), strict=True):
                sums[place] += number
        return sums


def runs_of(numels: Sequence[int], limit: int) -> Iterator[slice]:
    """One after the other, of up to `limit` elements where no tensor has more."""
    first, size = 0, 0
    for index, numel in enumerate(numels):
        if index > first and size + numel > limit:
            yield slice(first, index)
            first, size = index, 0
        size += numel
    if numels:
        yield slice(first, len(numels))


def _row(tensors: Sequence[Tensor], run: slice) -> Tensor:
    if run.stop - run.start == 1:
        return tensors[run.start].detach().reshape(-1)
    return _flatten_dense_tensors(tensors[run])  # type: ignore[no-any-return, no-untyped-call]


def _parts(x: Tensor, ref: Tensor | None, grad: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    size = _ROW.get(x.device.type, _ROW_ELSEWHERE)
    if x.numel() <= size:
        yield x, ref, grad
        return
    for at in range(0, x.numel(), size):
        here = slice(at, at + size)
        yield x[here], None if ref is None else ref[here], None if grad is None else grad[here]


def _products(
    x: Tensor,
    ref: Tensor | None,
    g: Tensor | None,
    wide: torch.dtype,
    is_difference: bool,
    with_dx: bool,
    with_xx: bool,
) -> Iterator[tuple[int, Tensor]]:
    x = x if x.dtype == wide else x.to(wide)
    if g is not None:
        g = g if g.dtype == wide else g.to(wide)
        yield 1, torch.dot(g, g)
    if ref is not None:
        d = x - ref if is_difference else ref.to(wide)
        if g is not None:
            yield 0, torch.dot(d, g)
        yield 2, torch.dot(d, d)
        if with_dx:
            yield 3, torch.dot(d, x)
    if with_xx:
        yield 4, torch.dot(x, x)


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex parameters are pairs of real ones: of tensors that are all complex, or none."""
    return [torch.view_as_real(t.detach().resolve_conj()) for t in tensors]
