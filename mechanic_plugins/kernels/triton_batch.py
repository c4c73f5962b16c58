"""Launches the GPU kernels over lists of tensors: a handful of launches for any number of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.kernels.addresses import Addresses, Kept
from mechanic_plugins.kernels.cuda import on
from mechanic_plugins.kernels.table import Table, Tiles, places_of
from mechanic_plugins.kernels.triton_support import is_16_bit, kind_of, processors, triton_type
from mechanic_plugins.rule.sums import WIDTH

__all__ = ["ADAM", "ADAMW", "LION", "SGD", "TritonBatch", "Update"]

ADAM, ADAMW, SGD, LION = range(4)
_SUM_BLOCK, _SUM_WARPS, _SUM_PROGRAMS = 4096, 8, 4
_MOVE_BLOCK, _MOVE_WARPS, _MOVE_PROGRAMS = 512, 4, 128
"""Elements per block, warps per program, and programs per multiprocessor: the fastest on an H200."""
_COLLECT_BLOCK, _STEPS_BLOCK = 1024, 128


class Update(NamedTuple):
    """A base's update, as the kernel takes it from a param group: which one it is, and its constants."""

    kind: int
    """`ADAM`, `ADAMW`, `SGD` or `LION`."""
    weight_decay: float = 0.0
    a: float = 0.0
    """The first beta, or SGD's momentum."""
    b: float = 0.0
    """The second beta."""
    c: float = 0.0
    """Adam's eps."""
    nesterov: bool = False
    maximize: bool = False


