"""Warnings about transformers' schedules that behave differently with Mechanic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["objection"]

_FLOORS = {
    "cosine_with_min_lr": "min_lr",
    "cosine_warmup_with_min_lr": "min_lr",
    "reduce_lr_on_plateau": "min_lr",
    "polynomial": "lr_end",
}


def objection(kind: str, kwargs: Mapping[str, Any], lr: float) -> str | None:
    """A warning for `lr_scheduler_type` with `lr_scheduler_kwargs` at this `learning_rate`, or None."""
    if kind == "greedy":
        return (
            "lr_scheduler_type=greedy raises the learning rate while the loss falls, which has no effect: Mechanic's "
            "scale is relative to the highest lr so far. Use linear or cosine."
        )
    key = _FLOORS.get(kind, "")
    floor = kwargs.get(key, 1e-7 if kind == "polynomial" and lr < 1e-5 else 0.0) or 0.0  # polynomial's own lr_end
    floor = float(max(floor) if isinstance(floor, (list, tuple)) else floor)
    if not floor:
        return None
    cosine = 'Set the fraction itself: lr_scheduler_kwargs={"min_lr_rate": 0.1}.'
    return (
        f"lr_scheduler_type={kind} has {key}={floor:g}, an absolute learning rate, which Mechanic multiplies by the "
        f"learned scale. With learning_rate={lr:g} it is {floor / lr:.3g} of the learned peak. "
        f"{cosine if kind.startswith('cosine') else f'With learning_rate=1.0, {key} is the fraction itself.'}"
    )
