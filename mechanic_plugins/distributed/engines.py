"""Training engines that shard an optimizer's weights without a trace on the parameters.

The optimizer looks for them itself: nothing else notices when an engine was set up without its plugin.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["refuse_unattached"]


def refuse_unattached(optimizer: object) -> None:
    """Checks that DeepSpeed does not step this optimizer without `mechanic_plugins.deepspeed`.

    Neither the optimizer nor its parameters point to DeepSpeed's objects, so this scans all live objects for one that
    holds the optimizer. The caller does so once per set of parameters.

    Raises:
        RuntimeError: One of DeepSpeed's objects holds the optimizer.
    """
    if "deepspeed" not in sys.modules:
        return
    for o in (o for o in gc.get_objects() if str(type(o).__module__).startswith("deepspeed.")):
        if getattr(o, "__dict__", {}).get("optimizer") is optimizer:
            raise RuntimeError(
                f"DeepSpeed's {type(o).__name__} steps this optimizer, but Mechanic is not attached to it: every rank "
                "would learn a scale of its own. import mechanic_plugins.deepspeed before deepspeed.initialize()."
            )
