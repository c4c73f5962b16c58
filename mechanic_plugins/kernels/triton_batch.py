"""Launches the GPU kernels over lists of tensors: a handful of launches, however long the list.

`TritonBatch` is such a list. What does not change between steps stays on the device. The addresses of weights and
gradients are read in every step (gradients move when they are set to None, FSDP may swap a weight's tensor) and copied
to the device only when one of them has changed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.param_state import IndexRange, ParamState, delta_dtype, needs_reference
from mechanic_plugins.core.tuner_state import gradient_count, sums_of
from mechanic_plugins.kernels.table import COLUMNS, POINTERS, Table
from mechanic_plugins.kernels.triton_support import ALIGNED, is_capturing, kind_of, lies_like, processors, triton_type

__all__ = ["BaseState", "TritonBatch"]

SUM_BLOCK, SUM_WARPS, SUM_PROGRAMS = 4096, 8, 4
MOVE_BLOCK, MOVE_WARPS, MOVE_PROGRAMS = 512, 4, 8
FUSED_PROGRAMS = 40
"""Elements a block, warps a program, and programs on each of the GPU's processors: what was fastest on an H200."""
_COLLECT_BLOCK = 1024


class BaseState(NamedTuple):
    """What the base keeps for a parameter; None where it has no such thing."""

    moment1: Tensor | None = None
    moment2: Tensor | None = None
    step: Tensor | None = None


