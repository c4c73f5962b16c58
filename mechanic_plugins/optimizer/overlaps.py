"""Whether parameters share memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mechanic_plugins.distributed.sharding import local

__all__ = ["refuse_overlaps"]


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