class TritonBatch:
    """Tensors of one kind that are dense in memory.

    Call `addresses.refresh` first in every step. What does not change between steps stays on the device. A `row` is
    one of the table that `mechanic_plugins.kernels.gpu_tuner.launch` returns, on this device.
    """

    def __init__(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], kept: Sequence[Kept], *, summed: bool = False
    ) -> None:
        """`summed`: Delta is kept, as the published rules need, rather than the reference."""
        self.device, self.xtype, self.gtype, _ = kind_of(xs[0], grads[0])
        first = kept[0]
        self.ktype, self.mtype = first.kept.dtype, self.xtype if first.moment1 is None else first.moment1.dtype
        self.acc = torch.float64 if self.xtype == torch.float64 else torch.float32
        self.is_summed, self.is_low = summed, is_16_bit(self.xtype) and first.other is not None
        self.is_dithered = summed and self.ktype == torch.bfloat16
        numels = tuple(x.numel() for x in xs)
        self.places = places_of(numels)
        """Where each tensor begins in a copy of all weights, in elements, and where the copy ends."""
        self.snapshot_bytes = [xs[0].element_size() * (end - start) for start, end in pairwise(self.places)]
        """How much of a snapshot each tensor takes."""
        self.table = Table(self.device, numels)
        self.addresses = Addresses(xs, grads, kept, self.table)

    # ---------------------------------------------------------------- the sums

    def add_sums(
        self, out: Tensor, *, tuner_index: int, weight: float, maximize: bool, penalty: float, decay: bool = False
    ) -> None:
        """Adds these tensors' contribution to a tuner's sums, and the number of gradients to the count at the end.

        `decay`: <d, x> and <x, x> are needed.
        """
        here = out if out.device == self.device else torch.zeros_like(out, device=self.device)
        partial = self._partial_sums(with_dx=decay or penalty != 0, with_xx=decay)
        with on(self.device):
            _passes().collect_kernel[(1,)](
                partial,
                len(partial),
                self.table.constant((weight, float(self.addresses.gradients), penalty)),
                here[WIDTH * tuner_index :],
                here[-1:],
                MAXIMIZE=maximize,
                DECAY=decay,
                SIZE=_COLLECT_BLOCK,
                num_warps=4,
            )
        if here is not out:
            out += here.to(out.device, non_blocking=True)

    def _partial_sums(self, *, with_dx: bool, with_xx: bool) -> Tensor:
        """Five partial sums per program."""
        tiles = self.table.tiled(_SUM_BLOCK)
        programs = min(tiles.count, _SUM_PROGRAMS * processors(self.device))
        out = torch.empty(programs, 5, dtype=self.acc, device=self.device)
        if programs:
            with on(self.device):
                _passes().sums_kernel[(programs,)](
                    self.table.pointers,
                    self.table.gradients,
                    tiles.blocks,
                    tiles.firsts,
                    out,
                    tiles.count,
                    **self._types("xtype", "gtype", "ktype", "acc"),
                    SUMMED=self.is_summed,
                    LOW=self.is_low and not self.is_summed,
                    DX=with_dx,
                    XX=with_xx,
                    ALIGNED=self.addresses.are_aligned,
                    SIZE=_SUM_BLOCK,
                    num_warps=_SUM_WARPS,
                )
        return out

    # ---------------------------------------------------------------- the base's update and the move in one

    def step(self, update: Update, row: Tensor, lr: Tensor) -> None:
        """The base's update at the scale, or with Delta, the update and the move. Nothing, if the step is not made.

        `lr` is the param group's, as a float64 tensor on the device.
        """
        from mechanic_plugins.kernels.triton_fused import fused_kernel

        tiles = self.table.tiled(_MOVE_BLOCK)
        if not tiles.count:
            return
        corrections = self._corrections(update, row) if update.kind in (ADAM, ADAMW) else row
        with on(self.device):
            fused_kernel[self._grid(tiles.count)](
                self.table.pointers,
                self.table.gradients,
                tiles.blocks,
                tiles.firsts,
                tiles.count,
                row,
                corrections,
                lr,
                update.weight_decay,
                update.a,
                update.b,
                update.c,
                KIND=update.kind,
                MOMENTUM=update.a != 0,
                NESTEROV=update.nesterov,
                MAXIMIZE=update.maximize,
                **self._types("xtype", "gtype", "ktype", "mtype"),
                SUMMED=self.is_summed,
                LOW=self.is_low,
                DITHERED=self.is_dithered,
                ALIGNED=self.addresses.are_aligned,
                SIZE=_MOVE_BLOCK,
                num_warps=_MOVE_WARPS,
            )

    def _corrections(self, update: Update, row: Tensor) -> Tensor:
        """Increments Adam's step counts and computes its bias corrections."""
        from mechanic_plugins.kernels.triton_fused import adam_steps_kernel

        count = len(self.table.numels)
        corrections = torch.empty(count, 2, device=self.device)
        logs = self.table.constant(tuple(math.log(beta) if beta > 0 else -math.inf for beta in (update.a, update.b)))
        with on(self.device):
            adam_steps_kernel[(-(-count // _STEPS_BLOCK),)](
                self.table.pointers, self.table.gradients, count, row, logs, corrections,
                SIZE=_STEPS_BLOCK, num_warps=4,
            )  # fmt: skip
        return corrections

    # ---------------------------------------------------------------- the move around a base's own step

    def snapshot(self, first: int, last: int) -> Tensor:
        """A flat copy of the weights from tensor `first` to `last`, exclusive."""
        from mechanic_plugins.kernels.triton_move import snapshot_kernel

        start, tiles = self.places[first], self.table.tiled(_MOVE_BLOCK)
        copy = torch.empty(self.places[last] - start, dtype=self.xtype, device=self.device)
        self._launch_on(snapshot_kernel, tiles, first, last, copy, start, **self._types("xtype"))
        return copy

    def move(self, first: int, last: int, snapshot: Tensor, row: Tensor, *, shrink: float = 1.0) -> None:
        """Moves weights and Delta, after the base has stepped the weights. Nothing, if the step is not made.

        Not for 16-bit weights: their rounding would hide the base's update. That update is multiplied by `shrink`.
        """
        from mechanic_plugins.kernels.triton_move import move_kernel

        assert self.is_summed
        assert not self.is_low
        start, tiles = self.places[first], self.table.tiled(_MOVE_BLOCK)
        types = self._types("xtype", "ktype", "acc")
        self._launch_on(
            move_kernel, tiles, first, last, snapshot, start, row, shrink, **types, DITHERED=self.is_dithered
        )

    def restore(self, xs: Sequence[Tensor], first: int, last: int, snapshot: Tensor) -> None:
        """Puts the weights back."""
        for x, place in zip(xs[first:last], self.places[first:last], strict=True):
            x.detach().copy_(snapshot.as_strided(x.shape, x.stride(), place - self.places[first]))

    def _launch_on(self, kernel: Any, tiles: Tiles, first: int, last: int, *given: Any, **options: Any) -> None:
        """Launches a kernel on the blocks of some of the tensors."""
        first_block, last_block = tiles.starts[first], tiles.starts[last]
        if last_block > first_block:
            with on(self.device):
                kernel[self._grid(last_block - first_block)](
                    self.table.pointers, tiles.blocks, tiles.firsts, first_block, last_block, *given,
                    **options, ALIGNED=self.addresses.are_aligned, SIZE=_MOVE_BLOCK, num_warps=_MOVE_WARPS,
                )  # fmt: skip

    def _grid(self, blocks: int) -> tuple[int]:
        return (min(blocks, _MOVE_PROGRAMS * processors(self.device)),)

    def _types(self, *names: str) -> dict[str, Any]:
        """The dtypes that kernels are compiled for."""
        return {name: triton_type(getattr(self, name)) for name in names}


def _passes() -> Any:
    from mechanic_plugins.kernels import triton_passes

    return triton_passes
