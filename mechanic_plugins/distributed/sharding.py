"""Which shard of a parameter this rank holds, and its weight in the global sums.

With W ranks and a parameter in k distinct shards, each shard lives on W / k ranks. So the sum over all ranks of
(k / W) * local sum counts the whole parameter once, under any mix of sharding and replication. The number of shards is
read off the parameters, never off the gradients: a rank without gradients must still reach the all-reduce.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mechanic_plugins.distributed.engines import live_objects
from mechanic_plugins.distributed.reduction import WHOLE, Reduction, Shares
from mechanic_plugins.distributed.replicas import refuse_join, shares_of_replicas

__all__ = ["align_gradients", "fsdp1_handles", "is_dtensor", "is_fake", "local", "shares_of", "with_real_tensors"]

_PLAIN = (torch.nn.Parameter, Tensor, type(None))
"""The common types, recognised without importing DTensor."""


def shares_of(
    params: Sequence[Tensor], *, group: dist.ProcessGroup | None = None, sync_replicas: bool = False
) -> Shares:
    """This rank's share in the sums of each parameter, determined from the parameters alone.

    Args:
        params: All parameters of the optimizer, in the same order on every rank.
        group: The ranks that share these parameters; all ranks when None.
        sync_replicas: Average the sums over replicas even if nothing is sharded: on different hardware they may differ
            by rounding. DDP's are always averaged if a rank has local parameters.

    Raises:
        RuntimeError: The parameters cannot be counted correctly.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    if group is None and is_distributed:
        _refuse_pipelines(params)
    shards = _shard_counts(params)
    sharded = any(count > 1 for count in shards)
    if not (sharded or sync_replicas):
        return shares_of_replicas(params) if is_distributed else WHOLE
    if not is_distributed:
        raise RuntimeError(
            "sync_replicas=True needs torch.distributed: call init_process_group() first, or leave it False."
        )
    _refuse_what_cannot_be_counted(params, group)
    refuse_join(params)
    size = dist.get_world_size(group)
    for count in shards:
        if size % count:
            raise RuntimeError(
                f"a parameter is in {count} shards, which do not divide the group's {size} ranks: "
                "pass mechanize(..., group=...) with the group of ranks that share the parameters."
            )
    return Shares(Reduction(group), {id(p): k / size for p, k in zip(params, shards, strict=True)})


def is_dtensor(t: object) -> bool:
    """Whether this is a DTensor. Does not import its module, which takes a second: until then there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_fake(params: Sequence[Tensor]) -> bool:
    """Whether the parameters belong to a FakeTensorMode: shapes without data, used to estimate memory."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and len(params) > 0 and isinstance(local(params[0]), module.FakeTensor)


def local(t: Any) -> Any:
    """This rank's shard. Do not keep it across steps: FSDP may replace the tensor."""
    if type(t) in _PLAIN:
        return t
    return t._local_tensor if is_dtensor(t) else t


def with_real_tensors() -> AbstractContextManager[None]:
    """A context in which new tensors have data, even under a FakeTensorMode."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return nullcontext() if module is None else module.unset_fake_temporarily()


def align_gradients(params: Iterable[Tensor]) -> None:
    """Gives each gradient its parameter's placement.

    Sequence-parallel norms have replicated weights and Partial gradients, which must be summed before the step.
    """
    for p in params:
        if type(p) in _PLAIN:
            continue
        if p.grad is not None and is_dtensor(p) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = p.grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]


def _shard_counts(params: Sequence[Tensor]) -> list[int]:
    flattened = [p for p in params if getattr(p, "_fsdp_flattened", False)]
    fsdp1 = _fsdp1_shards(set(map(id, flattened))) if flattened else {}
    if any(id(p) not in fsdp1 for p in flattened):
        raise RuntimeError(
            "an FSDP parameter has no live FSDP module: build the optimizer from the parameters of the wrapped model "
            "and keep that model alive."
        )
    return [_dtensor_shards(p) if is_dtensor(p) else fsdp1.get(id(p), 1) for p in params]


def _dtensor_shards(p: Any) -> int:
    count = 1
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if placement.is_partial():
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has placement {placement}: the ranks hold its summands, "
                "whose norms do not add up to its norm. Redistribute it to Shard or Replicate first."
            )
        if not placement.is_replicate():  # Shard, and _StridedShard, whose is_shard() is False
            count *= size
    return count


def _fsdp1_shards(ids: set[int]) -> dict[int, int]:
    """The number of shards by id of the parameter."""
    shards = {}
    for handle, held in fsdp1_handles(ids):
        flat = handle.flat_param
        if any(extension is not None for extension in getattr(flat, "_param_extensions", ())):
            raise RuntimeError("FSDP1 over tensor-parallel parameters is not supported: use fully_shard (FSDP2).")
        shards.update(dict.fromkeys(held, handle.world_size if handle.uses_sharded_strategy else 1))
    return shards


def fsdp1_handles(ids: set[int]) -> Iterator[tuple[Any, list[int]]]:
    """FSDP1's handles of the parameters with these ids, and the ids of all that each handle holds.

    Parameters do not refer to their handle.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    for handle in live_objects(lambda kind: kind is FlatParamHandle):
        flat = handle.flat_param
        held = [id(p) for p in (flat, *(flat._params or ()), *(flat._shared_params or ()))]
        if not ids.isdisjoint(held):  # or it belongs to another model
            yield handle, held


def _refuse_what_cannot_be_counted(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    if group is None:
        ranks = {rank for mesh in _root_meshes(params) for rank in mesh.mesh.flatten().tolist()}
        if ranks and len(ranks) != dist.get_world_size():
            raise RuntimeError(
                f"the parameters' device mesh covers {len(ranks)} of {dist.get_world_size()} ranks: "
                "pass mechanize(..., group=...) with the group of ranks that share the parameters."
            )
        return
    mine = set(dist.get_process_group_ranks(group))
    for p in params:
        for dim, placement in enumerate(p.placements if is_dtensor(p) else ()):  # type: ignore[attr-defined]
            sharing = dist.get_process_group_ranks(p.device_mesh.get_group(dim))  # type: ignore[attr-defined]
            if not placement.is_replicate() and not mine.issuperset(sharing):
                raise RuntimeError(
                    f"a parameter is sharded over ranks {sharing}, not all of them in the group {sorted(mine)}: "
                    "pass a group that holds every rank with a shard."
                )


def _refuse_pipelines(params: Sequence[Tensor]) -> None:
    """Rejects pipeline stages: their ranks hold different parameters, which would be counted as replicas."""
    named = any("pp" in (mesh.mesh_dim_names or ()) for mesh in _root_meshes(params))
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    live = stage is not None and live_objects(lambda kind: issubclass(kind, stage._PipelineStageBase))
    if named or live:
        raise RuntimeError(
            "pipeline stages hold different parameters, which look like replicas to Mechanic: pass "
            "mechanize(..., group=...) with the ranks of one stage. Each stage then learns its own scale."
        )


def _root_meshes(params: Sequence[Tensor]) -> list[Any]:
    meshes = {id(p.device_mesh): p.device_mesh for p in params if is_dtensor(p)}  # type: ignore[attr-defined]
    return [_root(mesh) for mesh in meshes.values()]


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch < 2.9

    return _mesh_resources.get_root_mesh(mesh)
