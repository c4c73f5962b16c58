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

__all__ = ["Dots", "count_nonzero", "reals", "runs_of", "sizes"]

_ROW = {"cpu": 1 << 18}
_ROW_ELSEWHERE = 1 << 24
"""Elements per row. Other devices sum in trees, and launches are expensive there."""


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
        refs: Sequence[Tensor] | None,
        grads: Sequence[Tensor] | None,
        *,
        is_difference: bool = True,
        with_dx: bool = False,
        with_xx: bool = False,
    ) -> list[float]:
        """Computes the sums. Waits for the device.

        Squares of float32 numbers above 1.8e19 overflow, in which case float64 sums again.
        """
        asked = is_difference, with_dx, with_xx
        wide = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        sums = self._sums(xs, refs, grads, wide, asked)
        if all(map(math.isfinite, sums)):
            return sums
        return self._sums(xs, refs, grads, torch.float64, asked)

    def _sums(self, xs: Any, refs: Any, grads: Any, wide: torch.dtype, asked: tuple[bool, bool, bool]) -> list[float]:
        found: list[tuple[int, Tensor]] = []
        for run in self.runs:
            rows: list[Any] = [None if tensors is None else _row(tensors, run) for tensors in (xs, refs, grads)]
            size = rows[0].numel()
            for at in range(0, size or 1, self._size):
                x, ref, g = rows
                if size > self._size:
                    x, ref, g = (None if row is None else row[at : at + self._size] for row in rows)
                found += _products(x, ref, g, wide, *asked)
        sums = [0.0] * 5
        if found:
            places, dots = zip(*found, strict=True)
            for place, number in zip(places, torch.stack(dots).tolist(), strict=True):
                sums[place] += number
        return sums


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


def _row(tensors: list[Tensor], run: slice) -> Any:
    if run.stop - run.start == 1:
        return tensors[run.start].detach().reshape(-1)
    return torch._C._nn.flatten_dense_tensors(tensors[run])


def _products(
    x: Tensor,
    ref: Tensor | None,
    g: Tensor | None,
    wide: torch.dtype,
    is_difference: bool,
    with_dx: bool,
    with_xx: bool,
) -> list[tuple[int, Tensor]]:
    """The inner products, each with its index among the sums."""
    x = x if x.dtype == wide else x.to(wide)
    found = []
    if g is not None:
        g = g if g.dtype == wide else g.to(wide)
        found += [(1, torch.dot(g, g))]
    if ref is not None:
        d = x - ref if is_difference else ref.to(wide)
        if g is not None:
            found += [(0, torch.dot(d, g))]
        found += [(2, torch.dot(d, d))]
        if with_dx:
            found += [(3, torch.dot(d, x))]
    if with_xx:
        found += [(4, torch.dot(x, x))]
    return found


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of complex tensors as real ones with one more dimension."""
    return [torch.view_as_real(t.detach().resolve_conj()) for t in tensors]


def sizes(xs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[float]:
    """The sum of min(|x|, 1)^(1/3), the number of nonzero weights, and the number of nonzero gradients.

    Waits for the device. The tensors may be shards: the numbers of all ranks are added up.
    """
    found = [torch.stack([_roots(x), x.count_nonzero().double()]) for x in xs]
    roots, nonzero = torch.stack(found).sum(0).tolist()
    return [roots, nonzero, count_nonzero(grads)]


def count_nonzero(grads: Sequence[Tensor]) -> float:
    """The number of nonzero elements in all gradients. Waits for the device."""
    return float(torch.stack([grad.count_nonzero() for grad in grads]).sum())


def _roots(x: Tensor) -> Tensor:
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    # adding 0 * x keeps NaN and infinity from being clamped away
    return wide.abs().clamp_(max=1.0).pow_(1 / 3).add_(wide, alpha=0).sum(dtype=torch.float64)
