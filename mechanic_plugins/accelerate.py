"""Accelerate: mechanize the optimizer, then prepare it.

    from mechanic_plugins.accelerate import mechanize
    model, optimizer = accelerator.prepare(model, mechanize(torch.optim.AdamW(model.parameters())))

The default rule is this package's own; `mechanize(optimizer, rule="paper")` trains by the paper's, Algorithm 1.

Single-process training, DDP and FSDP need only the mechanized optimizer. DeepSpeed needs `mechanic_plugins.deepspeed`,
and accelerate replaces an offloaded optimizer with a plain DeepSpeedCPUAdam. Importing this module handles both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import accelerate.accelerator
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.accelerate cannot import accelerate ({error}): pip install 'mechanic-plugins[accelerate]'"
    ) from error
import torch
from torch.optim import Optimizer

from mechanic_plugins.api import mechanize as mechanize
from mechanic_plugins.classes import not_built, wrap
from mechanic_plugins.lion import Lion
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.patches import patch

__all__ = ["install", "mechanize"]

Mapping = Callable[[Any], Any]


def install() -> None:
    """Patches accelerate's DeepSpeed path to keep Mechanic. Idempotent."""
    patch(accelerate.accelerator.Accelerator, "_prepare_deepspeed", _prepare_deepspeed)
    if hasattr(accelerate.accelerator, "map_pytorch_optim_to_deepspeed"):  # absent without DeepSpeed
        patch(accelerate.accelerator, "map_pytorch_optim_to_deepspeed", _map_optimizer)


def _prepare_deepspeed(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """Imports the DeepSpeed plugin on demand, since DeepSpeed is slow to import."""
    for arg in args:
        if isinstance(arg, type) and issubclass(arg, MechanicOptimizer):
            raise TypeError(not_built(arg))
    if any(isinstance(arg, MechanicOptimizer) for arg in args):
        import mechanic_plugins.deepspeed  # noqa: F401  attaches itself to the engine
    return original(accelerator, *args)


def _map_optimizer(original: Mapping, optimizer: Any) -> Any:
    if not isinstance(optimizer, MechanicOptimizer):
        return original(optimizer)
    return wrap(_offloaded(optimizer.base, original), **optimizer._configuration)


def _offloaded(base: Optimizer, mapping: Mapping) -> Any:
    """DeepSpeed's CPU version of the base. accelerate would use Adam for every base it does not know."""
    if isinstance(base, (torch.optim.Adam, torch.optim.AdamW)) or type(base).__module__.startswith("deepspeed."):
        return mapping(base)
    if isinstance(base, Lion):
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(base.param_groups)
    raise ValueError(
        f"offload_optimizer would replace {type(base).__name__} with DeepSpeedCPUAdam, a different optimizer. "
        "Use Adam, AdamW or Lion, or keep yours with "
        '"zero_force_ds_cpu_optimizer": false and "zero_allow_untested_optimizer": true in the DeepSpeed config.'
    )


install()
