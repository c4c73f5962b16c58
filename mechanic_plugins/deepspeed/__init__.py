"""DeepSpeed: import this module, then hand a mechanized optimizer to `deepspeed.initialize`.

    import deepspeed
    import mechanic_plugins.deepspeed
    from mechanic_plugins import mechanize

    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.scale

or name it in the config: `"optimizer": {"type": "MechanicAdamW", "params": {"lr": 1.0, "scope": "group"}}`.

DeepSpeed checks the type of the optimizer it is given. So it gets the base and builds its own optimizer around that;
the mechanized one then takes the base's place. `mechanic_plugins.deepspeed.engine` connects the two.
"""

from __future__ import annotations

import functools
import inspect
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

from mechanic_plugins.api import mechanize
from mechanic_plugins.deepspeed.engine import connect
from mechanic_plugins.deepspeed.refusals import refuse_unsupported
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import DEFAULTS, hint

__all__ = ["NAMES", "attach", "install", "mechanic_of"]

NAMES = {
    f"Mechanic{cls.__name__}": cls
    for cls in (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
    )
}
"""Values of `"type"` in a config's `"optimizer"` section, and their bases."""


def mechanic_of(engine: Any) -> MechanicOptimizer | None:
    """The engine's mechanized optimizer, or None."""
    for candidate in (engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
        if isinstance(candidate, MechanicOptimizer):
            return candidate
    return None


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
    if mechanic.count is None:
        refuse_unsupported(engine, mechanic)
        connect(engine, mechanic)
    return mechanic


# -------------------------------------------------------------------- attaching to every new engine


def install() -> None:
    """Attaches Mechanic to every engine built from now on, and registers `NAMES` for config files. Idempotent."""
    for name, cls in NAMES.items():
        setattr(torch.optim, name, functools.partial(_build, cls))  # where DeepSpeed looks up unknown names
    if not hasattr(DeepSpeedEngine._configure_optimizer, "_mechanic"):
        DeepSpeedEngine._configure_optimizer = _attaching(DeepSpeedEngine._configure_optimizer)
        DeepSpeedEngine._configure_basic_optimizer = _building(DeepSpeedEngine._configure_basic_optimizer)
        OpBuilder.jit_load = _announcing(OpBuilder.jit_load)


def _attaching(original: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed builds its optimizer around the base; the mechanized one then replaces the base inside it."""

    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        if callable(client_optimizer) and not isinstance(client_optimizer, tuple(self._supported_optims())):
            client_optimizer = client_optimizer(model_parameters)
        if isinstance(client_optimizer, MechanicOptimizer):
            client_optimizer = _hand_over(self, client_optimizer)
        original(self, client_optimizer, model_parameters)
        mechanic = vars(self).pop("_mechanic", None)
        if mechanic is not None:
            _put_back(self, mechanic)
            attach(self)

    _configure_optimizer._mechanic = True  # type: ignore[attr-defined]
    return _configure_optimizer


def _building(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        cls = NAMES.get(self.optimizer_name())
        if cls is None:
            return original(self, model_parameters)
        params = dict(self.optimizer_params() or {})
        torch_adam = params.pop("torch_adam", False)
        offloaded = self.zero_use_cpu_optimizer() and not torch_adam
        return _hand_over(self, _build(_cpu_adam(cls) if offloaded else cls, model_parameters, **params))

    return _configure_basic_optimizer


def _hand_over(engine: Any, mechanic: MechanicOptimizer) -> Optimizer:
    refuse_unsupported(engine, mechanic)
    mechanic.state_dict()  # writes the tuner into the param groups, which DeepSpeed may copy or drop
    engine._mechanic = mechanic
    return mechanic.base


def _announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or torch.utils.cpp_extension.get_default_build_root()
        if not any(f"{self.name}.so" in files for _, _, files in os.walk(root)):
            logger.warning(
                f"DeepSpeed compiles its operator {self.name} on first use, which may take minutes. If it hangs, since "
                f"an earlier build was killed, remove {root}."
            )
        return original(self, *args, **kwargs)

    return jit_load


def _build(cls: Callable[..., Optimizer], params: Any, **kwargs: Any) -> MechanicOptimizer:
    """From a config's "params": the base's arguments and Mechanic's options, also as `mechanic_<name>`.

    Raises:
        TypeError: An argument that neither has.
    """
    own = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in own.values())
    options = {}
    for key in list(kwargs):
        option = key.removeprefix("mechanic_")
        if option in DEFAULTS and key not in own:
            options[option] = kwargs.pop(key)
        elif key not in own and not takes_any:
            known = hint(key, [*own, *DEFAULTS])
            raise TypeError(f'the optimizer\'s "params" in the DeepSpeed config have no {key!r}{known}')
    return mechanize(cls(params, **kwargs), **options)


def _cpu_adam(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """DeepSpeed's own choice for an offloaded "Adam" or "AdamW"."""
    if cls not in (torch.optim.Adam, torch.optim.AdamW):
        return cls
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return functools.partial(DeepSpeedCPUAdam, adamw_mode=cls is torch.optim.AdamW)


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
    """To create its state, DeepSpeed steps the base with zero gradients, and weight decay at lr=1 moves the weights."""
    mechanic.state.clear()
    for group in mechanic.param_groups:
        group.pop("step", None)  # FusedAdam's step count
    holder.refresh_fp32_params()


install()
