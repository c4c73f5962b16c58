"""What is refused or warned of before training starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mechanic_plugins.lightning.packages import LIGHTNINGS, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "DEEPSPEED",
    "check_callbacks",
    "check_strategy",
    "is_a",
    "warn_of_floors",
]

DEEPSPEED = ("DeepSpeedStrategy",)


def check_callbacks(trainer: Trainer, mechanic: object) -> None:
    """Refuses Mechanic twice and a learning rate finder; a batch size finder measures too little."""
    if sum(isinstance(callback, type(mechanic)) for callback in _callbacks(trainer)) > 1:
        raise _misconfiguration(
            trainer, "Mechanic is in the Trainer's callbacks more than once: keep one. It serves all optimizers."
        )
    if _has_callback(trainer, "LearningRateFinder"):
        raise _misconfiguration(
            trainer,
            "LearningRateFinder together with Mechanic: there is nothing to find, Mechanic learns the learning rate "
            "while it trains, whatever lr the optimizer has. Remove LearningRateFinder, or the call of Tuner.lr_find.",
        )
    if _has_callback(trainer, "BatchSizeFinder"):
        rank_zero_warn(
            "BatchSizeFinder tries batch sizes without Mechanic, which needs one more value per parameter than the "
            "optimizer alone: take a somewhat smaller batch than it finds."
        )


_TESTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", *DEEPSPEED)


def check_strategy(trainer: Trainer) -> None:
    """Refuses strategies that cannot work, and warns of those that nobody has tried."""
    strategy = trainer.strategy
    if is_a(strategy, ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")):
        raise _misconfiguration(
            trainer,
            f"{type(strategy).__name__} is not supported: Mechanic was never run on XLA devices. "
            "Train on CPU or GPU, or without Mechanic.",
        )
    if is_a(strategy, ("FSDPStrategy",)) and trainer.world_size > 1 and trainer.precision in ("bf16-true", "16-true"):
        raise _misconfiguration(
            trainer,
            f"FSDPStrategy with precision={trainer.precision!r} could not save a checkpoint: torch's FSDP1 wants all "
            "state of a weight in one dtype, and Mechanic keeps a float32 sum beside 16-bit weights. "
            "Use ModelParallelStrategy (FSDP2), which saves both, or precision='bf16-mixed'.",
        )
    if not is_a(strategy, _TESTED):
        rank_zero_warn(
            f"Mechanic was never tried with {type(strategy).__name__}: compare `mechanic/scale` on all ranks, which "
            f"must be equal. Tried: {', '.join(_TESTED)}."
        )


def warn_of_floors(schedulers: Iterable[Any]) -> None:
    """A schedule that ends at a learning rate, not at a share of the optimizer's, makes the choice of lr matter."""
    for scheduler in schedulers:
        name, floor = _floor(scheduler)
        if floor > 0:
            lr = _highest_lr(scheduler)
            rank_zero_warn(
                f"{type(scheduler).__name__}({name}={floor:g}) is an absolute learning rate. Mechanic scales it "
                f"together with the optimizer's lr={lr:g}: the floor is {floor / lr if lr else math.inf:.3g} times the "
                f"peak, and would be another with another lr. To have the same with any lr, write {name}=share * lr."
            )
        warn_of_floors(getattr(scheduler, "_schedulers", ()))


def _floor(scheduler: Any) -> tuple[str, float]:
    """The argument that sets a lowest learning rate, and its value; none where another sets the highest."""
    if hasattr(scheduler, "max_lrs"):
        return "", 0.0
    if hasattr(scheduler, "min_lrs"):  # ReduceLROnPlateau
        return "min_lr", max(map(float, scheduler.min_lrs))
    return "eta_min", float(getattr(scheduler, "eta_min", 0.0))


def _highest_lr(scheduler: Any) -> float:
    lrs = getattr(scheduler, "base_lrs", None) or [group["lr"] for group in scheduler.optimizer.param_groups]
    return max(map(float, lrs))


def _has_callback(trainer: Trainer, name: str) -> bool:
    return any(is_a(callback, (name,)) for callback in _callbacks(trainer))


def _callbacks(trainer: Any) -> list[object]:
    return list(trainer.callbacks)  # which the Trainer's own annotations forget


def is_a(thing: object, names: Iterable[str]) -> bool:
    """By name, since both Lightnings have a class of that name."""
    return not {cls.__name__ for cls in type(thing).__mro__}.isdisjoint(names)


def _misconfiguration(trainer: Trainer, message: str) -> Exception:
    """The exception class of the trainer's own package."""
    package = next(module for module in LIGHTNINGS if isinstance(trainer, module.Trainer))
    error: Exception = package.utilities.exceptions.MisconfigurationException(message)
    return error
