"""Mechanizes a strategy's optimizers, and restores the module's own optimizers and schedulers after fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from mechanic_plugins.api import Options, mechanize
from mechanic_plugins.lightning.checks import DEEPSPEED, is_a
from mechanic_plugins.lightning.packages import LIGHTNINGS, rank_zero_warn
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.optimizer.saving import strip
from mechanic_plugins.options import DEFAULTS
from mechanic_plugins.weights.slots import DELTA, REF

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "attach",
    "load_plain_checkpoints_without_mechanic",
    "mechanize_before_the_engine",
    "redirect_schedulers",
    "release",
]


def attach(strategy: Strategy, options: Options, *, known: Sequence[MechanicOptimizer]) -> list[MechanicOptimizer]:
    """Mechanizes the strategy's optimizers, unless they are already, and returns them.

    Args:
        strategy: Holds the optimizers and the schedulers.
        options: For `mechanize`.
        known: The result of an earlier call, whose wrappers are reused for the same bases.
    """
    if is_a(strategy, DEEPSPEED):
        return [_mechanic_of(strategy)]
    wanted = [_mechanized(optimizer, options, known) for optimizer in strategy.optimizers]
    if any(new is not old for new, old in zip(wanted, strategy.optimizers, strict=True)):
        strategy.optimizers = wanted
    return _ours(strategy)


def _ours(strategy: Strategy) -> list[MechanicOptimizer]:
    return [optimizer for optimizer in strategy.optimizers if isinstance(optimizer, MechanicOptimizer)]


def release(strategy: Strategy, schedulers: Iterable[Any]) -> None:
    """Restores a module's own optimizers and schedulers for a later fit, with Mechanic or without.

    The strategy keeps the mechanized optimizers: checkpoints may be saved after fit. Their tuners are written to the
    param groups, where the next `mechanize` of the same base finds them.
    """
    for scheduler in schedulers:  # Lightning rejects a scheduler whose optimizer was not returned with it
        if isinstance(scheduler.optimizer, MechanicOptimizer):
            scheduler.optimizer = scheduler.optimizer.base
    for planted in ("_init_optimizers", "load_checkpoint"):
        vars(strategy).pop(planted, None)
    for optimizer in _ours(strategy):
        optimizer.write_tuner()


def mechanize_before_the_engine(strategy: Any, options: Options) -> None:
    """Mechanizes before DeepSpeed's engine is built, which happens before `on_fit_start`."""
    import_module("mechanic_plugins.deepspeed")
    configure = type(strategy)._init_optimizers

    def _init_optimizers() -> tuple[Optimizer, Any]:
        optimizer, config = configure(strategy)
        return _mechanized(optimizer, options, ()), config

    strategy._init_optimizers = _init_optimizers


def _mechanic_of(strategy: Any) -> MechanicOptimizer:
    found: MechanicOptimizer | None = import_module("mechanic_plugins.deepspeed").mechanic_of(strategy.deepspeed_engine)
    if found is None:
        raise ValueError(
            f"the DeepSpeed config builds its own optimizer, {strategy.config.get('optimizer')}, without Mechanic: "
            "return it from configure_optimizers instead, or set its type to MechanicAdamW, MechanicSGD, ..."
        )
    return found


def load_plain_checkpoints_without_mechanic(strategy: Strategy) -> None:
    """Loads sharded checkpoints without Mechanic's entries into the base: torch would reject them."""
    load = type(strategy).load_checkpoint

    def load_checkpoint(checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        if is_sharded_without_mechanic(checkpoint_path):
            for optimizer in _ours(strategy):
                strip(optimizer.param_groups, optimizer.state)
            strategy.optimizers = [o.base if isinstance(o, MechanicOptimizer) else o for o in strategy.optimizers]
        return load(strategy, checkpoint_path, *args, **kwargs)

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def is_sharded_without_mechanic(path: str | Path) -> bool:
    """Whether this is a folder of torch.distributed.checkpoint that was saved without Mechanic; warns if so."""
    if not (Path(path) / ".metadata").is_file():
        return False
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    if any(name in key for key in keys for name in (DELTA, REF)):
        return False
    rank_zero_warn(
        f"{path} was saved without Mechanic: the optimizer's moments are kept, and the scale is learned from scratch, "
        "starting at the loaded weights."
    )
    return True


def _mechanized(optimizer: Any, options: Options, known: Sequence[MechanicOptimizer]) -> Optimizer:
    proxies: Any = tuple(module.core.optimizer.LightningOptimizer for module in LIGHTNINGS)
    optimizer = optimizer._optimizer if isinstance(optimizer, proxies) else optimizer
    if isinstance(optimizer, MechanicOptimizer):
        if options != DEFAULTS and not any(optimizer is mine for mine in known):
            rank_zero_warn(
                "configure_optimizers returned a mechanized optimizer, so the Mechanic callback's options are ignored. "
                "Pass them to mechanize(), and use Mechanic() for the logs."
            )
        return optimizer
    if type(optimizer).__name__ == "_MockOptimizer":  # configure_optimizers returned None; Lightning has warned
        return optimizer  # type: ignore[no-any-return]
    return next((mine for mine in known if mine.base is optimizer), None) or mechanize(optimizer, **options)


def redirect_schedulers(strategy: Strategy, optimizers: Sequence[MechanicOptimizer]) -> list[Any]:
    """Points schedulers of a base at its wrapper, and returns them.

    Otherwise LearningRateMonitor would list base and wrapper as two optimizers.
    """
    redirected = []
    for config in strategy.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        for optimizer in optimizers:
            if getattr(scheduler, "optimizer", None) is optimizer.base:
                scheduler.optimizer = optimizer
                redirected.append(scheduler)
    return redirected
