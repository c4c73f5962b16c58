"""The table of pointers that the kernels read, and how its tensors are cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.kernels.cuda import is_capturing

__all__ = ["POINTERS", "Table", "Tiles", "places_of"]

POINTERS = 5
"""The number of leading columns that point to vectors."""
_KEPT_CONSTANTS = 32
_SENT_AT_ONCE = 64 * 1024 // 8
"""How many numbers fit into 64 KiB. CUDA stages copies of pageable memory up to this size without waiting for them."""
_STEP = 16
"""Tensors lie at multiples of this in a copy of them all, where kernels can read 16 bytes at once."""


@dataclass(frozen=True)
class Tiles:
    """How a list of tensors is cut into blocks of one size."""

    blocks: Tensor
    firsts: Tensor
    starts: list[int]
    """Each tensor's first block, and the number of blocks."""

    @property
    def count(self) -> int:
        return self.starts[-1]


def places_of(numels: Sequence[int]) -> list[int]:
    """Where each tensor begins in a copy of them all, in elements, and where the copy ends."""
    return [0, *accumulate(-(-numel // _STEP) * _STEP for numel in numels)]


@dataclass
class Table:
    """The addresses of one list of tensors, and other small data, on the device.

    Those of the gradients are separate: they change in nearly every step of most loops, the others hardly ever. A graph
    that the user captures gets its own table, with the addresses at that time.
    """

    device: torch.device
    numels: tuple[int, ...]
    pointers: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: Tensor = field(default_factory=lambda: torch.empty(0))
    """Empty before the first step."""
    tiles: dict[int, Tiles] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    """Host memory that a captured graph will read again at each replay."""
    is_captured: bool = False
    """Whether a graph captured by the user reads the table."""
    constants: dict[tuple[float, ...], Tensor] = field(default_factory=dict)

    def constant(self, numbers: tuple[float, ...]) -> Tensor:
        """Float64 numbers on the device, copied there once."""
        if numbers not in self.constants:
            if len(self.constants) > _KEPT_CONSTANTS:
                self.constants.clear()
            self.constants[numbers] = self._on_device(torch.tensor(numbers, dtype=torch.float64))
        return self.constants[numbers]

    def tiled(self, size: int) -> Tiles:
        if size not in self.tiles:
            counts = [-(-numel // size) for numel in self.numels]
            starts = [0, *accumulate(counts)]
            index = torch.arange(len(counts), dtype=torch.int32)
            blocks, firsts = index.repeat_interleave(torch.tensor(counts)), torch.tensor(starts[:-1])
            self.tiles[size] = Tiles(self._on_device(blocks), self._on_device(firsts), starts)
        return self.tiles[size]

    def is_up_to_date(self) -> bool:
        """Whether launches may read the table as it is, if no address has changed."""
        return self.is_captured == is_capturing(self.device)

    def point_to(self, rows: Tensor, gradients: bytes, *, rows_are_new: bool) -> None:
        """Writes `rows` to `pointers` and the packed addresses to `gradients`. Called if either has changed."""
        is_captured, addresses = is_capturing(self.device), torch.frombuffer(bytearray(gradients), dtype=torch.int64)
        if len(self.pointers) == 0 or self.is_captured or is_captured:
            self.pointers, self.gradients = self._on_device(rows), self._on_device(addresses)
            self.is_captured = is_captured
            return
        if rows_are_new:
            self.pointers.copy_(self._pinned(rows), non_blocking=True)
        parts = torch.split(self.gradients, _SENT_AT_ONCE), torch.split(addresses, _SENT_AT_ONCE)
        for there, here in zip(*parts, strict=True):
            there.copy_(here, non_blocking=True)

    def _on_device(self, host: Tensor) -> Tensor:
        return self._pinned(host).to(self.device, non_blocking=True)

    def _pinned(self, host: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return host
        pinned = host.pin_memory()  # torch keeps pinned memory until the copy has read it
        if is_capturing(self.device):
            self.held.append(pinned)
        return pinned
