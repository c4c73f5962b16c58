"""Training engines that shard an optimizer's weights without a trace on the parameters.

The optimizer looks for them itself: nothing else notices when an engine was set up without its plugin.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from mechanic_plugins.distributed.live_objects import live_objects

__all__ = ["refuse_unattached"]


def refuse_unattached(optimizer: object) -> None:
    """Checks that DeepSpeed does not step this optimizer without `mechanic_plugins.deepspeed`.

    Neither the optimizer nor its parameters point to DeepSpeed's objects, so this looks for one that holds the
    optimizer among all live objects. The caller does so once per set of parameters.

    Raises:
        RuntimeError: One of DeepSpeed's objects holds the optimizer.
    """
    if "deepspeed" not in sys.modules or not (dist.is_available() and dist.is_initialized()):
        return  # every engine has a process group, on one rank too: without one there is nothing to look for
    for o in live_objects(lambda kind: str(kind.__module__).startswith("deepspeed.")):
        if getattr(o, "__dict__", {}).get("optimizer") is optimizer:
            raise RuntimeError(
                f"DeepSpeed's {type(o).__name__} steps this optimizer, but Mechanic is not attached to it: every rank "
                "would learn a scale of its own. import mechanic_plugins.deepspeed before deepspeed.initialize()."
            )
