"""Reduces local sums to global ones.

The optimizer always holds a reduction; on one process it leaves the sums as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["WHOLE", "Reduction", "Shares", "reachable_device"]


@dataclass(frozen=True)
class Reduction:
    """One all-reduce of a small float64 vector over `group` (None: all ranks), or none where nothing is sharded.

    All ranks get the same bits, so all tuners take the same step.
    """

    group: dist.ProcessGroup | None = None
    spans_ranks: bool = True

    def of_floats(self, sums: list[float]) -> list[float]:
        """The sums over all ranks, as floats. Waits for the other ranks."""
        if not self.spans_ranks:
            return sums
        total: list[float] = self(torch.tensor(sums, dtype=torch.float64)).tolist()
        return total

    def __call__(self, sums: Tensor) -> Tensor:
        if not self.spans_ranks:
            return sums
        vector = sums.to(reachable_device(self.group, sums.device), copy=True)
        dist.all_reduce(vector, group=self.group)
        return vector.to(sums.device)


@dataclass(frozen=True)
class Shares:
    """How the local sums of a list of parameters are reduced to global ones."""

    reduction: Reduction
    weights: dict[int, float]
    """The factor on this rank's sums, by id of the parameter; 1 if not listed."""
    has_local: bool = False
    """Whether some parameters, such as experts, are a rank's alone: others may have no gradient for theirs."""
    own: frozenset[int] = frozenset()
    """The ids of those that are this rank's."""
    speaks_for_own: bool = False
    """Whether no rank before this one has the same of its own."""


WHOLE = Shares(Reduction(spans_ranks=False), {})
"""For ranks that have the global sums already."""


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
