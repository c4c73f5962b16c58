"""Launches the GPU kernels over lists of tensors: a handful of launches, however long the list.

`TritonBatch` is such a list. What does not change between steps stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import IndexRange, ParamState, delta_dtype, needs_reference
from mechanic_plugins.core.tuner_state import gradient_count, sums_of
from mechanic_plugins.kernels.addresses import Addresses, BaseState
from mechanic_plugins.kernels.cuda import is_capturing, on
from mechanic_plugins.kernels.table import Table
from mechanic_plugins.kernels.triton_support import ALIGNED, kind_of, processors, triton_type

__all__ = ["TritonBatch"]

SUM_BLOCK, SUM_WARPS, SUM_PROGRAMS = 4096, 8, 4
MOVE_BLOCK, MOVE_WARPS, MOVE_PROGRAMS = 512, 4, 8
FUSED_PROGRAMS = 128
"""Elements a block, warps a program, and programs on each of the GPU's processors: what was fastest on an H200."""
_COLLECT_BLOCK = 1024


class TritonBatch:
    """Slots of one kind, all of them with a delta, that lie in memory as rows: a pass over them is one launch.

    `refresh_pointers` comes first in every step. A move leaves <x, x>, <d, x> and <d, d> of what it wrote, so that the
    next sums need not read the weights.
    """

    def __init__(
        self,
        param_states: Sequence[ParamState],
        *,
        extras: Sequence[BaseState] | None = None,
        table: Table | None = None,
    ) -> None:
        self.device, self.xtype, self.gtype, _ = kind_of(param_states[0])
        delta = param_states[0].delta
        self.dtype = delta_dtype(self.xtype) if delta is None else delta.dtype
        self.acc = torch.float64 if self.xtype == torch.float64 else torch.float32
        self.numels = tuple(param_state.x.numel() for param_state in param_states)
        self.sizes = [param_state.x.numel() * param_state.x.element_size() for param_state in param_states]
        self.table = Table(self.device, self.numels) if table is None else table
        self.places = [0, *accumulate(-(-numel // ALIGNED) * ALIGNED for numel in self.numels)]
        self.addresses = Addresses(param_states, extras, self.places, self.table)
        self._left: tuple[int, int] | None = None
        """The weights' version after our last move: as long as it is the same, the norms that it left are right."""
        self._norms: dict[tuple[IndexRange, ...], tuple[Tensor, dict[IndexRange, Tensor]]] = {}
        self._last_norms: Tensor | None = None
        self.targets: dict[IndexRange, Tensor] = {}

    def refresh_pointers(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Reads the addresses of weights and gradients; False where one is not like it was."""
        return self.addresses.refresh(xs, grads)

    @property
    def gradients(self) -> int:
        """How many there are in this step."""
        return self.addresses.gradients

    @property
    def pointers(self) -> Tensor:
        assert self.table.pointers is not None
        return self.table.pointers

    @property
    def gradient_pointers(self) -> Tensor:
        assert self.table.gradients is not None
        return self.table.gradients

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

        <d, x> is always there: the last move has left it.
        """
        here = out if out.device == self.device else torch.zeros_like(out, device=self.device)
        known = self._knows_norms()
        partial = self._partial_sums(norms=not known)
        norms = self._last_norms if known else None
        with on(self.device):
            _kernels().collect_kernel[(1,)](
                partial,
                len(partial),
                partial if norms is None else norms,
                0 if norms is None else len(norms),
                self.table.constant((weight, float(self.addresses.gradients), penalty)),
                sums_of(here, tuner_index),
                gradient_count(here),
                NORMS_APART=norms is not None,
                MAXIMIZE=maximize,
                SIZE=_COLLECT_BLOCK,
                num_warps=4,
            )
        if here is not out:
            out += here.to(out.device, non_blocking=True)

    def launch_key(self) -> tuple[Any, ...]:
        """What launches depend on and may differ from step to step."""
        where = self.pointers.data_ptr(), self.gradient_pointers.data_ptr()
        how = self.addresses.are_aligned, self.addresses.gradients
        return *where, *how, self._knows_norms(), id(self._last_norms)

    def _knows_norms(self) -> bool:
        return self._left == self.addresses.version and not is_capturing(self.device)

    def _partial_sums(self, *, norms: bool) -> Tensor:
        """Five partial sums for each program; without `norms`, x is not read and the last three are left out."""
        tiles = self.table.tiled(SUM_BLOCK)
        programs = min(tiles.starts[-1], SUM_PROGRAMS * processors(self.device))
        out = torch.empty(programs, 5, dtype=self.acc, device=self.device)
        if programs:
            with on(self.device):
                _kernels().sums_kernel[(programs,)](
                    self.pointers,
                    self.gradient_pointers,
                    tiles.blocks,
                    tiles.firsts,
                    out,
                    tiles.starts[-1],
                    **self.types("xtype", "gtype", "dtype", "acc"),
                    NORMS=norms,
                    ALIGNED=self.addresses.are_aligned,
                    SIZE=SUM_BLOCK,
                    num_warps=SUM_WARPS,
                )
        return out

    def snapshot(self, part: IndexRange, xs: Sequence[Tensor]) -> Tensor:
        """The weights of a part, end to end."""
        place = self.places[part.first]
        flat = torch.empty(self.places[part.last] - place, dtype=self.xtype, device=self.device)
        tiles = self.table.tiled(SUM_BLOCK)
        first, last = tiles.of(part)
        if last > first:
            with on(self.device):
                _kernels().snapshot_kernel[(min(last - first, SUM_PROGRAMS * processors(self.device)),)](
                    self.pointers,
                    tiles.blocks,
                    tiles.firsts,
                    first,
                    last,
                    flat,
                    place,
                    **self.types("xtype"),
                    ALIGNED=self.addresses.are_aligned,
                    SIZE=SUM_BLOCK,
                    num_warps=SUM_WARPS,
                )
        return flat

    def float_copies(self, part: IndexRange, xs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """A part's weights in float32, and the row in memory that holds them end to end: for `move_to`."""
        first = self.places[part.first]
        flat = torch.empty(self.places[part.last] - first, dtype=torch.float32, device=self.device)
        places = self.places[part.first : part.last]
        copies = [flat.as_strided(x.size(), x.stride(), at - first) for x, at in zip(xs, places, strict=True)]
        torch._foreach_copy_(copies, [x.detach() for x in xs])
        return copies, flat

    def restore(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Tensor) -> None:
        """The weights as they were before the base touched them."""
        for x, place in zip(xs, self.places[part.first : part.last], strict=True):
            x.copy_(snapshot.as_strided(x.size(), x.stride(), place - self.places[part.first]))
        self.forget_norms()

    def move(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Tensor, scales: Tensor) -> None:
        """From the base's weights to Mechanic's; `xs` are where the base has left them."""
        self.addresses.follow(part, xs)  # a base may put new tensors in its parameters' place
        self._launch_move(part, xs, snapshot, scales, apart=False)

    def move_to(
        self, part: IndexRange, xs: Sequence[Tensor], stepped: Sequence[Tensor], row: Tensor | None, scales: Tensor
    ) -> None:
        """The same where the base has stepped the copies in `row` and left the weights `xs` alone."""
        assert row is not None
        for x, new, place in zip(xs, stepped, self.places[part.first : part.last], strict=True):
            mine = row.as_strided(x.size(), x.stride(), place - self.places[part.first])
            if new.data_ptr() != mine.data_ptr():  # the base has put a new tensor in the copy's place
                mine.copy_(new)
        self._launch_move(part, xs, row, scales, apart=True)

    def _launch_move(
        self, part: IndexRange, xs: Sequence[Tensor], snapshot: Tensor, scales: Tensor, *, apart: bool
    ) -> None:
        tiles, norms = self.table.tiled(MOVE_BLOCK), self.targets[part]
        first, last = tiles.of(part)
        if last > first:
            with on(self.device):
                _kernels().move_kernel[(len(norms),)](
                    self.pointers,
                    tiles.blocks,
                    tiles.firsts,
                    first,
                    last,
                    snapshot,
                    self.places[part.first],
                    scales,
                    norms,
                    **self.types("xtype", "dtype", "acc"),
                    LOW=needs_reference(self.xtype),
                    DITHERED=self.dtype == torch.bfloat16,
                    APART=apart,
                    ALIGNED=self.addresses.are_aligned,
                    SIZE=MOVE_BLOCK,
                    num_warps=MOVE_WARPS,
                )
            torch.autograd.graph.increment_version(xs)

    def begin_moves(self, parts: Sequence[IndexRange], *, programs: int = MOVE_PROGRAMS) -> None:
        """The parts whose moves will make up the whole: `targets` says where each of them is to leave its norms."""
        key = tuple(parts)
        if key not in self._norms:
            ranges = map(self.table.tiled(MOVE_BLOCK).of, parts)
            each = [min(last - first, programs * processors(self.device)) for first, last in ranges]
            norms = torch.zeros(sum(each), 3, dtype=self.acc, device=self.device)
            self._norms[key] = norms, dict(zip(parts, torch.split(norms, each), strict=True))
        self._last_norms, self.targets = self._norms[key]
        self._left = None

    def finish_moves(self, xs: Sequence[Tensor]) -> None:
        """All parts have moved: the norms that they left hold until the weights are written to."""
        self._left = self.addresses.version_of(xs)

    def finish_one_move(self, xs: Sequence[Tensor]) -> None:
        """All weights were written once, by a kernel."""
        torch.autograd.graph.increment_version(xs)
        self._left = self.addresses.version_after_writing()

    def forget_norms(self) -> None:
        """Has the next sums read the weights."""
        self._left = None

    def types(self, *names: str) -> dict[str, Any]:
        """Triton's names of the dtypes that the kernels ask for."""
        return {name: triton_type(getattr(self, name)) for name in names}


def _kernels() -> Any:
    """Imported in the first launch: whoever has no GPU never loads Triton."""
    from mechanic_plugins.kernels import triton_passes

    return triton_passes
