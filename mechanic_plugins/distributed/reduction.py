"""Local sums in, global sums out.

The optimizer holds one reduction and never asks whether it is distributed: on one process it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AllReduce", "Identity", "Reduction", "reachable_device"]


class Reduction(Protocol):
    """Starts a reduction of a small float64 vector; calling what `start` returns waits for it."""

    spans_ranks: ClassVar[bool]
    """Whether other ranks have come to the same decision."""

    def start(self, sums: Tensor) -> Callable[[], Tensor]: ...


@dataclass(frozen=True)
class Identity:
    """Nothing is sharded: the local sums are the global ones."""

    spans_ranks: ClassVar[bool] = False

    def start(self, sums: Tensor) -> Callable[[], Tensor]:
        return lambda: sums


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of the vector over `group` (None: all ranks).

    Every rank gets the same bits, so every rank's tuner takes the same step.
    """

    group: dist.ProcessGroup | None
    spans_ranks: ClassVar[bool] = True

    def start(self, sums: Tensor) -> Callable[[], Tensor]:
        vector = sums.to(reachable_device(self.group, sums.device), copy=True)
        work = dist.all_reduce(vector, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return vector.to(sums.device)

        return wait


def reachable_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where the group can reduce: CPU-offloaded shards have sums on the CPU, and NCCL reduces on GPUs only.

    A group of gloo's may be for the CPU only.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    kinds = [d.type for d in group._device_types]
    if device.type in kinds:
        return device
    kind = next((k for k in kinds if k != "cpu"), None)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
