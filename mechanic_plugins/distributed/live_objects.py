"""Wrappers and engines that hold parameters without a trace on them can only be found among all live objects."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

__all__ = ["live_objects"]


def live_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """Those of a wanted class. Each class is asked once: a program has thousands of classes and millions of objects."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if wanted(kind)}
    return [o for o in objects if type(o) in kinds] if kinds else []
