"""Conversion to a plain optimizer: multiplies the scales into the learning rates and removes Mechanic's state.

Shared by `demechanize` and by the functions that rewrite a framework's checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mechanic_plugins.optimizer.saving import scale_in

__all__ = ["filled", "rescale", "save_whole", "scales_in"]


def filled(scales: Sequence[float]) -> list[float]:
    """The groups' scales, with the smallest one filled in for groups that have none.

    With `scope="group"`, an empty group or one whose weights were always frozen has no scale of its own. If it is
    trained later, it should not start faster than the others, relative to its lr.

    Raises:
        ValueError: No group has a scale.
    """
    learned = [scale for scale in scales if scale > 0]
    if not learned:
        raise ValueError(f"the learned scales are {list(scales)}, none of them above 0")
    return [scale if scale > 0 else min(learned) for scale in scales]


def scales_in(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The scales in the param groups of a mechanized optimizer's state dict.

    Raises:
        ValueError: A group has no scale.
    """
    return [scale_in(group) for group in groups]


def rescale(state: dict[str, Any], scales: Sequence[float]) -> None:
    """Multiplies the learning rates in the state dict of an optimizer or a torch scheduler by the scales, in place."""
    for group, scale in zip(state.get("param_groups", ()), scales, strict=False):
        group.update({key: group[key] * scale for key in ("lr", "initial_lr", "max_lr", "min_lr") if group.get(key)})
    for key in ("base_lrs", "_last_lr", "max_lrs", "min_lrs"):
        if key in state:
            state[key] = [lr * scale for lr, scale in zip(state[key], scales, strict=True)]
    if "eta_min" in state:
        state["eta_min"] *= max(scales)
    for part in state.get("_schedulers", ()):
        rescale(part, scales)


def save_whole(content: Any, target: str | Path) -> None:
    """`torch.save` that never leaves a partial file."""
    target = Path(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        torch.save(content, Path(folder) / target.name)
        (Path(folder) / target.name).replace(target)
