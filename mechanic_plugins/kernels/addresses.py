"""Tracks the addresses of a batch's tensors.

Those of weights and gradients are checked in every step: gradients move when they are set to None, and FSDP may replace
a weight's tensor. The table on the device is written only if one has moved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.kernels.table import POINTERS, Table, places_of
from mechanic_plugins.kernels.triton_support import is_even, kind_of, lies_like

__all__ = ["Addresses", "Kept"]

_LOW_BYTES_OF_ALIGNED = bytes(range(0, 256, 16))


class Kept(NamedTuple):
    """What Mechanic and the base keep for a parameter; None where something does not exist."""

    kept: Tensor
    """The reference; with a published rule, Delta."""
    other: Tensor | None = None
    """For 16-bit weights, the float32 master; with a published rule, the 16-bit reference."""
    moment1: Tensor | None = None
    moment2: Tensor | None = None
    step: Tensor | None = None


class Addresses:
    """The addresses of one list of parameters, in a table.

    `are_aligned`: whether kernels may read 16 bytes at once. `gradients`: how many there are in this step.
    """

    def __init__(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], kept: Sequence[Kept], table: Table
    ) -> None:
        _, self._xtype, self._gtype, _ = kind_of(xs[0], grads[0])
        self._are_even = all(map(is_even, xs))
        self._index = xs[0].get_device()
        self._strides = [x.stride() for x in xs]
        self._numels = [x.numel() for x in xs]
        self._table = table
        rows = [
            (0, *(0 if t is None else t.data_ptr() for t in each), place, numel)
            for each, place, numel in zip(kept, places_of(self._numels), self._numels, strict=False)
        ]
        self._rows = torch.tensor(rows)
        self._rows_are_aligned = False
        self._packed = struct.Struct(f"{len(rows)}q").pack
        self._here: tuple[list[int], bytes] = ([], b"")
        """The addresses of weights and gradients that are in the table."""
        self._are_as_before: Callable[..., bool] | None = None
        """Compares the gradients with earlier ones, if every weight has one."""
        self.are_aligned = False
        self.gradients = 0

    def refresh(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Updates the addresses. False if a weight or gradient has another kind than before.

        The host does this for every tensor before every step, so it handles whole lists with as little Python as
        possible. Weights at the same address are unchanged if their gradients are: autograd gives gradients the shape,
        dtype and strides of the weights.
        """
        of_xs = _places(xs)
        xs_moved = of_xs != self._here[0]
        have_stayed = not xs_moved and self._are_as_before is not None and self._are_as_before(*grads)
        if not (have_stayed or self._looked_closely(xs, grads)):
            return False
        are_all_there = self.gradients == len(grads)
        each = _places(grads) if are_all_there else [0 if grad is None else grad.data_ptr() for grad in grads]
        of_grads = self._packed(*each)
        if xs_moved or of_grads != self._here[1] or not self._table.is_up_to_date():
            self._write(of_xs, of_grads, xs_moved=xs_moved)
        return True

    def _looked_closely(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        present = [grad for grad in grads if grad is not None]
        if not (self._are_alike(xs) and self._fit(present, grads, xs)):
            return False
        self.gradients = len(present)
        self._are_as_before = _comparison(present) if len(present) == len(xs) else None
        return True

    def _are_alike(self, xs: Sequence[Tensor]) -> bool:
        return (
            [x.stride() for x in xs] == self._strides
            and [x.numel() for x in xs] == self._numels
            and {x.dtype for x in xs} == {self._xtype}
            and {x.get_device() for x in xs} == {self._index}
        )

    def _fit(self, present: Sequence[Tensor], grads: Sequence[Tensor | None], xs: Sequence[Tensor]) -> bool:
        """Whether each gradient has the memory layout of its weights."""
        if not present:
            return True
        if {grad.layout for grad in present} != {torch.strided} or {grad.dtype for grad in present} != {self._gtype}:
            return False
        if len(present) == len(xs) and [grad.stride() for grad in present] == self._strides:
            return True
        return all(grad is None or lies_like(grad, x) for grad, x in zip(grads, xs, strict=True))

    def _write(self, of_xs: list[int], of_grads: bytes, *, xs_moved: bool) -> None:
        if xs_moved:
            self._rows[:, 0] = torch.tensor(of_xs)
            self._rows_are_aligned = self._are_even and not (self._rows[:, :POINTERS] & 15).any()
        self._here = of_xs, of_grads
        self.are_aligned = self._rows_are_aligned and _are_aligned(of_grads)
        self._table.point_to(self._rows, of_grads, rows_are_new=xs_moved)


def _comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check whether other tensors have the types, dtypes, devices, sizes and strides of these, one by one.

    It is the C++ check that torch.compile makes of a function's arguments. If a later torch lacks it, the answer is
    always no, and `Addresses` checks in detail in every step.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(t.size()) for t in tensors], [list(t.stride()) for t in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    except (ImportError, TypeError):
        return lambda *others: False
    return guards.check


def _are_aligned(addresses: bytes) -> bool:
    """Whether all are multiples of 16. Assumes a little-endian host."""
    return not addresses[::8].translate(None, _LOW_BYTES_OF_ALIGNED)


def _places(tensors: Any) -> list[int]:
    """The addresses of tensors, none of which is None."""
    return list(map(Tensor.data_ptr, tensors))
