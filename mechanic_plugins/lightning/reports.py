"""The logged metrics, and the report at the end of fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mechanic_plugins.core.groups import names_of
from mechanic_plugins.lightning.packages import rank_zero_info, rank_zero_warn
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.summary import TOO_SHORT, ScaleHistory, is_still_rising, report

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["is_logged", "metrics", "summarize"]


def is_logged(trainer: Trainer) -> bool:
    """Whether this step's metrics are logged: logging takes longer than a small model's step."""
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


def summarize(optimizers: Sequence[MechanicOptimizer], histories: Mapping[MechanicOptimizer, ScaleHistory]) -> None:
    """Logs the learning rate that each optimizer learned, and warns if the run was too short."""
    for index, optimizer in enumerate(optimizers):
        history = histories.get(optimizer)
        name = type(optimizer.base).__name__ + (f"-{index}" if index else "")
        rank_zero_info(f"{name}: {report(optimizer, history)}")
        if history is not None and is_still_rising(history):
            rank_zero_warn(f"{name}: {TOO_SHORT}")
