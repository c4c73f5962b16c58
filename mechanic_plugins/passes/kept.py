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

    Every step asks, for every tensor: whole lists at a time, with as little python as can be. Python compares the
    values of dicts by identity first, so a state is compared fast with a copy of it. Only of different tensors does it
    ask for their values: torch then raises, if there are several. One value may be equal, so it is looked at apart.
    """

    def __init__(self, states: Sequence[Any], tensors: Mapping[str, Sequence[Tensor | None]]) -> None:
        self._states = list(states)
        self.is_complete = all(tensor is not None for each in tensors.values() for tensor in each)
        can_compare = _have_only(tensors, states)
        self._copies = [dict(state) for state in states] if can_compare else self._states
        self._apart = {
            name: each for name, each in tensors.items() if not (can_compare and all(map(_has_several_values, each)))
        }
        self._ends = [local(each[at]) for each in tensors.values() for at in (0, -1)] if self.is_complete else []
        self._places = self._places_of_ends()

    def is_there(self) -> bool:
        """Whether nothing was missing, and every tensor is the one it was."""
        try:
            apart = (self._is_there(name, tensors) for name, tensors in self._apart.items())
            return self.is_complete and self._states == self._copies and all(apart) and self._have_stayed()
        except (KeyError, RuntimeError):
            return False

    def _have_stayed(self) -> bool:
        """Tools that give their memory away for a while do so with all of them."""
        return self._places_of_ends() == self._places

    def _places_of_ends(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._ends))

    def _is_there(self, name: str, tensors: Sequence[Tensor | None]) -> bool:
        return all(map(operator.is_, map(operator.itemgetter(name), self._states), tensors))


def _have_only(tensors: Mapping[str, Sequence[Tensor | None]], states: Sequence[Any]) -> bool:
    """Whether the states hold nothing else, and all of it is plain tensors: others may ask other ranks for values."""
    are_plain = all(type(tensor) is Tensor for each in tensors.values() for tensor in each)
    return are_plain and all(isinstance(state, dict) and state.keys() == tensors.keys() for state in states)


def _has_several_values(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 1
