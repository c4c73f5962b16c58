"""Reduces local sums to global ones.

The optimizer always holds a reduction; on one process it is the identity.
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
    """Starts the reduction of a small float64 vector; the function that `start` returns waits for the result."""

    spans_ranks: ClassVar[bool]
    """Whether other ranks get the same sums and take the same decision."""

    def start(self, sums: Tensor) -> Callable[[], Tensor]: ...


@dataclass(frozen=True)
class Identity:
    """Nothing is sharded: local sums are global."""

    spans_ranks: ClassVar[bool] = False

    def start(self, sums: Tensor) -> Callable[[], Tensor]:
        return lambda: sums


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of the vector over `group` (None: all ranks).

    All ranks get the same bits, so all tuners take the same step.
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
    """The device on which the group can reduce.

    CPU-offloaded shards have their sums on the CPU, while NCCL reduces on GPUs only; a gloo group may be CPU-only.
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
