"""The ranks' part of the tests of where DeepSpeed keeps the parts of parameters."""

from __future__ import annotations

from typing import Any

import torch
from engines import Case, backward, engine_of, full_weight, model, param_groups, start
from precision_engines import Experts
from torch import Tensor, nn


class Odd(nn.Module):
    """The usual small model, and a parameter with three dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = model(seed)
        self.cube = nn.Parameter(torch.arange(18.0).view(3, 2, 3).sin())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + self.cube.sum((1, 2))
        return y


def run(rank: int, case: Case) -> dict[str, Any]:
    """What the rank holds after two steps, and the whole parameters."""
    from mechanic_plugins import mechanize

    start(rank)
    network = Odd(case.seed)
    groups = param_groups(network, case)
    return held(case, network, mechanize(torch.optim.AdamW(groups, **case.base_options)))


def run_experts(rank: int, case: Case, ep_size: int) -> dict[str, Any]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from mechanic_plugins import mechanize

    start(rank)
    torch.manual_seed(rank if ep_size == 2 else 0)
    network = Experts(ep_size)
    everything = {"params": list(network.parameters()), "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(everything)
    return held(case, network, mechanize(torch.optim.AdamW(groups, **case.base_options)))


def held(case: Case, network: nn.Module, mechanic: Any) -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from mechanic_plugins.deepspeed.layout import layout_of_engine

    engine, _ = engine_of(case, network=network, optimizer=mechanic)
    for step in range(2):
        for _ in backward(engine, case, step):
            pass
    holder = engine.optimizer
    if isinstance(holder, DeepSpeedZeroOptimizer_Stage3):
        tensors, group_of = list(holder.fp32_partitioned_groups_flat), holder.sub_group_to_group_id
    else:
        pairs = [(index, p) for index, group in enumerate(mechanic.param_groups) for p in group["params"]]
        tensors, group_of = [p for _, p in pairs], dict(enumerate(index for index, _ in pairs))
    layout = layout_of_engine(holder)
    return {
        "holder": type(holder).__name__,
        "shapes": layout.shapes,
        "owners": layout.owners,
        "groups": [group_of[owner] for owner in layout.owners],
        "blocks": [[tuple(block) for block in blocks] for blocks in layout.blocks],
        "tensors": [p.detach().flatten().tolist() for p in tensors],
        "wholes": {name: full_weight(p).tolist() for name, p in engine.module.named_parameters()},
    }


def flattened_for_fused_adam(rank: int) -> dict[str, Any]:
    """DeepSpeed puts this optimizer only around FusedAdam, which needs a GPU."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    from mechanic_plugins.deepspeed.layout import layout_of_engine

    start(rank)
    network = Odd(0).half()
    case = Case(param_groups=2)
    holder = FP16_Optimizer(torch.optim.SGD(param_groups(network, case), lr=0.0))
    layout = layout_of_engine(holder)
    return {
        "holder": type(holder).__name__,
        "shapes": layout.shapes,
        "owners": layout.owners,
        "groups": layout.owners,
        "blocks": [[tuple(block) for block in blocks] for blocks in layout.blocks],
        "tensors": [p.detach().tolist() for p in holder.fp32_groups_flat],
        "wholes": {name: p.float().tolist() for name, p in network.named_parameters()},
    }
