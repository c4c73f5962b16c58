"""The ranks' part of the tests of low precision, non-finite gradients and experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from engines import Case, audit, backward, batches, engine_of, loss_of, model, my_part, note, start, weights_of
from torch import Tensor, nn


def run_replayed(rank: int, case: Case) -> dict[str, float]:
    """Runs stage 0 in bf16, and a plain mechanized optimizer on float32 copies with the same gradients."""
    from mechanic_plugins import mechanize

    start(rank)
    engine, opt = engine_of(case)
    masters = [p for group in opt.param_groups for p in group["params"]]
    own = list(engine.module.parameters())
    at_start = max((m - p.float()).abs().max().item() for m, p in zip(masters, own, strict=True))
    copies = [p.detach().float().clone().requires_grad_() for p in own]
    replay = mechanize(getattr(torch.optim, case.base)(copies, **case.base_options), **case.options)
    for step in range(case.steps):
        for _ in backward(engine, case, step):
            for copy, p in zip(copies, own, strict=True):
                copy.grad = p.grad.float()
        replay.step()
    first = model(case.seed).parameters()
    return {
        "distance_at_start": at_start,
        "distance_to_replay": max((m - c).abs().max().item() for m, c in zip(masters, copies, strict=True)),
        "moved": max((m - p).abs().max().item() for m, p in zip(masters, first, strict=True)),
    }


def run_with_nan(rank: int, case: Case, at: int) -> dict[str, Any]:
    """Makes ten steps, with a NaN loss on rank 1 in one of them."""
    start(rank)
    engine, opt = engine_of(case)
    seen: dict[str, Any] = {"s": [], "h": [], "scale": []}
    for step in range(10):
        before = everything(engine, opt)
        poison = math.nan if step == at and rank == 1 else 1.0
        for x, y in batches(case, step):
            engine.backward(loss_of(engine, *my_part(case, x, y)) * poison)
            engine.step()
        if step == at:
            seen.update(before=before, after=everything(engine, opt))
        note(opt, seen)
    finite = all(math.isfinite(x) for xs in weights_of(engine).values() for x in xs)
    return {**seen, "steps": opt.metrics()["mechanic/steps"], "finite_at_the_end": finite}


def everything(engine: Any, opt: Any) -> dict[str, Any]:
    """This rank's weights, moments, deltas and tuner."""
    state = [[v.tolist() if isinstance(v, Tensor) else v for v in entries.values()] for entries in opt.state.values()]
    return {"weights": weights_of(engine), "state": state, "s": opt.tuner.s.tolist()}


class Experts(nn.Module):
    """A model with one layer shared by all ranks and one of experts."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.shared = nn.Linear(5, 4)
        self.experts = MoE(
            4, nn.Linear(4, 4), num_experts=2, ep_size=ep_size, k=1, capacity_factor=2.0, min_capacity=0, use_rts=False
        )
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, *_ = self.experts(torch.tanh(self.shared(x)))
        out: Tensor = self.out(mixed)
        return out


def run_experts(rank: int, case: Case, ep_size: int) -> dict[str, Any]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from mechanic_plugins import mechanize

    start(rank)
    torch.manual_seed(rank if ep_size == 2 else 0)
    network = Experts(ep_size)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(network.parameters()), "name": "parameters"}
    )
    optimizer = mechanize(torch.optim.AdamW(groups, **case.base_options), **case.options)
    engine, opt = engine_of(case, network=network, optimizer=optimizer)
    engine.expert_parallel_group_size = ep_size
    books = audit(engine, opt, case, range(case.steps))
    assert dist.get_world_size() == 2
    return books
