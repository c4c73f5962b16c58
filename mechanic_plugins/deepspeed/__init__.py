"""DeepSpeed: import this module, then hand a mechanized optimizer to `deepspeed.initialize`.

    import deepspeed
    import mechanic_plugins.deepspeed
    from mechanic_plugins import mechanize

    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.scale

or name it in the config: `"optimizer": {"type": "MechanicAdamW", "params": {"lr": 1.0, "scope": "group"}}`. The default
rule is this package's own; `rule="paper"`, or `"rule": "paper"` among the params, is the paper's, Algorithm 1.

DeepSpeed checks the type of the optimizer it is given. So it gets the base and builds its own optimizer around that;
the mechanized one then takes the base's place. `mechanic_plugins.deepspeed.engine` connects the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.utils import logger
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.deepspeed cannot import deepspeed ({error}): pip install 'mechanic-plugins[deepspeed]'"
    ) from error
import torch
import torch.utils.cpp_extension
from torch.optim import Optimizer

from mechanic_plugins.api import find, mechanize
from mechanic_plugins.deepspeed.engine import connect
from mechanic_plugins.deepspeed.refusals import refuse_unsupported
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.patches import patch

__all__ = ["NAMES", "attach", "install", "mechanic_of"]

_BASES = ("AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta")
NAMES: dict[str, type[Optimizer]] = {f"Mechanic{name}": getattr(torch.optim, name) for name in _BASES}
"""Values of `"type"` in a config's `"optimizer"` section, and their bases."""


def mechanic_of(engine: Any) -> MechanicOptimizer | None:
    """The engine's mechanized optimizer, or None."""
    return find(engine.optimizer)


def attach(engine: Any) -> MechanicOptimizer:
    """Connects the engine's mechanized optimizer to all ranks. Called automatically for engines built after the import.

    Raises:
        TypeError: The engine's optimizer is not mechanized.
        ValueError: The engine uses a feature that Mechanic does not support.
    """
    mechanic = mechanic_of(engine)
    if mechanic is None:
        raise TypeError(
            f"the engine's optimizer is {type(engine.optimizer).__name__}, which is not mechanized: "
            "pass mechanize(...) to deepspeed.initialize(optimizer=...)."
        )
    if mechanic.shares_by_engine is None:
        refuse_unsupported(engine, mechanic)
        connect(engine, mechanic)
    return mechanic


# -------------------------------------------------------------------- attaching to every new engine


def install() -> None:
    """Attaches Mechanic to every engine built from now on, and registers `NAMES` for config files. Idempotent."""
    for name, cls in NAMES.items():
        setattr(torch.optim, name, mechanize(cls))  # where DeepSpeed looks up unknown names
    patch(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)
    patch(DeepSpeedEngine, "_configure_basic_optimizer", _configure_basic_optimizer)
    patch(OpBuilder, "jit_load", _jit_load)


def _configure_optimizer(original: Callable[..., None], engine: Any, given: Any, parameters: Any) -> None:
    """DeepSpeed builds its optimizer around the base; the mechanized one then replaces the base inside it."""
    if callable(given) and not isinstance(given, tuple(engine._supported_optims())):
        given = given(parameters)
    if isinstance(given, MechanicOptimizer):
        given = _hand_over(engine, given)
    original(engine, given, parameters)
    mechanic = vars(engine).pop("_mechanic", None)
    if mechanic is not None:
        _put_back(engine, mechanic)
        attach(engine)


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, parameters: Any) -> Any:
    """Builds an optimizer from a config's "params", which hold the base's arguments and Mechanic's options."""
    cls = NAMES.get(engine.optimizer_name())
    if cls is None:
        return original(engine, parameters)
    params = dict(engine.optimizer_params() or {})
    torch_adam = params.pop("torch_adam", False)
    if engine.zero_use_cpu_optimizer() and not torch_adam and cls in (torch.optim.Adam, torch.optim.AdamW):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        params["adamw_mode"], cls = cls is torch.optim.AdamW, DeepSpeedCPUAdam
    return _hand_over(engine, mechanize(cls)(parameters, **params))


def _hand_over(engine: Any, mechanic: MechanicOptimizer) -> Optimizer:
    refuse_unsupported(engine, mechanic)
    mechanic.write_tuner()  # writes the tuner into the param groups, which DeepSpeed may copy or drop
    engine._mechanic = mechanic
    return mechanic.base


def _jit_load(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or torch.utils.cpp_extension.get_default_build_root()
    if not any(f"{builder.name}.so" in files for _, _, files in os.walk(root)):
        logger.warning(
            f"DeepSpeed compiles its operator {builder.name} on first use, which may take minutes. If it hangs "
            f"because an earlier build was killed, remove {root}."
        )
    return original(builder, *args, **kwargs)


def _put_back(engine: Any, mechanic: MechanicOptimizer) -> None:
    holder = engine.optimizer
    if holder is mechanic.base:
        engine.optimizer = mechanic
    elif getattr(holder, "optimizer", None) is mechanic.base:
        holder.optimizer = mechanic
    else:
        raise ValueError(
            f"DeepSpeed replaced {type(mechanic.base).__name__} with another optimizer, which Mechanic cannot tune: "
            "use torch.optim.AdamW or DeepSpeedCPUAdam."
        )
    engine.basic_optimizer = mechanic
    mechanic.reread_groups()  # DeepSpeed drops empty groups
    if isinstance(holder, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        _undo_dummy_step(holder, mechanic)


def _undo_dummy_step(holder: Any, mechanic: MechanicOptimizer) -> None:
    """Undoes DeepSpeed's step with zero gradients, which creates the state: weight decay at lr=1 moves the weights."""
    mechanic.state.clear()
    for group in mechanic.param_groups:
        group.pop("step", None)  # FusedAdam's step count
    holder.refresh_fp32_params()


install()
