"""A step's sums in torch operations, and what the default rule measures from a run's first gradients.

Tensors here are local: a rank's shard of a parameter, never a DTensor. Small ones are concatenated into rows and large
ones cut into rows. Each row is summed in float32 and the rows in float64, with an error of about 1e-7 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Dots", "reals", "runs_of"]

_ROW = {"cpu": 1 << 18}
_ROW_ELSEWHERE = 1 << 24
"""Elements per row. Other devices sum in trees, and launches are expensive there."""

_TINY = 1e-30
"""Smaller sums of squares are inexact in float32."""


class Dots:
    """The inner products of lists of tensors with equal dtypes on one device, in this order: dg, gg, dd, dx, xx.

    `d` is x - ref, or ref itself. Sums that were not asked for are 0.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self._size = _ROW.get(device.type, _ROW_ELSEWHERE)
        self.runs = list(runs_of(numels, self._size))

    def of(
        self,
        xs: Sequence[Tensor],
        kept: Sequence[Tensor] | None,
        grads: Sequence[Any],
        *,
        is_difference: bool = True,
        with_dd: bool = True,
        with_dx: bool = False,
        with_xx: bool = False,
        wide: torch.dtype = torch.float32,
    ) -> list[float]:
        """Computes the sums, of products in `wide` or the weights' own float64. Waits for the device.

        Squares of float32 numbers above 1.8e19 overflow, and those below 1e-23 are 0. In both cases float64 sums again.
        """
        wide = torch.float64 if xs[0].dtype == torch.float64 else wide
        places: list[int] = []
        dots: list[Tensor] = []
        for run in self.runs:
            lists = (xs, grads) if kept is None else (xs, grads, kept)
            if run.stop - run.start == 1:
                rows = [tensors[run.start].detach().reshape(-1) for tensors in lists]
            else:
                rows = [torch._C._nn.flatten_dense_tensors(list(tensors[run])) for tensors in lists]
            for at in range(0, len(rows[0]) or 1, self._size):
                x, g, *d = rows if len(rows[0]) <= self._size else [row[at : at + self._size] for row in rows]
                x, g = x.to(wide), g.to(wide)
                found = [(1, g, g)]
                if d:
                    d0 = x - d[0] if is_difference else d[0].to(wide)
                    found += [(0, d0, g)]
                    if with_dd:
                        found += [(2, d0, d0)]
                    if with_dx:
                        found += [(3, d0, x)]
                if with_xx:
                    found += [(4, x, x)]
                for place, one, other in found:
                    places.append(place)
                    dots.append(torch.dot(one, other))
        sums = [0.0] * 5
        for place, number in zip(places, torch.stack(dots).tolist() if dots else (), strict=True):
            sums[place] += number
        if (all(map(math.isfinite, sums)) and sums[1] > _TINY) or wide == torch.float64:
            return sums
        how = {"is_difference": is_difference, "with_dd": with_dd, "with_dx": with_dx, "with_xx": with_xx}
        return self.of(xs, kept, grads, **how, wide=torch.float64)


def runs_of(numels: Sequence[int], limit: int) -> Iterator[slice]:
    """Consecutive slices of at most `limit` elements each, unless a single tensor has more."""
    first, size = 0, 0
    for index, numel in enumerate(numels):
        if index > first and size + numel > limit:
            yield slice(first, index)
            first, size = index, 0
        size += numel
    if numels:
        yield slice(first, len(numels))


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of complex tensors as real ones with one more dimension."""
    return [torch.view_as_real(t.detach().resolve_conj()) for t in tensors]
