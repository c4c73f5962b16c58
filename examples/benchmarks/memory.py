"""Bytes of optimizer state per parameter, not counting weights and gradients: Mechanic, its base and its peers.

Install the peers by `pip install prodigyopt dadaptation schedulefree`; those not installed are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mechanic_plugins import mechanize

STEPS = 5
Build = Callable[[list[nn.Parameter]], Any]


def peer(package: str, name: str) -> Build:
    return lambda params: getattr(importlib.import_module(package), name)(params)


def released(params: list[nn.Parameter]) -> Any:
    optimizer = mechanize(torch.optim.AdamW(params))
    for _ in range(STEPS):
        step(optimizer, params)
    optimizer.freeze(release=True)
    return optimizer


OPTIMIZERS: dict[str, Build] = {
    "AdamW": torch.optim.AdamW,
    "Mechanic around AdamW": lambda params: mechanize(torch.optim.AdamW(params)),
    "the same with kept_dtype=torch.bfloat16": lambda params: mechanize(
        torch.optim.AdamW(params), kept_dtype=torch.bfloat16
    ),
    "the same after freeze(release=True)": released,
    "the same with rule='paper'": lambda params: mechanize(torch.optim.AdamW(params), rule="paper"),
    "the same with rule='paper' and bfloat16": lambda params: mechanize(
        torch.optim.AdamW(params), rule="paper", kept_dtype=torch.bfloat16
    ),
    "Prodigy": peer("prodigyopt", "Prodigy"),
    "D-Adaptation": peer("dadaptation", "DAdaptAdam"),
    "Schedule-Free AdamW": peer("schedulefree", "AdamWScheduleFree"),
}


def step(optimizer: Any, params: list[nn.Parameter]) -> None:
    getattr(optimizer, "train", lambda: None)()  # Schedule-Free needs it
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()


def bytes_per_parameter(build: Build) -> float:
    params = [nn.Parameter(torch.randn(256, 256)) for _ in range(4)]
    optimizer = build(params)
    for _ in range(STEPS):
        step(optimizer, params)
    kept = {id(t): t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)}
    return sum(t.nbytes for t in kept.values()) / sum(p.numel() for p in params)


def main() -> None:
    for name, build in OPTIMIZERS.items():
        try:
            print(f"{name:45}{bytes_per_parameter(build):6.1f}")
        except ModuleNotFoundError as error:
            print(f"{name:45}  {error.name} is not installed")


if __name__ == "__main__":
    main()
