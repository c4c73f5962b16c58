"""How much one step changed each layer, relative to its size.

A layer's matrix W multiplies its input, so its size is what it does to the input it amplifies most: |W|_2, the
spectral norm. A step that changes the output of every layer by the same share has the same |u|_2 / |W|_2 everywhere,
whatever the layers' shapes; in the Euclidean norm it has not.

The ranks never put a matrix together. Power iterations need the products W v and W^T y only, which are sums over the
blocks that the ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.distributed.layout import Block, Layout
from mechanic_plugins.distributed.reduction import Reduction

__all__ = ["Changes"]

_ITERATIONS = 8
"""They come within about a tenth of the spectral norm, from below, even where no singular value stands out."""


class Changes(NamedTuple):
    """What is known of each whole parameter before a step, for its relative change afterwards."""

    layout: Layout
    shares: Sequence[float]
    reduction: Reduction
    dtype: torch.dtype
    device: torch.device
    """Those of what is reduced: the same on every rank, also on one without an update."""
    sizes: list[float]
    """Their norms."""
    starts: list[float]
    """Their Euclidean norms at the start of the run."""
    gradients: list[float]
    """Those of their gradients."""

    @classmethod
    @torch.no_grad()
    def before(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        starts: Sequence[Tensor],
        layout: Layout,
        shares: Sequence[float],
        reduction: Reduction,
    ) -> Changes:
        """Called before the weights move.

        Args:
            weights: This rank's tensors, one for each entry of `layout.blocks`.
            gradients: Their gradients. Only whether a whole parameter's is zero matters.
            starts: The weights at the start of the run.
            layout: Where the whole parameters lie in the tensors.
            shares: The factor on this rank's sums of each tensor, so that every number counts once over all ranks.
            reduction: Sums over the ranks.
        """
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in weights)
        dtype, device, count = torch.float64 if wide else torch.float32, _meeting_place(weights), len(layout.shapes)
        sizes = _norms(weights, layout, shares, reduction, dtype, device)
        lists = [_squares(_parts(each, layout, shares), layout, device) for each in (starts, gradients)]
        euclidean = reduction(torch.cat(lists)).sqrt().tolist()
        return cls(layout, shares, reduction, dtype, device, sizes, euclidean[:count], euclidean[count:])

    @torch.no_grad()
    def after(self, updates: Sequence[Tensor | None]) -> list[tuple[float, bool]]:
        """For each whole parameter, |update| / |weights| and whether it is a matrix.

        In the spectral norm for a matrix, by power iterations, in the Euclidean norm for a vector. Where the weights
        started at zero, what they should come to is unknown, so |weights| counts as at least 1 for a matrix and as at
        least sqrt(n) for n numbers in a vector. 0 without a gradient, whatever weight decay has changed, and for
        weights that became zero. Weights that are not finite give NaN.

        Every rank gets the same. Waits for the device, but not between the iterations. Keeps a vector per matrix.

        Args:
            updates: What the step has added to each of this rank's tensors; None where it changed nothing.
        """
        result, layout = [], self.layout
        norms = _norms(updates, layout, self.shares, self.reduction, self.dtype, self.device)
        known = zip(layout.shapes, norms, self.sizes, self.starts, self.gradients, strict=True)
        for (height, width), change, size, start, gradient in known:
            is_matrix = min(height, width) > 1
            if not start:
                size = max(size, 1.0 if is_matrix else math.sqrt(height * width))
            result.append((change / size if change and size and gradient else 0.0, is_matrix))
        return result


class _Part(NamedTuple):
    """A block of a whole parameter as a matrix of real numbers."""

    block: Block
    values: Tensor
    share: float


def _parts(
    tensors: Sequence[Tensor | None], layout: Layout, shares: Sequence[float], dtype: torch.dtype | None = None
) -> list[_Part]:
    parts = []
    for t, blocks, share in zip(tensors, layout.blocks, shares, strict=True):
        if t is None:
            continue
        for block in blocks:
            if t.is_complex():  # two real columns for each of its own
                block = block._replace(at=2 * block.at, column=2 * block.column, width=2 * block.width)
            parts.append(_Part(block, _numbers(t.detach(), block, dtype or t.real.dtype), share))
    return parts


def _norms(
    tensors: Sequence[Tensor | None],
    layout: Layout,
    shares: Sequence[float],
    reduction: Reduction,
    dtype: torch.dtype,
    device: torch.device,
) -> list[float]:
    """Each whole parameter's norm: of matrices the spectral one, of vectors the Euclidean one."""
    parts = _parts(tensors, layout, shares, dtype)
    owners = [tensors[owner] for owner in layout.owners]
    doubled = [2 if t is not None and t.is_complex() else 1 for t in owners]
    matrices = [whole for whole, shape in enumerate(layout.shapes) if min(shape) > 1]
    place = {whole: index for index, whole in enumerate(matrices)}
    vectors = [part for part in parts if part.block.whole not in place]
    norms = reduction(_squares(vectors, layout, device)).sqrt()
    if matrices:
        shapes = [(layout.shapes[whole][0], layout.shapes[whole][1] * doubled[whole]) for whole in matrices]
        rest = [part for part in parts if part.block.whole in place]
        spectral = _spectral_norms(rest, shapes, place, device, dtype, reduction)
        norms = norms.index_copy(0, torch.tensor(matrices).to(device), spectral)
    numbers: list[float] = norms.tolist()
    return numbers


