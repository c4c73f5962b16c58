"""How the tuners and the sums of a step are laid out in memory.

The sums of a step are one vector: six inner products per tuner, then the number of gradients.
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
    """A step's vector of sums before anything is added."""
    return torch.zeros(len(SUMS) * tuners + 1, dtype=torch.float64, device=device)


def gradient_norm(vector: Tensor) -> Tensor:
    """The norm of all gradients, as a 0-dim tensor."""
    return vector[1 : -1 : len(SUMS)].sum().sqrt()


def with_scaled_gradients(vector: Tensor, factor: Tensor) -> Tensor:
    """The sums for gradients multiplied by `factor`, a 0-dim tensor: dg is linear in them, gg quadratic."""
    scaled = vector.clone()
    scaled[0 : -1 : len(SUMS)] *= factor
    scaled[1 : -1 : len(SUMS)] *= factor**2
    return scaled


class TunerState:
    """All tuners, with the counts of steps made and skipped: as floats if the host decides, or in a GPU's memory.

    Immutable: a step replaces it. It converts itself when read in the other form.
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
        """Built from `rows` and `counts`, or from `flat`, which holds the numbers of all rows and the two counts."""
        self.n, self.device = n, device
        self._rows, self._counts, self._flat = rows, counts, flat
        self._is_on_device = rows is None

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return len(VECTORS) * self.n + len(SCALARS)

    @property
    def rows(self) -> list[Row]:
        """The tuners as floats. Read from the device each time, since a CUDA graph may have changed them there."""
        if self._is_on_device:
            *numbers, steps, skipped = self.flat.tolist()
            self._rows = [Row.of(numbers[at : at + self.width]) for at in range(0, len(numbers), self.width)]
            self._counts = steps, skipped
        assert self._rows is not None
        return self._rows

    @property
    def counts(self) -> tuple[float, float]:
        """The numbers of steps made and skipped. Waits for the device if they are there."""
        return self._counts if self.rows else (0.0, 0.0)

    @property
    def flat(self) -> Tensor:
        """The tuners and counts on the device, in float64."""
        if self._flat is None:
            assert self._rows is not None
            numbers = [number for row in self._rows for number in row.numbers()]
            self._flat = torch.tensor([*numbers, *self._counts], dtype=torch.float64, device=self.device)
        return self._flat

    def column(self, name: str) -> Tensor:
        """A field of `Row` for all tuners: shape (tuners, n) for one of `VECTORS`, (tuners, 1) for one of `SCALARS`."""
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
        """A state with these rows."""
        return TunerState(self.n, self.device, rows=list(rows), counts=self.counts if counts is None else counts)

    def with_flat(self, flat: Tensor) -> TunerState:
        """A state that a GPU has written."""
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
