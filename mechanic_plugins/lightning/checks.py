"""Checks of the Trainer before training starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mechanic_plugins.lightning.packages import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["DEEPSPEED", "check_callbacks", "check_strategy", "is_a", "warn_of_floors"]

DEEPSPEED = ("DeepSpeedStrategy",)


def check_callbacks(trainer: Any, mechanic: object) -> None:
    """Rejects a second Mechanic and a learning rate finder; warns about a batch size finder."""
    if sum(isinstance(callback, type(mechanic)) for callback in trainer.callbacks) > 1:
        raise ValueError("the Trainer has more than one Mechanic callback: keep one, which serves all optimizers.")
    if any(is_a(callback, ("LearningRateFinder",)) for callback in trainer.callbacks):
        raise ValueError(
            "LearningRateFinder cannot be combined with Mechanic, which learns the learning rate during training, for "
            "any lr of the optimizer. Remove LearningRateFinder, or the call to Tuner.lr_find."
        )
    if any(is_a(callback, ("BatchSizeFinder",)) for callback in trainer.callbacks):
        rank_zero_warn(
            "BatchSizeFinder tries batch sizes without Mechanic, which stores one more value per parameter: use a "
            "somewhat smaller batch than it finds."
        )


_TESTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", *DEEPSPEED)


def check_strategy(trainer: Trainer) -> None:
    """Rejects strategies that cannot work, and warns about untested ones."""
    strategy = trainer.strategy
    if is_a(strategy, ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")):
        raise ValueError(
            f"{type(strategy).__name__} is not supported: Mechanic is untested on XLA devices. "
            "Train on CPU or GPU, or without Mechanic."
        )
    if is_a(strategy, ("FSDPStrategy",)) and trainer.world_size > 1 and trainer.precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"FSDPStrategy with precision={trainer.precision!r} cannot save checkpoints: FSDP1 requires one dtype for "
            "all state of a weight, and Mechanic keeps float32 copies of 16-bit weights. Use ModelParallelStrategy "
            "(FSDP2), or precision='bf16-mixed'."
        )
    if not is_a(strategy, _TESTED):
        rank_zero_warn(
            f"Mechanic is untested with {type(strategy).__name__}: check that `mechanic/scale` is equal on all ranks. "
            f"Tested: {', '.join(_TESTED)}."
        )


def warn_of_floors(schedulers: Iterable[Any]) -> None:
    """Warns of schedules that end at an absolute learning rate: training then depends on the optimizer's lr."""
    for scheduler in schedulers:
        name, floor = _floor(scheduler)
        if floor > 0:
            lr = _highest_lr(scheduler)
            rank_zero_warn(
                f"{type(scheduler).__name__}({name}={floor:g}) is an absolute learning rate. Mechanic scales it "
                f"together with the optimizer's lr={lr:g}, so the floor is {floor / lr if lr else math.inf:.3g} times "
                f"the peak and depends on lr. To make it independent, write {name}=fraction * lr."
            )
        warn_of_floors(getattr(scheduler, "_schedulers", ()))


def _floor(scheduler: Any) -> tuple[str, float]:
    """The argument that sets the lowest learning rate, and its value; 0 if the schedule sets its own highest lr."""
    if hasattr(scheduler, "max_lrs"):
        return "", 0.0
    if hasattr(scheduler, "min_lrs"):  # ReduceLROnPlateau
        return "min_lr", max(map(float, scheduler.min_lrs))
    return "eta_min", float(getattr(scheduler, "eta_min", 0.0))


def _highest_lr(scheduler: Any) -> float:
    lrs = getattr(scheduler, "base_lrs", None) or [group["lr"] for group in scheduler.optimizer.param_groups]
    return max(map(float, lrs))


def is_a(thing: object, names: Iterable[str]) -> bool:
    """`isinstance` by name, since both Lightning packages have a class of that name."""
    return not {cls.__name__ for cls in type(thing).__mro__}.isdisjoint(names)
