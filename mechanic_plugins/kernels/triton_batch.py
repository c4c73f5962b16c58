"""Launches the GPU kernels over lists of tensors: a handful of launches for any number of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import is_16_bit
from mechanic_plugins.core.tuner import SUMS
from mechanic_plugins.kernels.addresses import Addresses, Kept
from mechanic_plugins.kernels.cuda import on
from mechanic_plugins.kernels.table import Table
from mechanic_plugins.kernels.triton_support import kind_of, processors, triton_type

__all__ = ["TritonBatch"]

SUM_BLOCK, SUM_WARPS, SUM_PROGRAMS = 4096, 8, 4
"""Elements per block, warps per program, and programs per multiprocessor: the fastest on an H200."""
_COLLECT_BLOCK = 1024


class TritonBatch:
    """Tensors of one kind that are dense in memory: their sums take two launches.

    Call `addresses.refresh` first in every step. What does not change between steps stays on the device.
    """

    def __init__(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], kept: Sequence[Kept]) -> None:
        self.device, self.xtype, self.gtype, _ = kind_of(xs[0], grads[0])
        self.rtype = kept[0].ref.dtype
        self.acc = torch.float64 if self.xtype == torch.float64 else torch.float32
        self.is_low = is_16_bit(self.xtype) and kept[0].master is not None
        self.table = Table(self.device, tuple(x.numel() for x in xs))
        self.addresses = Addresses(xs, grads, kept, self.table)

    def add_sums(self, out: Tensor, *, tuner_index: int, weight: float, maximize: bool, penalty: float) -> None:
        """Adds these tensors' contribution to a tuner's sums, and the number of gradients to the count at the end."""
        here = out if out.device == self.device else torch.zeros_like(out, device=self.device)
        partial = self._partial_sums(penalty)
        with on(self.device):
            _kernels().collect_kernel[(1,)](
                partial,
                len(partial),
                self.table.constant((weight, float(self.addresses.gradients), penalty)),
                here[len(SUMS) * tuner_index :],
                here[-1:],
                MAXIMIZE=maximize,
                SIZE=_COLLECT_BLOCK,
                num_warps=4,
            )
        if here is not out:
            out += here.to(out.device, non_blocking=True)

    def _partial_sums(self, penalty: float) -> Tensor:
        """Four partial sums per program."""
        tiles = self.table.tiled(SUM_BLOCK)
        programs = min(tiles.count, SUM_PROGRAMS * processors(self.device))
        out = torch.empty(programs, 4, dtype=self.acc, device=self.device)
        if programs:
            with on(self.device):
                _kernels().sums_kernel[(programs,)](
                    self.table.pointers,
                    self.table.gradients,
                    tiles.blocks,
                    tiles.firsts,
                    out,
                    tiles.count,
                    **self.types("xtype", "gtype", "rtype", "acc"),
                    LOW=self.is_low,
                    PENALTY=penalty != 0,
                    ALIGNED=self.addresses.are_aligned,
                    SIZE=SUM_BLOCK,
                    num_warps=SUM_WARPS,
                )
        return out

    def launch_key(self) -> tuple[Any, ...]:
        """What the launches depend on that may change between steps."""
        where = self.table.pointers.data_ptr(), self.table.gradients.data_ptr()
        return *where, self.addresses.are_aligned, self.addresses.gradients

    def types(self, *names: str) -> dict[str, Any]:
        """The dtypes that kernels are compiled for."""
        return {name: triton_type(getattr(self, name)) for name in names}


def _kernels() -> Any:
    from mechanic_plugins.kernels import triton_passes

    return triton_passes
