"""Logs what a replaced optimizer learns in Lightning, whose Trainer was given no callback for it.

Loaded when a program builds a Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mechanic_plugins.api import find
from mechanic_plugins.lightning import Mechanic
from mechanic_plugins.lightning.packages import Callback
from mechanic_plugins.lightning.reports import is_logged, metrics

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LogLearnedLr"]


class LogLearnedLr(Callback):
    """Logs `mechanic/scale` and `mechanic/effective_lr` as the `Mechanic` callback does, where that is not there."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # which its annotations forget
        optimizers = [found for each in trainer.optimizers if (found := find(each)) is not None]
        if optimizers and is_logged(trainer) and not any(isinstance(each, Mechanic) for each in callbacks):
            pl_module.log_dict(metrics(optimizers), on_step=True, on_epoch=False)
