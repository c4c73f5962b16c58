"""Param groups as users and programs see them: their names, and the scale under the key "d"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["average", "names_of", "release", "show_scales"]

Group = dict[str, Any]


Owner = Callable[[], Any]
"""A weak reference to the optimizer, or None, so that models are freed without the garbage collector."""


class LiveGroup(Group):
    """A param group that answers to "d" with its scale, as Prodigy's and D-Adaptation's do.

    Diffusion trainers log it from there. It is not stored: state dicts and copies do not have it. A base with its own
    "d", such as Adafactor, keeps that.
    """

    owner: Owner | None = None

    def __missing__(self, key: str) -> float:
        optimizer = self.owner() if key == "d" and self.owner is not None else None
        if optimizer is not None:
            for group, scale in zip(optimizer.param_groups, optimizer.scales.tolist(), strict=True):
                if group is self:
                    return float(scale)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key != "d":
            return super().get(key, default)
        try:
            return self[key]
        except KeyError:
            return default

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain dicts."""
        return dict, (dict(self),)


def show_scales(groups: list[Group], owner: Owner) -> None:
    """Makes the optimizer's groups answer to "d". Idempotent."""
    for index, group in enumerate(groups):
        live = group if isinstance(group, LiveGroup) else LiveGroup(group)
        live.owner = owner
        groups[index] = live


def release(groups: Sequence[Group]) -> None:
    """Stops the groups from answering to "d"."""
    for group in groups:
        if isinstance(group, LiveGroup):
            group.owner = None


def names_of(groups: Sequence[Group]) -> list[str]:
    """Each group's "name", or pg1, pg2, ... for groups without a unique one; no two are alike."""
    given = [None if group.get("name") is None else str(group["name"]) for group in groups]
    count = Counter(given)
    names = []
    for place, name in enumerate(given, start=1):
        if name is None or count[name] > 1:
            name = f"pg{place}"
            while count[name] == 1:  # another group's own
                name += "_"
        names.append(name)
    return names


def average(values: Sequence[float], groups: Sequence[Group]) -> float:
    """The mean over all weights of a value given per group."""
    sizes: list[int] = [sum(p.numel() for p in group["params"]) for group in groups]
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / max(sum(sizes), 1)
