"""Launches the GPU kernels over lists of tensors: a handful of launches, however long the list.

The pointers are read anew in every step (gradients move when they are set to None, FSDP may put another tensor in
place) and copied to the device only when one of them has changed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.settings import Settings
from mechanic_plugins.slots import Slot, delta_dtype, needs_reference
from mechanic_plugins.tuner import AUTO_FRACTION, TunerState

__all__ = ["Extra", "Table", "Workspace", "advance", "can_run", "fits", "is_plain", "is_row", "move", "point", "sums"]

SUM_BLOCK, SUM_WARPS, SUM_PROGRAMS = 4096, 8, 4
MOVE_BLOCK, MOVE_WARPS, MOVE_PROGRAMS = 512, 4, 12
"""Elements a block, warps a program, and programs on each of the GPU's processors."""
_COLLECT_BLOCK = 256
_KEPT_TABLES = 32


def is_interpreted() -> bool:
    """Triton's interpreter runs the kernels on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether the package is installed, without loading it."""
    return importlib.util.find_spec("triton") is not None


def can_run(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return has_triton() and (device.type == "cuda" or is_interpreted())


def fits(slot: Slot) -> bool:
    """Whether a slot's tensors lie in memory one after the other, so that kernels may walk them as one row."""
    return slot.delta is not None and slot.x.is_floating_point() and is_row(slot.x)


def is_plain(slot: Slot) -> bool:
    """Whether weights and gradient lie in memory alike, one after the other."""
    return is_row(slot.x) and (slot.grad is None or slot.grad.stride() == slot.x.stride())


def is_row(x: Tensor) -> bool:
    """Dense, in an order that `zeros_like` keeps."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


@dataclass(frozen=True)
class Extra:
    """What the base keeps for a parameter; None where it has no such thing."""

    moment1: Tensor | None = None
    moment2: Tensor | None = None
    step: Tensor | None = None


@dataclass(frozen=True)
class Tiles:
    """How a list of tensors is cut into blocks of one size."""

    blocks: Tensor
    firsts: Tensor
    count: int


@dataclass
class Table:
    """The pointers of one list of tensors, on the device."""

    device: torch.device
    numels: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    pointers: Tensor | None = None
    is_aligned: bool = False
    tiles: dict[int, Tiles] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    """Host memory that a captured graph will read again at each replay."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[tuple[float, ...], Tensor] = field(default_factory=dict)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 memory that stays, with what the last launch left in it: a skipped step writes nothing."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.buffers[name]

    def constant(self, numbers: tuple[float, ...]) -> Tensor:
        """Float64 numbers on the device, copied there once."""
        if numbers not in self.constants:
            if len(self.constants) > _KEPT_TABLES:
                self.constants.clear()
            self.constants[numbers] = self._on_device(torch.tensor(numbers, dtype=torch.float64))
        return self.constants[numbers]

    def tiled(self, size: int) -> Tiles:
        if size not in self.tiles:
            counts = torch.tensor([-(-numel // size) for numel in self.numels], dtype=torch.int64)
            index = torch.arange(len(counts), dtype=torch.int32)
            blocks, firsts = index.repeat_interleave(counts), counts.cumsum(0) - counts
            self.tiles[size] = Tiles(self._on_device(blocks), self._on_device(firsts), int(counts.sum()))
        return self.tiles[size]

    def point_to(self, rows: list[int], *, bits: int) -> Tensor:
        """The table for these rows; `bits` is all their pointers ored."""
        if self.pointers is None or rows != self.rows:
            self.pointers = self._on_device(torch.tensor(rows, dtype=torch.int64))
            self.rows, self.is_aligned = rows, bits % 16 == 0
        return self.pointers

    def _on_device(self, host: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return host
        pinned = host.pin_memory()  # torch keeps pinned memory until the copy has read it
        if torch.cuda.is_current_stream_capturing():
            self.held.append(pinned)
        return pinned.to(self.device, non_blocking=True)


class Workspace:
    """The tables of the lists seen lately. Holds nothing that matters: it may be thrown away at any time."""

    def __init__(self) -> None:
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()

    def table(self, key: Hashable, slots: Sequence[Slot]) -> Table:
        numels = tuple(slot.x.numel() for slot in slots)
        full_key = (key, numels)
        if full_key not in self._tables:
            self._tables[full_key] = Table(slots[0].x.device, numels)
            if len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(full_key)
        return self._tables[full_key]


def point(
    table: Table,
    slots: Sequence[Slot],
    *,
    olds: Sequence[Tensor] | None = None,
    extras: Sequence[Extra] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The table of pointers, and what must stay alive until the launch: gradients copied into their weights' layout."""
    rows: list[int] = []
    alive: list[Tensor] = []
    bits = 0
    for index, slot in enumerate(slots):
        grad = slot.grad
        if grad is not None and grad.stride() != slot.x.stride() and grad.numel() > 1:
            grad = torch.empty_like(slot.x, dtype=grad.dtype).copy_(grad)
            alive.append(grad)
        extra = extras[index] if extras is not None else _NOTHING
        old = olds[index] if olds is not None else None
        tensors = (slot.x, grad, slot.delta, slot.ref, extra.moment1, extra.moment2, extra.step)
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        before = 0 if old is None else old.data_ptr()
        for pointer in pointers[:6]:
            bits |= pointer
        bits |= before
        rows += (*pointers, before, slot.x.numel())
    return table.point_to(rows, bits=bits), alive


_NOTHING = Extra()


def kind_of(slot: Slot) -> tuple[Any, ...]:
    """Slots of one kind share a launch."""
    grad = slot.grad.dtype if slot.grad is not None else slot.x.dtype
    return slot.x.device, slot.x.dtype, grad


def sums(slots: Sequence[Slot], workspace: Workspace) -> Tensor:
    """The five sums over slots of one kind, in float64."""
    table = workspace.table(("sums", *kind_of(slots[0])), slots)
    pointers, _alive = point(table, slots)
    out = torch.zeros(6, dtype=torch.float64, device=slots[0].x.device)
    partial = partial_sums(table, pointers, kind_of(slots[0]), norms=True)
    collect(out[:5], out[5:], partial, None, constants=table.constant((1.0, 0.0)), maximize=False)
    return out[:5]


def partial_sums(table: Table, pointers: Tensor, kind: tuple[Any, ...], *, norms: bool) -> Tensor:
    """Five partial sums for each program; without `norms`, x is not read and the last three are left out."""
    from mechanic_plugins import triton_kernels as kernels

    device, xtype, gtype = kind
    tiles = table.tiled(SUM_BLOCK)
    programs = min(tiles.count, SUM_PROGRAMS * _processors(device))
    acc = torch.float64 if xtype == torch.float64 else torch.float32
    out = torch.empty(programs, 5, dtype=acc, device=device)
    if programs:
        kernels.sums_kernel[(programs,)](
            pointers,
            tiles.blocks,
            tiles.firsts,
            out,
            tiles.count,
            xtype=triton_type(xtype),
            gtype=triton_type(gtype),
            dtype=triton_type(delta_dtype(xtype)),
            acc=triton_type(acc),
            NORMS=norms,
            ALIGNED=table.is_aligned,
            SIZE=SUM_BLOCK,
            num_warps=SUM_WARPS,
        )
    return out


def collect(
    out: Tensor,
    count: Tensor,
    partial: Tensor,
    norms: Tensor | None,
    *,
    constants: Tensor,
    maximize: bool,
) -> None:
    """Adds partial sums to five of a tuner's, the last three from `norms` where they are known.

    `constants` holds the weight they are counted with, and how many gradients to add to `count`.
    """
    from mechanic_plugins import triton_kernels as kernels

    kernels.collect_kernel[(1,)](
        partial,
        len(partial),
        partial if norms is None else norms,
        0 if norms is None else len(norms),
        constants,
        out,
        count,
        NORMS_APART=norms is not None,
        MAXIMIZE=maximize,
        SIZE=_COLLECT_BLOCK,
        num_warps=4,
    )


def move(slots: Sequence[Slot], olds: Sequence[Tensor], scales: Tensor, workspace: Workspace) -> None:
    """From the base's weights to Mechanic's, for slots of one kind."""
    from mechanic_plugins import triton_kernels as kernels

    x = slots[0].x
    table = workspace.table(("move", *kind_of(slots[0])[:2]), slots)
    tiles = table.tiled(MOVE_BLOCK)
    pointers, _alive = point(table, [slot._replace(grad=None) for slot in slots], olds=olds)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    programs = move_programs(tiles, x.device)
    if programs:
        kernels.move_kernel[(programs,)](
            pointers,
            tiles.blocks,
            tiles.firsts,
            tiles.count,
            scales,
            xtype=triton_type(x.dtype),
            dtype=triton_type(delta_dtype(x.dtype)),
            acc=triton_type(acc),
            LOW=needs_reference(x.dtype),
            ALIGNED=table.is_aligned,
            SIZE=MOVE_BLOCK,
            num_warps=MOVE_WARPS,
        )
        torch.autograd.graph.increment_version([slot.x for slot in slots])


def move_programs(tiles: Tiles, device: torch.device) -> int:
    """How many programs share the blocks of a move."""
    return min(tiles.count, MOVE_PROGRAMS * _processors(device))


_RULES = ("paper", "experiments", "optax", "theory")


def advance(
    state: TunerState,
    sums: Tensor,
    counters: Tensor,
    *,
    settings: Settings,
    betas: Tensor,
    constants: Tensor,
    hold: bool,
    in_place: bool,
) -> tuple[TunerState, Tensor, Tensor]:
    """`tuner.advance` in one launch, with the decision whether the step is made.

    Args:
        state: The tuner before the step.
        sums: Five for each tuner, and the number of gradients.
        counters: Steps made, and steps skipped.
        settings: The constants, in the units of delta.
        betas: `settings.betas` on the device.
        constants: What `tuner_constants` says, on the device.
        hold: Leave the tuner as it is.
        in_place: Write over the state and the counters: what a captured graph needs, which reads them where they were.

    Returns:
        The next state, the next counters, and for each tuner the scale before and after and whether the step is made.
    """
    from mechanic_plugins import triton_kernels as kernels

    tuners, n = state.s.shape
    width = 6 * n + 3
    old = packed(state)
    out = torch.empty(tuners * (width + 3) + 2, dtype=torch.float64, device=sums.device)
    new, scales, new_counters = torch.split(out, [tuners * width, tuners * 3, 2])
    kernels.tuner_kernel[(tuners,)](
        sums,
        old,
        new,
        betas,
        constants,
        counters,
        new_counters,
        scales,
        tuners,
        RULE=_RULES.index(settings.rule),
        AUTO=settings.s_init == "auto",
        SMOOTHING=settings.smoothing != 0,
        CAPPED=settings.max_scale is not None,
        FROZEN=hold,
        NUMBERS=triton_power(tuners * 5 + 1),
        n=n,
        N=triton_power(n),
        num_warps=1,
    )
    after = unpacked(new.view(tuners, width))
    if not in_place:
        return after, new_counters, scales.view(tuners, 3)
    for theirs, ours in zip((*state, counters), (*after, new_counters), strict=True):
        theirs.copy_(ours)
    return state, counters, scales.view(tuners, 3)


def tuner_constants(settings: Settings) -> tuple[float, ...]:
    """s_decay, eps, s_init or its fraction, the cap and the smoothing."""
    s_init = AUTO_FRACTION if settings.s_init == "auto" else settings.s_init
    return settings.s_decay, settings.eps, s_init, settings.max_scale or 0.0, settings.smoothing


def packed(state: TunerState) -> Tensor:
    """One row for each tuner."""
    base = state.s._base
    if base is not None and state.h._base is base and base.dim() == 1 and state.s.stride(0) == 6 * state.s.shape[1] + 3:
        return state.s
    return torch.cat(list(state), dim=1)


def unpacked(table: Tensor) -> TunerState:
    """Views of the rows."""
    n = (table.shape[1] - 3) // 6
    return TunerState(*torch.split(table, [n] * 6 + [1] * 3, dim=1))


def triton_power(number: int) -> int:
    """The next power of two: what Triton can hold."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def triton_type(dtype: torch.dtype) -> Any:
    """Triton's name of a torch dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
