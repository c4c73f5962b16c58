"""Warnings about transformers' schedules that behave differently with Mechanic.

Mechanic multiplies the whole schedule by the scale, including a floor that is given as an absolute learning rate. As a
fraction of the peak, that floor depends on `--learning_rate`.
"""

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
_POLYNOMIALS_OWN = 1e-7
_NEGLIGIBLE = 0.01


def objection(kind: str, kwargs: Mapping[str, Any], lr: float) -> str | None:
    """The text of a warning about this schedule, or None.

    Args:
        kind: `lr_scheduler_type`.
        kwargs: `lr_scheduler_kwargs`.
        lr: `learning_rate`, above 0.
    """
    if kind == "greedy":
        return (
            "lr_scheduler_type=greedy does not work well with Mechanic: it raises the learning rate while the loss "
            "falls, which Mechanic treats as a warm-up and cancels, and its bounds (min_lr, max_lr) are multiplied by "
            "the scale. Use constant, linear or cosine."
        )
    key = _FLOORS.get(kind)
    floor = _floor(kind, kwargs, key, lr) if key else 0.0
    if not floor:
        return None
    return (
        f"lr_scheduler_type={kind} has {key}={floor:g}, an absolute learning rate, which Mechanic multiplies by the "
        f"learned scale like the rest of the schedule. With learning_rate={lr:g} it is {floor / lr:.3g} of the learned "
        f"peak, and that fraction depends on learning_rate. {_remedy(kind, key)}"
    )


def _floor(kind: str, kwargs: Mapping[str, Any], key: str, lr: float) -> float:
    given = kwargs.get(key)
    if given is None:
        own = _POLYNOMIALS_OWN if kind == "polynomial" else 0.0
        return own if own > _NEGLIGIBLE * lr else 0.0
    return float(max(given) if isinstance(given, (list, tuple)) else given)


def _remedy(kind: str, key: str | None) -> str:
    if kind.startswith("cosine"):
        return 'Set the fraction itself: lr_scheduler_kwargs={"min_lr_rate": 0.1}.'
    return f"With learning_rate=1.0, {key} is the fraction itself."
