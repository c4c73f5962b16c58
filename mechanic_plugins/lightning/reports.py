"""The logged metrics, the progress bar, and the report at the end of fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mechanic_plugins.lightning.packages import rank_zero_info, rank_zero_warn
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.optimizer.readings import names_of
from mechanic_plugins.summary import ScaleHistory, remarks, report, rules

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BAR", "is_logged", "log_rules", "metrics", "show_digits", "summarize"]

BAR = "mechanic_lr"
"""The effective lr's name in the progress bar, which truncates longer ones."""


def is_logged(trainer: Trainer) -> bool:
    """Whether to log in this step: logging takes longer than a small model's step."""
    if trainer.barebones:
        return False
    return bool(trainer._logger_connector.should_update_logs) or trainer.is_last_batch


def metrics(optimizers: Sequence[MechanicOptimizer]) -> dict[str, Tensor]:
    """Scale and effective lr as 0-dim tensors, without synchronising with the device.

    Names follow LearningRateMonitor: `-1`, `-2` for further optimizers, `/pg1` or the group's name for groups.
    """
    logged = {}
    for index, optimizer in enumerate(optimizers):
        suffix = f"-{index}" if index else ""
        scales = optimizer.scales.detach().unbind()
        lrs = [scale * lr for scale, lr in zip(scales, optimizer.lrs, strict=True)]
        logged[f"mechanic/scale{suffix}"] = optimizer.scale.detach()
        logged[f"mechanic/effective_lr{suffix}"] = lrs[0] if len(lrs) == 1 else torch.stack(lrs).max()
        if len(lrs) > 1:
            names = names_of(optimizer.param_groups)
            logged |= {f"mechanic/effective_lr{suffix}/{name}": lr for name, lr in zip(names, lrs, strict=True)}
            if optimizer.settings.scope == "group":
                logged |= {f"mechanic/scale{suffix}/{name}": s for name, s in zip(names, scales, strict=True)}
    return logged


def log_rules(trainer: Trainer, optimizers: Sequence[MechanicOptimizer]) -> None:
    """Adds each optimizer's rule to the loggers' hyper-parameters, once it is known what will train."""
    for logger in trainer.loggers if optimizers else ():
        logger.log_hyperparams(rules(optimizers))


def show_digits(trainer: Trainer) -> None:
    """Gives the learning rate significant digits in the progress bar: Rich's bar shows three decimals."""
    bar: Any = trainer.progress_bar_callback
    if bar is None or "get_metrics" in vars(bar):
        return

    def get_metrics(*args: Any) -> dict[str, Any]:
        shown = type(bar).get_metrics(bar, *args)
        ours = {k: f"{v:.3g}" for k, v in shown.items() if k.startswith(BAR) and not isinstance(v, str)}
        return {**shown, **ours}

    bar.get_metrics = get_metrics


def summarize(
    trainer: Trainer, optimizers: Sequence[MechanicOptimizer], histories: Mapping[MechanicOptimizer, ScaleHistory]
) -> None:
    """Reports the learning rate that each optimizer learned, and what looks wrong."""
    for index, optimizer in enumerate(optimizers):
        suffix = f"-{index}" if index else ""
        for logger in trainer.loggers if optimizer in histories else ():
            logger.log_metrics({f"mechanic/peak_lr{suffix}": optimizer.learned_lr}, step=trainer.global_step)
        name = f"{type(optimizer.base).__name__}{suffix}"
        rank_zero_info(f"{name}: {report(optimizer)}")
        for remark in remarks(optimizer, histories.get(optimizer)):
            rank_zero_warn(f"{name}: {remark}")