class TritonBatch:
    """Slots of one kind, all of them with a delta, that lie in memory as rows: a pass over them is one launch.

    `point` comes first in every step. A move leaves <x, x>, <d, x> and <d, d> of what it wrote, so that the next sums
    need not read the weights.
    """

    def __init__(
        self,
        param_states: Sequence[ParamState],
        *,
        extras: Sequence[BaseState] | None = None,
        table: Table | None = None,
    ) -> None:
        self.device, self.xtype, self.gtype, self._is_even = kind_of(param_states[0])
        self.dtype = delta_dtype(self.xtype)
        self.acc = torch.float64 if self.xtype == torch.float64 else torch.float32
        self.numels = tuple(param_state.x.numel() for param_state in param_states)
        self.sizes = [param_state.x.numel() * param_state.x.element_size() for param_state in param_states]
        self.table = Table(self.device, self.numels) if table is None else table
        self.places = [0, *accumulate(-(-numel // ALIGNED) * ALIGNED for numel in self.numels)]
        self.is_aligned = False
        self.gradients = 0
        self._index = param_states[0].x.get_device()
        self._strides = [param_state.x.stride() for param_state in param_states]
        self._numels = list(self.numels)
        self._rows: list[int] = []
        extras = extras or [BaseState()] * len(param_states)
        for param_state, place, extra in zip(param_states, self.places, extras, strict=False):
            pointers = (0 if t is None else t.data_ptr() for t in (param_state.delta, param_state.ref, *extra))
            self._rows += (0, 0, *pointers, place, param_state.x.numel())
        self._bits = _ored(self._rows)
        self._versions: list[int] = []
        self._left: list[int] | None = None
        """The weights' versions after our last move: as long as they are the same, the norms it left are right."""
        self._norms: dict[tuple[IndexRange, ...], tuple[Tensor, dict[IndexRange, Tensor]]] = {}
        self._last_norms: Tensor | None = None
        self.targets: dict[IndexRange, Tensor] = {}

    def refresh_pointers(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Reads the addresses of weights and gradients; False where one is not like it was.

        The host does this before every step, for every tensor: whole lists at a time, which python does faster than a
        loop with all of it inside.
        """
        present = [grad for grad in grads if grad is not None]
        if not (self._are_as_before(xs) and self._fit(present, grads, xs)):
            return False
        rows = list(self._rows)
        rows[::COLUMNS] = addresses = [x.data_ptr() for x in xs]
        rows[1::COLUMNS] = of_grads = [0 if grad is None else grad.data_ptr() for grad in grads]
        if addresses != self._rows[::COLUMNS]:
            self._left = None
        self._rows = rows
        self._versions = [x._version for x in xs]
        self.gradients = len(present)
        bits = functools.reduce(operator.or_, of_grads, functools.reduce(operator.or_, addresses, self._bits))
        self.is_aligned = self._is_even and bits % 16 == 0
        self.table.point_to(rows)
        return True

    def _are_as_before(self, xs: Sequence[Tensor]) -> bool:
        return (
            [x.stride() for x in xs] == self._strides
            and [x.numel() for x in xs] == self._numels
            and {x.dtype for x in xs} == {self.xtype}
            and {x.get_device() for x in xs} == {self._index}
        )

    def _fit(self, present: Sequence[Tensor], grads: Sequence[Tensor | None], xs: Sequence[Tensor]) -> bool:
        """Whether each gradient lies in memory as its weights do."""
        if not present:
            return True
        if {grad.layout for grad in present} != {torch.strided} or {grad.dtype for grad in present} != {self.gtype}:
            return False
        if len(present) == len(xs) and [grad.stride() for grad in present] == self._strides:
            return True
        return all(grad is None or lies_like(grad, x) for grad, x in zip(grads, xs, strict=True))

    @property
    def pointers(self) -> Tensor:
        assert self.table.pointers is not None
        return self.table.pointers

    def add_sums(
        self,
        xs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        out: Tensor,
        *,
        tuner_index: int,
        weight: float,
        maximize: bool,
    ) -> None:
        """Adds this list's share to a tuner's five sums, and its gradients to the count at the end."""
        here = out if out.device == self.device else torch.zeros_like(out, device=self.device)
        known = self._left == self._versions and not is_capturing(self.device)
        partial = self._partial_sums(norms=not known)
        norms = self._last_norms if known else None
        _kernels().collect_kernel[(1,)](
            partial,
            len(partial),
            partial if norms is None else norms,
            0 if norms is None else len(norms),
            self.table.constant((weight, float(self.gradients))),
            sums_of(here, tuner_index),
            gradient_count(here),
            NORMS_APART=norms is not None,
            MAXIMIZE=maximize,
            SIZE=_COLLECT_BLOCK,
            num_warps=4,
        )
        if here is not out:
            out += here.to(out.device, non_blocking=True)

    def _partial_sums(self, *, norms: bool) -> Tensor:
        """Five partial sums for each program; without `norms`, x is not read and the last three are left out."""
        tiles = self.table.tiled(SUM_BLOCK)
        programs = min(tiles.starts[-1], SUM_PROGRAMS * processors(self.device))
        out = torch.empty(programs, 5, dtype=self.acc, device=self.device)
        if programs:
            _kernels().sums_kernel[(programs,)](
                self.pointers,
                tiles.blocks,
                tiles.firsts,
                out,
                tiles.starts[-1],
                **self.types("xtype", "gtype", "dtype", "acc"),
                NORMS=norms,
                ALIGNED=self.is_aligned,
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
            _kernels().snapshot_kernel[(min(last - first, SUM_PROGRAMS * processors(self.device)),)](
                self.pointers,
                tiles.blocks,
                tiles.firsts,
                first,
                last,
                flat,
                place,
                **self.types("xtype"),
                ALIGNED=self.is_aligned,
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
        self._follow(part, xs)
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
                APART=apart,
                ALIGNED=self.is_aligned,
                SIZE=MOVE_BLOCK,
                num_warps=MOVE_WARPS,
            )
            torch.autograd.graph.increment_version(xs)

    def _follow(self, part: IndexRange, xs: Sequence[Tensor]) -> None:
        """A base may put new tensors in its parameters' place instead of writing into them."""
        here = slice(part.first * COLUMNS, part.last * COLUMNS, COLUMNS)
        addresses = [x.data_ptr() for x in xs]
        if addresses != self._rows[here]:
            self._rows = list(self._rows)
            self._rows[here] = addresses
            self.is_aligned = self.is_aligned and functools.reduce(operator.or_, addresses) % 16 == 0
            self.table.point_to(self._rows)

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
        """All parts have moved: the norms that they left hold as long as nobody writes into the weights."""
        self._left = [x._version for x in xs]

    def forget_norms(self) -> None:
        """Has the next sums read the weights."""
        self._left = None

    def types(self, *names: str) -> dict[str, Any]:
        """Triton's names of the dtypes that the kernels ask for."""
        return {name: triton_type(getattr(self, name)) for name in names}


def _ored(rows: Sequence[int]) -> int:
    """All pointers to vectors in one number: what its last bits say holds for each."""
    bits = 0
    for column in range(POINTERS):
        bits |= functools.reduce(operator.or_, rows[column::COLUMNS], 0)
    return bits


def _kernels() -> Any:
    """Imported in the first launch: whoever has no GPU never loads Triton."""
    from mechanic_plugins.kernels import triton_passes

    return triton_passes
