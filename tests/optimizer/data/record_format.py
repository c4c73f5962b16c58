"""Records checkpoints of the current format, and what the next steps from them do. Files that exist are left alone.

    python tests/optimizer/data/record_format.py

Each file holds the weights, the optimizer's state dict, and the gradients and results of the steps after it. It loads
with `torch.load(weights_only=True)`. Released formats stay readable: record new files beside these for a new one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from mechanic_plugins import MechanicOptimizer, Settings, mechanize

FORMAT = 1
BEFORE, AFTER = 12, 5
RUNS: dict[str, tuple[torch.dtype, Settings]] = {
    "default": (torch.float64, Settings()),
    "default-bfloat16": (torch.bfloat16, Settings(scope="group")),
    "paper": (torch.float64, Settings(rule="paper", s_init=1e-2)),
    "paper-bfloat16": (torch.bfloat16, Settings(rule="paper", s_init=1e-2, scope="group")),
}


def file_of(run: str) -> Path:
    return Path(__file__).parent / f"format-{FORMAT}-{run}.pt"


def build(run: str) -> tuple[list[nn.Parameter], MechanicOptimizer]:
    """Two param groups of one parameter each, with two learning rates."""
    dtype, settings = RUNS[run]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 2), (4,))]
    groups = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.03}]
    return params, mechanize(torch.optim.AdamW(groups), settings=settings)


def step(params: list[nn.Parameter], optimizer: MechanicOptimizer, gradients: Tensor) -> tuple[list[float], Tensor]:
    """Steps with the given gradients, one after the other in a vector. Returns the scales and the weights."""
    for p, gradient in zip(params, gradients.split([p.numel() for p in params]), strict=True):
        p.grad = gradient.view(p.shape).clone()
    optimizer.step()
    return optimizer.scales.tolist(), parameters_to_vector(params).detach()


def record(run: str) -> dict[str, Any]:
    params, optimizer = build(run)
    generator = torch.Generator().manual_seed(1)
    content: dict[str, Any] = {}
    gradients, scales, weights = [], [], []
    for count in range(BEFORE + AFTER):
        if count == BEFORE:
            content |= copy.deepcopy({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()})
        x = parameters_to_vector(params).detach()
        gradients.append((x + torch.randn(x.shape, generator=generator)).to(x.dtype))
        now, x = step(params, optimizer, gradients[-1])
        scales.append(now)
        weights.append(x)
    results = {"gradients": torch.stack(gradients[BEFORE:]), "after": torch.stack(weights[BEFORE:])}
    return {**content, **results, "scales": scales[BEFORE:]}


if __name__ == "__main__":
    for run in RUNS:
        if not file_of(run).exists():
            torch.save(record(run), file_of(run))
