"""The tuners and the sums of a step as they lie in memory.

A step's sums are one vector: six inner products for each tuner, then the number of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mechanic_plugins.core.row import SCALARS, VECTORS, Row
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import SUMS

__all__ = ["TunerState", "empty_sums", "gradient_norm", "initial_state", "with_scaled_gradients"]


def empty_sums(tuners: int, device: torch.device) -> Tensor:
    """The vector of a step before anything was added to it."""
    return torch.zeros(len(SUMS) * tuners + 1, dtype=torch.float64, device=device)


def gradient_norm(vector: Tensor) -> Tensor:
    """The norm of all gradients together, 0-dim."""
    return vector[1 : -1 : len(SUMS)].sum().sqrt()


def with_scaled_gradients(vector: Tensor, factor: Tensor) -> Tensor:
    """The vector of a step whose gradients are multiplied by `factor`, 0-dim: dg is linear in them, gg quadratic."""
    scaled = vector.clone()
    scaled[0 : -1 : len(SUMS)] *= factor
    scaled[1 : -1 : len(SUMS)] *= factor**2
    return scaled


class TunerState:
    """All tuners, and how many steps were made and skipped: in floats where the host decides, or in a GPU's memory.

    Never changed: a step puts another one in its place. What is read in the other form is converted.
    """

    def __init__(
        self,
        n: int,
        device: torch.device,
        *,
        rows: list[Row] | None = None,
        counts: tuple[float, float] = (0.0, 0.0),
        flat: Tensor | None = None,
    ) -> None:
        """Of `rows` and `counts`, or of `flat`, which has the numbers of all rows and the two counts."""
        self.n, self.device = n, device
        self._rows, self._counts, self._flat = rows, counts, flat
        self._is_on_device = rows is None

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return len(VECTORS) * self.n + len(SCALARS)

    @property
    def rows(self) -> list[Row]:
        """Waits for the device, if that has them. A CUDA graph may overwrite them, so they are read each time."""
        if self._is_on_device:
            *numbers, steps, skipped = self.flat.tolist()
            self._rows = [Row.of(numbers[at : at + self.width]) for at in range(0, len(numbers), self.width)]
            self._counts = steps, skipped
        assert self._rows is not None
        return self._rows

    @property
    def counts(self) -> tuple[float, float]:
        """The steps that were made and those that were skipped. Waits for the device, if that has them."""
        return self._counts if self.rows else (0.0, 0.0)

    @property
    def flat(self) -> Tensor:
        """On the device, in float64."""
        if self._flat is None:
            assert self._rows is not None
            numbers = [number for row in self._rows for number in row.numbers()]
            self._flat = torch.tensor([*numbers, *self._counts], dtype=torch.float64, device=self.device)
        return self._flat

    def column(self, name: str) -> Tensor:
        """By the name of a field of `Row`: (tuners, n) for one of `VECTORS`, (tuners, 1) for one of `SCALARS`."""
        table = self.flat[:-2].view(-1, self.width)
        if name in VECTORS:
            at = VECTORS.index(name) * self.n
            return table[:, at : at + self.n]
        at = len(VECTORS) * self.n + SCALARS.index(name)
        return table[:, at : at + 1]

    @property
    def played(self) -> Tensor:
        """The scales in force, of shape (tuners,)."""
        return self.column("played")[:, 0]

    def with_rows(self, rows: Sequence[Row], counts: tuple[float, float] | None = None) -> TunerState:
        """Others in their place."""
        return TunerState(self.n, self.device, rows=list(rows), counts=self.counts if counts is None else counts)

    def with_flat(self, flat: Tensor) -> TunerState:
        """As a GPU has left them."""
        return TunerState(self.n, self.device, flat=flat)

    def __len__(self) -> int:
        return (len(self.flat) - 2) // self.width if self._rows is None else len(self._rows)


def initial_state(settings: Settings, *, tuners: int, device: torch.device) -> TunerState:
    """The state before the first step."""
    n = settings.n
    rows = [Row.of([0.0] * (len(VECTORS) * n + len(SCALARS))) for _ in range(tuners)]
    if settings.rule in ("experiments", "optax"):
        for row in rows:
            row.s = [settings.s_init] * n
    return TunerState(n, device, rows=rows)
