"""What the length of a run changes, where it is known: the longer, the slower the scale rises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mechanic_plugins.core.settings import Settings

__all__ = ["settings_for_run"]

SLOW, LONG, HURRIED, SHORT = 1500, 1000, 500, 140
"""Steps."""
SLOW_FIRST_MOVE, SLOW_SMOOTHING = 1.4e-3, 0.99
"""With 3e-3 and 0.97, which are right for 1,000 steps, a GPT-2 of 124M parameters lost more in its first hundred steps
than it made good in 1,500."""


def settings_for_run(settings: Settings, total_steps: int | None) -> Settings:
    """The settings for a run of so many steps.

    - Below `LONG` the first move is longer, by the root, and hindsight is less, in proportion.
    - From `LONG` to `SLOW` the first move falls and smoothing grows.
    - Below `HURRIED` the scale rises sooner, by the cube: that of a LoRA of 75 steps would still rise at the end. And
      larger losses are usual: there is no time to recover from a fall.
    - Below `SHORT` all runs are alike.

    What the user or a preset chose stays. So does everything where steps grow with the gradient.
    """
    if total_steps is None or settings.rule != "optimistic" or settings.steps == "growing":
        return settings
    steps, first_move = max(total_steps, SHORT), settings.first_move
    slow = min(max((steps - LONG) / (SLOW - LONG), 0.0), 1.0)
    changed: dict[str, Any] = {}
    if settings.is_open("first_move"):
        changed["first_move"] = first_move * max(1.0, math.sqrt(LONG / steps)) + slow * (SLOW_FIRST_MOVE - first_move)
    if settings.is_open("hindsight"):
        changed["hindsight"] = settings.hindsight * min(1.0, steps / LONG)
    if settings.is_open("smoothing"):
        changed["smoothing"] = settings.smoothing + slow * (SLOW_SMOOTHING - settings.smoothing)
    hurry = max(1.0, HURRIED / steps)
    changed["usual_loss"] = min(1.0, hurry * settings.usual_loss)
    haste = hurry**3 * first_move / changed.get("first_move", first_move)
    return replace(settings, haste=haste, **changed)
