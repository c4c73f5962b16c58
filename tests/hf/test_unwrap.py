"""The mechanized optimizer is found in the wrappers that frameworks return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from problems import perceptron, train

from mechanic_plugins import demechanize, mechanize, unwrap


def by_fabric(model: Any, optimizer: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup(model, optimizer)[1]


WRAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda model, optimizer: optimizer,
    "accelerate": lambda model, optimizer: Accelerator(cpu=True).prepare(model, optimizer)[1],
    "Fabric": by_fabric,
    "Lightning": lambda model, optimizer: LightningOptimizer(optimizer),
}


@pytest.mark.parametrize("framework", WRAPPED)
def test_scale_and_metrics_are_found_in_a_wrapper(framework: str) -> None:
    """Without unwrap: `'AcceleratedOptimizer' object has no attribute 'metrics'`."""
    model = perceptron()
    optimizer = mechanize(torch.optim.AdamW(model.parameters()))
    wrapped = WRAPPED[framework](model, optimizer)
    assert unwrap(wrapped) is optimizer
    train(model, optimizer, 20)
    assert unwrap(wrapped).metrics()["mechanic/scale"] > 0
    learned = unwrap(wrapped).learned_lr
    plain = demechanize(wrapped)
    assert plain is optimizer.base
    assert plain.param_groups[0]["lr"] == pytest.approx(learned)


def test_where_there_is_none_the_wrappers_are_named() -> None:
    model = perceptron()
    plain = torch.optim.AdamW(model.parameters())
    prepared = Accelerator(cpu=True).prepare(plain)
    for wrapped in (plain, prepared, None):
        with pytest.raises(TypeError, match=r"no mechanized optimizer in .*: mechanize\(\) it before wrapping it"):
            demechanize(wrapped)
    with pytest.raises(TypeError, match="in AcceleratedOptimizer around AdamW:"):
        unwrap(prepared)
