"""Ranks that share only some weights, fail alone or stop early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from setups import Run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.distributed.sharding import shares_of

STEPS = 60


class Experts(nn.Module):
    """Two shared layers and, on ranks with an expert, a layer between them that DDP does not average."""

    def __init__(self, rank: int, *, has_expert: bool, same_start: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
        torch.manual_seed(1 if same_start else 10 + rank)
        self.expert = nn.Linear(6, 6).double() if has_expert else nn.Tanh()
        ignored = [name for name, _ in self.named_parameters() if "expert" in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.expert(torch.tanh(self.a(x)))))


def train_experts(rank: int, everywhere: bool, by_hand: bool) -> dict[str, Any]:
    model = Experts(rank, has_expert=everywhere or rank == 0, same_start=by_hand)
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = mechanize(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        opt.zero_grad()
        (wrapped(x) - x[:, :3].sin()).square().mean().backward()
        if by_hand:
            for p in model.expert.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        opt.step()
    weights = shares_of([p for group in opt.param_groups for p in group["params"]]).weights
    return {
        "shared": model.a.weight.tolist(),
        "scale": opt.scale.item(),
        "expert": model.expert.weight.tolist() if hasattr(model.expert, "weight") else None,
        "counted": sorted(set(weights.values())),
    }


@pytest.mark.parametrize("everywhere", [True, False], ids=["an expert a rank", "an expert on one rank"])
def test_experts_of_single_ranks_do_not_pull_the_shared_weights_apart(
    ranks: Callable[[int], Ranks], everywhere: bool
) -> None:
    """Each rank's sums used to include its own experts: scales diverged, and shared weights by 0.005 in 100 steps."""
    results = ranks(2)(train_experts, everywhere, False)
    assert results[0]["shared"] == results[1]["shared"]
    assert results[0]["scale"] == results[1]["scale"] > 0
    assert results[0]["expert"] != results[1]["expert"]
    assert results[0]["counted"] == [0.5, 1.0]  # shared weights half per rank, the expert in full


class BothExperts(nn.Module):
    """The shared layers and the experts of two ranks, for whole batches."""

    def __init__(self) -> None:
        super().__init__()
        of_ranks = [Experts(rank, has_expert=True, same_start=False) for rank in range(2)]
        self.a, self.b, self.experts = of_ranks[0].a, of_ranks[0].b, nn.ModuleList(each.expert for each in of_ranks)
        for p in self.experts.parameters():
            p.register_hook(lambda grad: 2 * grad)  # a rank's own gradients are of the mean over its own half

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.experts, torch.tanh(self.a(x)).chunk(2), strict=True)
        return self.b(torch.tanh(torch.cat([expert(part) for expert, part in parts])))


def test_experts_of_single_ranks_are_measured_as_in_one_process(ranks: Callable[[int], Ranks]) -> None:
    """Their changes used to be summed as if they were shards of one weight."""
    results = ranks(2)(train_experts, True, False)
    model = BothExperts()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(STEPS):
        x = torch.cat([torch.randn(16, 6, generator=each, dtype=torch.float64) for each in generators])
        opt.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        opt.step()
    assert results[0]["scale"] == pytest.approx(opt.scale.item(), rel=1e-9)
    torch.testing.assert_close(torch.tensor(results[0]["shared"], dtype=torch.float64), model.a.weight.detach())
    for result, expert in zip(results, model.experts, strict=True):
        torch.testing.assert_close(torch.tensor(result["expert"], dtype=torch.float64), expert.weight.detach())


def test_replicas_averaged_by_hand_are_counted_once(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(2)(train_experts, True, True)
    assert results[0]["shared"] == results[1]["shared"]
    assert results[0]["expert"] == results[1]["expert"]
    assert results[0]["counted"] == [0.5]


def two_groups_of_ranks(rank: int) -> str:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    halves = [dist.new_group([0]), dist.new_group([1])]
    modules = [
        nn.parallel.DistributedDataParallel(first),
        nn.parallel.DistributedDataParallel(second, process_group=halves[rank]),
    ]
    opt = mechanize(torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1))
    modules[1](modules[0](torch.ones(1, 2))).sum().backward()
    try:
        opt.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_modules_over_different_ranks_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2)(two_groups_of_ranks):
        assert "give each of those modules a mechanized optimizer of its own" in message


def fail_alone(rank: int) -> dict[str, Any]:
    run = Run.start("fsdp2")
    for step in range(12):
        run.backward(step)
        fails = step == 6 and rank == 1
        if fails:
            run.optimizer.base.register_step_pre_hook(_fail)
        with contextlib.suppress(MemoryError):
            run.optimizer.step()
        if fails:
            run.optimizer.base._optimizer_step_pre_hooks.clear()
        run.optimizer.zero_grad()
    opt: MechanicOptimizer = run.optimizer
    return {"scale": opt.scale.item(), "steps": opt.metrics()["mechanic/steps"], "s": opt.tuner.s.tolist()}


def _fail(*_: Any) -> None:
    raise MemoryError


def test_a_rank_whose_base_fails_alone_plays_on_at_the_others_scale(ranks: Callable[[int], Ranks]) -> None:
    """Its tuner used to roll back while the other ranks' continued: two scales in one model from then on."""
    results = ranks(2)(fail_alone)
    assert results[0] == results[1]
    assert results[0]["steps"] == 12


def join(rank: int, sync_replicas: bool) -> str:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1), sync_replicas=sync_replicas)
    message = ""
    with Join([model]):
        for _ in range(4 + 2 * rank):
            opt.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            try:
                opt.step()
            except RuntimeError as error:
                message = str(error)
    return message


def test_sync_replicas_under_join_is_refused_before_a_rank_waits(ranks: Callable[[int], Ranks]) -> None:
    """The ranks' collectives used to get out of step, which ended in SIGABRT."""
    assert ranks(2)(join, False) == ["", ""]
    for message in ranks(2)(join, True):
        assert "drop_last=True in the DistributedSampler" in message
