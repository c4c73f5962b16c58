"""Parameters and gradients that a step cannot take, refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, MASTER, REF
from mechanic_plugins.distributed.sharding import is_dtensor

__all__ = ["refuse_foreign", "refuse_mixed_groups", "refuse_release", "refuse_scale_of_zero", "refuse_sparse"]


def refuse_sparse(p: Tensor) -> None:
    """Rejects sparse gradients: the sums need dense tensors."""
    if p.grad is not None and p.grad.layout != torch.strided:
        raise ValueError(
            f"a gradient of shape {tuple(p.shape)} is sparse ({p.grad.layout}): Mechanic moves every weight in every "
            "step. Use sparse=False in the embedding, or p.grad.to_dense() before step()."
        )


def refuse_foreign(p: Tensor, state: Mapping[str, Any]) -> None:
    """Rejects state of another shape: kernels do no bounds checks."""
    for name in (DELTA, MASTER, REF):
        if name in state and state[name].shape != p.shape:
            raise ValueError(
                f"the optimizer's {name} has shape {tuple(state[name].shape)} where the parameter has shape "
                f"{tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you change a "
                "parameter's shape."
            )


def refuse_release(base: Optimizer, *, by_engine: bool) -> None:
    """Rejects bases that cannot be stepped at scale * lr without Mechanic."""
    if by_engine:
        raise ValueError(
            "freeze(release=True) cannot give memory back under DeepSpeed: the engine holds views of the optimizer's "
            "state. Use freeze(), or save a checkpoint and go on without Mechanic at the learned lr."
        )
    if not known_bases.is_linear_in_lr(type(base)):
        raise ValueError(
            f"freeze(release=True) steps the base at scale * lr, and updates of {type(base).__name__} are not known to "
            "be proportional to its lr: use freeze(). If they are, say so by a class attribute, linear_in_lr = True."
        )


def refuse_scale_of_zero(progress: Progress) -> None:
    """Rejects freezing before a scale was learned: nothing would train."""
    if not any(row.played > 0 for row in progress.tuner.rows):
        raise RuntimeError(
            "freeze() would hold a scale of 0, at which nothing trains: no scale was learned yet. Call it after the "
            "first three steps with a gradient."
        )


def refuse_mixed_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Rejects groups of DTensors and plain tensors, which torch cannot step in one foreach call."""
    for index, group in enumerate(groups):
        kinds = {is_dtensor(p) for p in group["params"]}
        if len(kinds) > 1 and (group.get("fused") or group.get("foreach")):
            raise ValueError(
                f"param group {index} mixes sharded (DTensor) and plain parameters, which fused and foreach optimizers "
                "cannot step together: put them into two groups."
            )
