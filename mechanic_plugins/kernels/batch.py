"""Interface shared by ForeachBatch and TritonBatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from mechanic_plugins.core.param_state import IndexRange

__all__ = ["TensorBatch"]


class TensorBatch(Protocol):
    """`TritonBatch` and `ForeachBatch`. `refresh_pointers` comes first in every step.

    What `snapshot` returns is for the same batch's `restore` and `move` only.
    """

    sizes: list[int]
    """For each tensor the bytes that a snapshot of it holds."""

    @property
    def gradients(self) -> int:
        """How many there are in this step."""

    def refresh_pointers(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Looks at weights and gradients; False where one is not like it was."""

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
        """Adds this list's share to a tuner's sums, and its gradients to the count at the end."""

    def snapshot(self, part: IndexRange, xs: Sequence[Tensor]) -> Any:
        """The weights of a part."""

    def restore(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Any) -> None:
        """The weights as they were before the base touched them."""

    def float_copies(self, part: IndexRange, xs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """A part's weights in float32, and the row in memory that holds them, if there is one: for `move_to`."""

    def begin_moves(self, parts: Sequence[IndexRange]) -> None:
        """The parts whose moves will make up the whole."""

    def move(self, part: IndexRange, xs: Sequence[Tensor], snapshot: Any, scales: Tensor) -> None:
        """From the base's weights to Mechanic's."""

    def move_to(
        self, part: IndexRange, xs: Sequence[Tensor], stepped: Sequence[Tensor], row: Tensor | None, scales: Tensor
    ) -> None:
        """The same where the base has stepped float32 copies and left the weights `xs` alone."""

    def finish_moves(self, xs: Sequence[Tensor]) -> None:
        """All parts have moved."""
