"""Whether a parameter's state is still the tensors whose addresses the launches know."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mechanic_plugins.distributed.sharding import local

__all__ = ["KeptState"]


class KeptState:
    """The tensors of a batch's states, by name. A load, or a tool that moves them, puts others in their place.

    Every step asks, for every tensor: whole lists at a time, with as little python as can be. Python compares tuples by
    identity first, so those of equal tensors are compared fast. Only of different ones does it ask for their values:
    torch then raises, if there are several.
    """

    def __init__(self, states: Sequence[Any], tensors: Mapping[str, Sequence[Tensor | None]]) -> None:
        self._states = states
        self.is_complete = all(tensor is not None for each in tensors.values() for tensor in each)
        several = [name for name, each in tensors.items() if all(map(_is_plain_with_several_values, each))]
        self._several = several if len(several) > 1 else []
        self._rows = list(zip(*(tensors[name] for name in self._several), strict=True))
        self._others = {name: each for name, each in tensors.items() if name not in self._several}
        self._ends = [local(each[at]) for each in tensors.values() for at in (0, -1)] if self.is_complete else []
        self._places = self._places_of_ends()

    def is_there(self) -> bool:
        """Whether nothing was missing, and every tensor is the one it was."""
        try:
            others = (self._is_there(name, tensors) for name, tensors in self._others.items())
            return self.is_complete and self._are_rows_there() and all(others) and self._have_stayed()
        except (KeyError, RuntimeError):
            return False

    def _have_stayed(self) -> bool:
        """Tools that give their memory away for a while do so with all of them."""
        return self._places_of_ends() == self._places

    def _places_of_ends(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._ends))

    def _are_rows_there(self) -> bool:
        return not self._several or list(map(operator.itemgetter(*self._several), self._states)) == self._rows

    def _is_there(self, name: str, tensors: Sequence[Tensor | None]) -> bool:
        return all(map(operator.is_, map(operator.itemgetter(name), self._states), tensors))


def _is_plain_with_several_values(tensor: Tensor | None) -> bool:
    return type(tensor) is Tensor and tensor.numel() > 1
