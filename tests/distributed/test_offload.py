"""Shards that live on the CPU while the model computes elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import assert_same_on_all_ranks
from ranks import Ranks
from setups import BASES, STEPS, Run, collectives_of, fsdp2, make_net
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from mechanic_plugins import mechanize
from mechanic_plugins.distributed.reduction import reachable_device


def train(rank: int, offload: bool) -> dict[str, Any]:
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    setup = fsdp2(make_net(even=False, dtype=torch.float32), offload_policy=policy)
    optimizer = mechanize(BASES["adamw"](setup.model.parameters()))
    run = Run(setup, optimizer, even=False, dtype=torch.float32)
    run.train(0, STEPS)
    return run.result()


def test_offloaded_shards_train_the_same(ranks: Callable[[int], Ranks]) -> None:
    offloaded, kept = ranks(2)(train, True), ranks(2)(train, False)
    assert_same_on_all_ranks(offloaded)
    assert offloaded == kept
    assert offloaded[0]["collectives"] == collectives_of(1)


@pytest.mark.parametrize(
    ("reduces_on", "sums_on", "chosen"),
    [
        (["cpu"], "cpu", "cpu"),
        (["cuda"], "cuda:1", "cuda:1"),
        (["cuda"], "cpu", "cuda:3"),  # NCCL only, offloaded shards
        (["cpu", "cuda"], "cpu", "cpu"),
        (["cpu", "cuda"], "cuda:1", "cuda:1"),
        (["cpu"], "cuda:1", "cpu"),  # gloo, for the CPU only
    ],
)
def test_the_sums_travel_where_the_group_can_reduce(
    monkeypatch: pytest.MonkeyPatch, reduces_on: list[str], sums_on: str, chosen: str
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3))
    group: Any = SimpleNamespace(_device_types=[torch.device(kind) for kind in reduces_on])
    assert reachable_device(group, torch.device(sums_on)) == torch.device(chosen)