def _numbers(t: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """A block's numbers as a matrix. A tensor whose numbers lie in another order than its indices is copied."""
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1)
    return flat[block.at : block.at + block.height * block.width].to(dtype).view(block.height, block.width)


def _meeting_place(tensors: Sequence[Tensor]) -> torch.device:
    """The device of what is common to all tensors: an accelerator if there is one with float64, or else the CPU."""
    devices = (t.device for t in tensors)
    return next((d for d in devices if d.type not in ("cpu", "mps", "meta")), torch.device("cpu"))


def _squares(parts: Sequence[_Part], layout: Layout, device: torch.device) -> Tensor:
    """This rank's share in the squared Euclidean norm of each whole parameter, in float64."""
    squares = torch.zeros(len(layout.shapes), dtype=torch.float64, device=device)
    if parts:
        norms = torch.stack([_norm(part.values, device) for part in parts])
        factors = torch.tensor([part.share for part in parts], dtype=torch.float64).to(device)
        places = torch.tensor([part.block.whole for part in parts]).to(device)
        squares.index_put_((places,), norms.square_().mul_(factors), accumulate=True)
    return squares


def _norm(values: Tensor, device: torch.device) -> Tensor:
    wide = None if values.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.to(device).double()


def _spectral_norms(
    parts: Sequence[_Part],
    shapes: list[tuple[int, int]],
    place: dict[int, int],
    device: torch.device,
    dtype: torch.dtype,
    reduction: Reduction,
) -> Tensor:
    """The spectral norm of each matrix, in float64; `place` is their order, by whole parameter.

    All matrices share the all-reduces.
    """
    rows = _Vectors([height for height, _ in shapes], device, dtype)
    columns = _Vectors([width for _, width in shapes], device, dtype)
    products = []
    for (whole, _, row, column, height, width), values, share in parts:
        ys = rows.each[place[whole]][row:][:height]
        vs = columns.each[place[whole]][column:][:width]
        products.append((values, ys, vs, share))
    for vector in columns.each:
        vector.copy_(_irregular(len(vector), device))
    columns.normalise()
    for _ in range(_ITERATIONS):
        rows.become(((matrix, vs, ys, share) for matrix, ys, vs, share in products), reduction)
        rows.normalise()  # or the next product might overflow
        columns.become(((matrix.t(), ys, vs, share) for matrix, ys, vs, share in products), reduction)
        columns.normalise()
    rows.become(((matrix, vs, ys, share) for matrix, ys, vs, share in products), reduction)
    return rows.norms()


def _irregular(size: int, device: torch.device) -> Tensor:
    """A vector far from orthogonal to any that a matrix may single out, and the same in every run and on every rank."""
    index = torch.arange(1, size + 1, device=device, dtype=torch.float64)
    return torch.sin(index * index * 0.7548776662466927)


class _Vectors:
    """A vector for each matrix, all in one buffer, so that one all-reduce sums them over the ranks."""

    def __init__(self, sizes: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self._all = torch.zeros(sum(sizes), device=device, dtype=dtype)
        self._sizes = torch.tensor(sizes, device=device)
        self._owners = torch.arange(len(sizes), device=device).repeat_interleave(self._sizes)
        self.each: Sequence[Tensor] = torch.split(self._all, sizes)

    def norms(self) -> Tensor:
        squares = self._all.double().square()
        return torch.segment_reduce(squares, "sum", lengths=self._sizes, unsafe=True).sqrt_()

    def normalise(self) -> None:
        """Makes each vector's norm 1; a zero vector stays."""
        self._all.div_(self.norms().clamp_(min=1e-300).index_select(0, self._owners))

    def become(self, products: Iterable[tuple[Tensor, Tensor, Tensor, float]], reduction: Reduction) -> None:
        """The sums over the ranks of weight * matrix @ vector, for each (matrix, vector, part to add it to, weight)."""
        self._all.zero_()
        for matrix, vector, part, weight in products:
            if matrix.device == part.device:
                part.addmv_(matrix, vector, alpha=weight)
            else:
                part.add_((matrix @ vector.to(matrix.device)).to(part.device), alpha=weight)
        total = reduction(self._all)
        if total is not self._all:
            self._all.copy_(total)
