"""The table of pointers that the kernels read, and how its tensors are cut into blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.kernels.cuda import is_capturing

__all__ = ["POINTERS", "Mailbox", "Table", "Tiles"]

POINTERS = 5
"""The number of leading columns that point to vectors."""
_KEPT_CONSTANTS = 32
_SENT_AT_ONCE = 64 * 1024 // 8
"""How many numbers fit into 64 KiB."""


@dataclass(frozen=True)
class Tiles:
    """How a list of tensors is cut into blocks of one size."""

    blocks: Tensor
    firsts: Tensor
    count: int


class Mailbox:
    """Sends 8-byte numbers to a tensor on a GPU, from one reused buffer.

    The buffer is pageable on purpose: copies of up to 64 KiB are staged before the call returns, so it can be reused at
    once. Longer ones are split.
    """

    def __init__(self, target: Tensor) -> None:
        box = torch.empty(len(target), dtype=target.dtype)
        self._place = box.data_ptr()
        self._parts = list(zip(torch.split(target, _SENT_AT_ONCE), torch.split(box, _SENT_AT_ONCE), strict=True))

    def send(self, numbers: bytes) -> None:
        """Returns before the numbers have arrived, but later launches on this stream will see them."""
        ctypes.memmove(self._place, numbers, len(numbers))
        for target, box in self._parts:
            target.copy_(box, non_blocking=True)


@dataclass
class Table:
    """The addresses of one list of tensors, and other small data, on the device.

    Those of the gradients are separate: they change in nearly every step of most loops, the others hardly ever. All are
    updated in place, so that recorded launches see them. A graph that the user captures gets its own table, with the
    addresses at that time.
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
    _mailbox: Mailbox | None = None
    """Sends to `gradients`."""

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
            self.tiles[size] = Tiles(self._on_device(blocks), self._on_device(firsts), starts[-1])
        return self.tiles[size]

    def is_up_to_date(self) -> bool:
        """Whether launches may read the table as it is, if no address has changed."""
        return self.is_captured == is_capturing(self.device)

    def point_to(self, rows: Tensor, gradients: bytes, *, rows_are_new: bool) -> None:
        """Writes `rows` to `pointers` and the packed addresses to `gradients`. Called if either has changed."""
        is_captured = is_capturing(self.device)
        if len(self.pointers) == 0 or self.is_captured or is_captured:
            self.pointers = self._on_device(rows)
            self.gradients = self._on_device(torch.frombuffer(bytearray(gradients), dtype=torch.int64))
            self.is_captured, self._mailbox = is_captured, None
            return
        if rows_are_new:
            self.pointers.copy_(self._pinned(rows), non_blocking=True)
        self._mailbox = self._mailbox or Mailbox(self.gradients)
        self._mailbox.send(gradients)

    def _on_device(self, host: Tensor) -> Tensor:
        return self._pinned(host).to(self.device, non_blocking=True)

    def _pinned(self, host: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return host
        pinned = host.pin_memory()  # torch keeps pinned memory until the copy has read it
        if is_capturing(self.device):
            self.held.append(pinned)
        return pinned
