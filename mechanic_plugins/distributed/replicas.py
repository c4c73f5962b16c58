"""Which parameters DistributedDataParallel keeps equal on all ranks, and which are local to a rank.

Replicas have equal sums and take equal steps without communication. Local parameters, such as experts, break that: the
ranks' sums differ, so their scales diverge, and with them the weights that all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mechanic_plugins.distributed.engines import live_objects
from mechanic_plugins.distributed.reduction import WHOLE, Reduction, Shares, reachable_device

__all__ = ["refuse_join", "said_by_owners", "shares_of_replicas"]

T = TypeVar("T")


def shares_of_replicas(params: Sequence[Tensor]) -> Shares:
    """The shares of parameters that are not sharded. Takes one small collective if DDP holds them.

    All ranks take part: DDP's ranks step together, and a rank cannot know whether another one has local parameters.
    """
    wrappers = _wrappers_of(params)
    if not wrappers or any(map(_is_joining, wrappers)):
        return WHOLE
    group = _only_group(wrappers)
    averaged = (p for w in wrappers for p in (*w._module_parameters, *w._delay_all_reduce_params))
    shared = set(map(id, averaged))
    own = [p for p in params if id(p) not in shared and p.requires_grad]
    rows = _gathered(own, group, params[0].device)
    if not any(count for count, *_ in rows):
        return WHOLE
    rank = dist.get_rank(group)
    weights = dict.fromkeys(map(id, params), 1 / len(rows))
    own_weights = dict.fromkeys(map(id, own), 1 / max(rows.count(rows[rank]), 1))
    return Shares(
        Reduction(group),
        {**weights, **own_weights},
        has_local=True,
        own=frozenset(id(p) for p in params if id(p) not in shared),
        speaks_for_own=rows[rank] not in rows[:rank],
    )


def said_by_owners(mine: list[T], shares: Shares) -> list[T]:
    """What the ranks say about their local parameters, once for each of these, in the same order on all ranks."""
    told: list[Any] = [None] * dist.get_world_size(shares.reduction.group)
    dist.all_gather_object(told, mine if shares.speaks_for_own else [], group=shares.reduction.group)
    return list(chain(*told))


def refuse_join(params: Sequence[Tensor]) -> None:
    """Rejects DDP's Join: a rank without batches stops stepping, and the others would wait for its sums.

    Raises:
        RuntimeError: A DDP module of the parameters is in such a context.
    """
    if any(map(_is_joining, _wrappers_of(params))):
        raise RuntimeError(
            "sync_replicas=True does not work under torch.distributed.algorithms.Join: a rank without further batches "
            "stops stepping, and the others wait for its sums. Give every rank the same number of batches "
            "(drop_last=True in the DistributedSampler), or leave sync_replicas False."
        )


def _wrappers_of(params: Sequence[Tensor]) -> list[Any]:
    """Live DDP modules that hold any of the parameters. Parameters do not refer to them."""
    ours = set(map(id, params))
    live = live_objects(lambda kind: issubclass(kind, DistributedDataParallel))
    known = dist.distributed_c10d._world.pg_map  # skips modules whose group was destroyed
    return [w for w in live if w.process_group in known and not ours.isdisjoint(map(id, w.module.parameters()))]


def _is_joining(wrapper: Any) -> bool:
    return bool(wrapper._join_config.enable)


def _only_group(wrappers: Sequence[DistributedDataParallel]) -> Any:
    groups = {tuple(dist.get_process_group_ranks(w.process_group)): w.process_group for w in wrappers}
    if len(groups) > 1:
        raise RuntimeError(
            f"the parameters are in DistributedDataParallel modules over different ranks, {sorted(groups)}: give each "
            "of those modules a mechanized optimizer of its own."
        )
    return next(iter(groups.values()))


def _gathered(own: Sequence[Tensor], group: Any, device: torch.device) -> list[tuple[float, ...]]:
    """Per rank, the number of its local parameters and two sums that identify them."""
    place = reachable_device(group, device)
    numbers = torch.zeros(3, dtype=torch.float64, device=place)
    for p in own:
        sizes = p.detach().abs().double()
        numbers += torch.stack([sizes.new_ones(()), sizes.sum(), sizes.square().sum()]).to(place)
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, numbers, group=group)
    return [tuple(row.tolist()) for row in rows]
