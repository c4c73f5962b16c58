"""Where the parts of whole parameters lie in this rank's tensors.

The default rule measures each layer's matrix as a whole, whatever the ranks hold of it. A shard of any kind is a few
blocks of the matrix: a row shard or a column shard is one, a range of the flattened matrix is up to three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mechanic_plugins.distributed.sharding import fsdp1_handles, is_dtensor, local

__all__ = ["Block", "Layout", "as_matrix", "blocks_of_range", "layout_of"]


class Block(NamedTuple):
    """A block of a whole parameter, seen as a matrix, in one of this rank's tensors."""

    whole: int
    """Which whole parameter: an index that is the same on every rank."""
    at: int
    """Where the block begins in the flattened tensor; its numbers lie there row by row."""
    row: int
    column: int
    """Where it begins in the matrix."""
    height: int
    width: int


class Layout(NamedTuple):
    """How the tensors that an optimizer steps are made of whole parameters."""

    shapes: list[tuple[int, int]]
    """Each whole parameter as a matrix: see `as_matrix`. The same on every rank."""
    owners: list[int]
    """For each whole parameter, the index of the optimizer's tensor that holds it. The same on every rank."""
    blocks: list[list[Block]]
    """What this rank holds in each of the optimizer's tensors, in their order."""


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The first dimension by all others; a vector has one column."""
    height = int(shape[0]) if len(shape) else 1
    width = 1
    for size in shape[1:]:
        width *= int(size)
    return height, width


def blocks_of_range(whole: int, width: int, first: int, count: int, at: int) -> list[Block]:
    """The blocks of a range of a flattened matrix of this width: its `count` numbers from `first`, kept from `at`."""
    blocks, end = [], first + count
    while first < end:
        row, column = divmod(first, width)
        if column or end - first < width:  # the rest of a row
            here = min(width - column, end - first)
            blocks.append(Block(whole, at, row, column, 1, here))
        else:
            here = (end - first) // width * width
            blocks.append(Block(whole, at, row, 0, here // width, width))
        first, at = first + here, at + here
    return blocks


def layout_of(params: Sequence[Tensor]) -> Layout:
    """The layout of an optimizer's parameters: plain ones, DTensors, FSDP1's.

    Args:
        params: All parameters of the optimizer, in the same order on every rank. FSDP1 finds the parts of a flattened
            one by its live handle, so between steps only: in a forward pass its tensors are whole.

    Raises:
        RuntimeError: The parts of a parameter cannot be told from its placements.
    """
    flattened = {id(p) for p in params if getattr(p, "_fsdp_flattened", False)}
    fsdp1 = _fsdp1_parts(flattened) if flattened else {}
    layout = Layout([], [], [])
    for owner, p in enumerate(params):
        known = fsdp1.get(id(p))
        parts = known if known is not None else [_dtensor_part(p) if is_dtensor(p) else _plain_part(p)]
        held = []
        for shape, blocks in parts:
            held += [block._replace(whole=len(layout.shapes)) for block in blocks]
            layout.shapes.append(shape)
            layout.owners.append(owner)
        layout.blocks.append(held)
    return layout


_Part = tuple[tuple[int, int], list[Block]]
"""A whole parameter's shape as a matrix, and this rank's blocks of it, which do not know its number yet."""


def _plain_part(p: Tensor) -> _Part:
    shape = as_matrix(p.shape)
    return shape, blocks_of_range(0, shape[1], 0, p.numel(), 0)


def _dtensor_part(p: Any) -> _Part:
    """A shard is a range in each of the dimensions. If none after the second is cut, that is one block."""
    shape = as_matrix(p.shape)
    ranges = [_range_of(p, dim) for dim in range(p.ndim)]
    counts = [count for _, count in ranges]
    if tuple(counts) != tuple(local(p).shape):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} with placements {p.placements} should have {tuple(counts)} of it "
            f"on this rank, but has {tuple(local(p).shape)}."
        )
    if not math.prod(counts):
        return shape, []
    cut = max((dim for dim, count in enumerate(counts) if count < p.shape[dim]), default=0)
    outer, inner = ranges[1:cut], math.prod(counts[max(cut, 1) :])
    strides = [math.prod(p.shape[dim + 1 :]) for dim in range(p.ndim)]
    last = ranges[cut][0] * strides[cut] if cut else 0
    top, height = ranges[0] if ranges else (0, 1)
    if not outer:
        return shape, [Block(0, 0, top, last, height, inner)]
    blocks: list[Block] = []
    for row, *index in itertools.product(*(range(first, first + count) for first, count in ranges[:cut])):
        column = last + sum(i * stride for i, stride in zip(index, strides[1:], strict=False))
        blocks.append(Block(0, len(blocks) * inner, row, column, 1, inner))
    return shape, blocks


def _range_of(p: Any, dim: int) -> tuple[int, int]:
    """The first index and the number of indices of a dimension on this rank.

    FSDP2 shards what tensor parallelism has sharded, but has the outer mesh dimension. Its placement is then a
    `_StridedShard`, which takes its turn after the others.
    """
    first, count = 0, p.shape[dim]
    here = [(i, placement) for i, placement in enumerate(p.placements) if getattr(placement, "dim", None) == dim]
    plain = [i for i, placement in here if not hasattr(placement, "split_factor")]
    strided = [(i, placement) for i, placement in here if hasattr(placement, "split_factor")]
    for i, placement in strided:
        if placement.split_factor != math.prod(p.device_mesh.size(j) for j, _ in here if j > i):
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has placements {p.placements}, where {placement} is not what "
                "FSDP2 makes of a tensor-parallel parameter: Mechanic does not know its layout."
            )
    for i in [*plain, *(i for i, _ in reversed(strided))]:
        size = -(-count // p.device_mesh.size(i))  # as torch.chunk does
        skipped = min(size * p.device_mesh.get_local_rank(i), count)
        first, count = first + skipped, min(size, count - skipped)
    return first, count


def _fsdp1_parts(ids: set[int]) -> dict[int, list[_Part]]:
    """The parts by id of the parameter: all of a flat parameter, or one each with `use_orig_params=True`."""
    parts: dict[int, list[_Part]] = {}
    for handle, _ in fsdp1_handles(ids):
        flat = handle.flat_param
        shapes = [_flattened(shape, stride) for shape, stride in zip(flat._shapes, flat._strides, strict=True)]
        for index, (shape, info) in enumerate(zip(shapes, flat._shard_param_infos, strict=True)):
            first, count = info.intra_param_start_idx or 0, info.numel_in_shard or 0
            if id(flat) in ids:
                blocks = blocks_of_range(0, shape[1], first, count, info.offset_in_shard or 0)
                parts.setdefault(id(flat), []).append((shape, blocks))
            elif handle.uses_sharded_strategy:
                parts[id(flat._params[index])] = [(shape, blocks_of_range(0, shape[1], first, count, 0))]
    return parts


def _flattened(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """The matrix whose rows FSDP1 laid out, which takes the numbers of a parameter in the order of its memory.

    With channels_last a row has them in another order, and a transposed matrix is laid out by columns: the norms are
    the same.
    """
    height, width = as_matrix(shape)
    is_by_columns = height > 1 and width > 1 and strides[0] == 1
    return (width, height) if is_by_columns else (height, width)
