"""Parameters and gradients that a step cannot take, refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import is_dtensor, local
from mechanic_plugins.optimizer.learned import Learned
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.slots import DELTA, MASTER, REF

__all__ = [
    "refuse_foreign",
    "refuse_mixed_groups",
    "refuse_overlaps",
    "refuse_release",
    "refuse_scale_of_zero",
    "refuse_sparse",
]


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
    if not facts.is_linear_in_lr(type(base)):
        raise ValueError(
            f"freeze(release=True) steps the base at scale * lr, and updates of {type(base).__name__} are not known to "
            "be proportional to its lr: use freeze(). If they are, say so by a class attribute, linear_in_lr = True."
        )


def refuse_scale_of_zero(learned: Learned) -> None:
    """Rejects freezing before a scale was learned: nothing would train."""
    if not any(tuner.scale > 0 for tuner in learned.wait_for_tuners()):
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


def refuse_overlaps(params: Sequence[Tensor]) -> None:
    """Refuses two parameters that share memory: each would take the other's update for its own.

    Interleaved views of one storage share no elements and are fine.
    """
    for cluster in _clusters([x for x in map(local, params) if _has_memory(x)]):
        first = min(x.data_ptr() for x in cluster)
        taken = torch.zeros(max(map(_end, cluster)) - first, dtype=torch.bool)
        for x in cluster:
            size = x.element_size()
            place = taken.as_strided(x.size(), [size * stride for stride in x.stride()], x.data_ptr() - first)
            if place.any():
                raise ValueError(
                    f"a parameter of shape {tuple(x.shape)} shares memory with another one of this optimizer: each "
                    "would be moved by the updates of both. To tie weights, use one Parameter in both places; else "
                    "give each its own memory with .clone()."
                )
            place.fill_(True)


def _has_memory(x: Tensor) -> bool:
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided
    return is_plain and x.numel() > 0 and x.device.type != "meta"


def _end(x: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors on one device whose byte ranges overlap."""
    cluster: list[Tensor] = []
    end = 0
    for x in sorted(tensors, key=lambda x: (str(x.device), x.data_ptr())):
        if cluster and (x.device != cluster[0].device or x.data_ptr() >= end):
            if len(cluster) > 1:
                yield cluster
            cluster, end = [], 0
        cluster.append(x)
        end = max(end, _end(x))
    if len(cluster) > 1:
        yield cluster
