"""Finds wrappers and engines that hold parameters or an optimizer without leaving a trace on them.

They can only be found among all live objects. The optimizer looks for them itself, since nothing else would notice an
engine that was set up without its plugin.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["live_objects", "refuse_unattached"]


def live_objects(wanted: Callable[[type], bool]) -> list[Any]:
    """Objects of a wanted class. Asks once per class: a program has thousands of classes and millions of objects."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if wanted(kind)}
    return [o for o in objects if type(o) in kinds] if kinds else []


def refuse_unattached(optimizer: object) -> None:
    """Checks that DeepSpeed does not step this optimizer without `mechanic_plugins.deepspeed`.

    Called once per set of parameters.

    Raises:
        RuntimeError: One of DeepSpeed's objects holds the optimizer.
    """
    if "deepspeed" not in sys.modules or not (dist.is_available() and dist.is_initialized()):
        return  # every engine has a process group, even on a single rank
    for o in live_objects(lambda kind: str(kind.__module__).startswith("deepspeed.")):
        if getattr(o, "__dict__", {}).get("optimizer") is optimizer:
            raise RuntimeError(
                f"DeepSpeed's {type(o).__name__} steps this optimizer, but Mechanic is not attached to it: every rank "
                "would learn a scale of its own. import mechanic_plugins.deepspeed before deepspeed.initialize()."
            )
