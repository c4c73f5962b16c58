"""Set-ups whose sums cannot be counted correctly are refused with a clear message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from setups import SETUPS, make_net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mechanic_plugins import mechanize


def _message(params: Any, *, fused: bool = False, **options: Any) -> str:
    optimizer = mechanize(torch.optim.AdamW(params, fused=fused), **options)
    for p in params:
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def partial(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    return _message([nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))])


def _my_half(rank: int) -> DeviceMesh:
    halves = [DeviceMesh("cpu", half) for half in ([0, 1], [2, 3])]
    return halves[rank // 2]


def half_the_world(rank: int) -> str:
    mine = _my_half(rank)
    model = fully_shard(nn.Linear(4, 4), mesh=mine)
    return _message(list(model.parameters()))


def half_the_world_with_its_group(rank: int) -> str:
    mine = _my_half(rank)
    model = fully_shard(nn.Linear(4, 4), mesh=mine)
    return _message(list(model.parameters()), group=mine.get_group())


def group_too_small(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    return _message(list(model.parameters()), group=mesh["dp"].get_group())


def fsdp1_over_tp(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    wrapped = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu")
    )
    return _message(list(wrapped.parameters()))


def pipeline_stage(rank: int) -> str:
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"), input_args=torch.zeros(1, 2))
    message = _message(list(stage.submod.parameters()))
    assert _message(list(stage.submod.parameters()), group=dist.new_subgroups(1)[0]) == ""
    return message


def mixed_group(rank: int) -> str:
    setup = SETUPS["fsdp2_ignored"](make_net(even=False, dtype=torch.float32))
    return _message(list(setup.model.parameters()), fused=True)


@pytest.mark.parametrize(
    ("function", "world", "sentence"),
    [
        (partial, 2, "Redistribute it to Shard or Replicate"),
        (half_the_world, 4, "covers 2 of 4 ranks: pass mechanize"),
        (half_the_world_with_its_group, 4, ""),
        (group_too_small, 4, "pass a group that holds every rank"),
        (fsdp1_over_tp, 4, "use fully_shard"),
        (pipeline_stage, 2, "with the ranks of one stage"),
        (mixed_group, 2, "put them into two groups"),
    ],
)
def test_refused(ranks: Callable[[int], Ranks], function: Callable[[int], str], world: int, sentence: str) -> None:
    for message in ranks(world)(function):
        assert (sentence in message) if sentence else message == ""
