"""The tuners and the sums of a step as they lie in memory.

A step's sums are one float64 vector: six inner products for each tuner, then the number of gradients. The tuners are
one float64 table with a row for each; `TunerState` has views of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core.row import SCALARS, VECTORS, Row
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import SUMS

__all__ = [
    "SCALARS",
    "SUMS",
    "TunerState",
    "column",
    "empty_sums",
    "gradient_count",
    "gradient_norm",
    "initial_state",
    "sums_of",
    "with_scaled_gradients",
]


def empty_sums(tuners: int, device: torch.device) -> Tensor:
    """The vector of a step before anything was added to it."""
    return torch.zeros(len(SUMS) * tuners + 1, dtype=torch.float64, device=device)


def sums_of(vector: Tensor, tuner_index: int) -> Tensor:
    """One tuner's inner products, as a view."""
    return vector[len(SUMS) * tuner_index : len(SUMS) * (tuner_index + 1)]


def gradient_count(vector: Tensor) -> Tensor:
    """How many gradients there are, as a view."""
    return vector[-1:]


def gradient_norm(vector: Tensor) -> Tensor:
    """The norm of all gradients together, 0-dim."""
    return vector[1:-1:6].sum().sqrt()


def with_scaled_gradients(vector: Tensor, factor: Tensor) -> Tensor:
    """The vector of a step whose gradients are multiplied by `factor`, 0-dim: dg is linear in them, gg quadratic."""
    scaled = vector.clone()
    scaled[0:-1:6] *= factor
    scaled[1:-1:6] *= factor**2
    return scaled


class TunerState(NamedTuple):
    """Views of the table: (tuners, n) for each of `VECTORS`, (tuners, 1) for each of `SCALARS`."""

    table: Tensor
    n: int

    @classmethod
    def of_rows(cls, rows: Sequence[Row], device: torch.device) -> TunerState:
        table = torch.tensor([row.numbers() for row in rows], dtype=torch.float64, device=device)
        return cls(table, len(rows[0].s))

    def rows(self) -> list[Row]:
        """Waits for the device."""
        return [Row.of(numbers) for numbers in self.table.tolist()]

    def column(self, name: str) -> Tensor:
        """By the name of a field of `Row`."""
        if name in VECTORS:
            at = VECTORS.index(name) * self.n
            return self.table[:, at : at + self.n]
        at = len(VECTORS) * self.n + SCALARS.index(name)
        return self.table[:, at : at + 1]

    @property
    def played(self) -> Tensor:
        """The scales in force, of shape (tuners,)."""
        return self.column("played")[:, 0]

    @property
    def device(self) -> torch.device:
        return self.table.device

    def __len__(self) -> int:
        return len(self.table)


def initial_state(settings: Settings, *, tuners: int, device: torch.device) -> TunerState:
    """The state before the first step."""
    n = settings.n
    state = TunerState(torch.zeros(tuners, len(VECTORS) * n + len(SCALARS), dtype=torch.float64, device=device), n)
    if settings.rule in ("experiments", "optax"):
        state.column("s").fill_(settings.s_init)
    return state


def column(numbers: Sequence[float | Tensor] | Tensor, device: torch.device) -> Tensor:
    """One number for each tuner, of shape (tuners, 1), without waiting for the device or copying to it."""
    if isinstance(numbers, Tensor):
        return numbers.view(-1, 1)
    cells = (
        number.to(device, torch.float64).reshape(())
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    )
    return torch.stack(list(cells)).unsqueeze(1)
