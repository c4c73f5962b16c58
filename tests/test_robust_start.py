"""Gradients as they come in practice: tiny, huge or zero at first, and one that is far off in mid-run.

Loss scales, zero-initialised heads, curricula and broken batches make them. None of them may decide how a run ends.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion

STEPS = 1200
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.1),
    "Lion": functools.partial(Lion, lr=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.1),
}
DISTURBED: dict[str, Callable[[int], float]] = {
    "first times 1e-12": lambda step: 1e-12 if step == 0 else 1.0,
    "first times 1e-4": lambda step: 1e-4 if step == 0 else 1.0,
    "first times 1e4": lambda step: 1e4 if step == 0 else 1.0,
    "hundred zeros": lambda step: float(step >= 100),
    "outlier of 1e6": lambda step: 1e6 if step == STEPS // 2 else 1.0,
}


def noisy_regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=generator)
    clean = torch.tanh(x @ torch.randn(8, 4, generator=generator)).sum(1, keepdim=True)
    return x, clean + 0.5 * torch.randn(512, 1, generator=generator)


def final_loss(
    build: Callable[[Any], torch.optim.Optimizer],
    factor: Callable[[int], float] = lambda step: 1.0,
    *,
    zeros: bool = False,
    backend: Any = "auto",
    seed: int = 0,
) -> float:
    """The training loss after a run whose gradients were multiplied by a factor."""
    torch.manual_seed(seed)
    x, y = noisy_regression()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if zeros:
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    optimizer = mechanize(build(model.parameters()), backend=backend)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(seed + 1)
    for step in range(STEPS):
        rows = torch.randint(512, (32,), generator=generator)
        model.zero_grad()
        (((model(x[rows]) - y[rows]) ** 2).mean() * factor(step)).backward()
        optimizer.step()
        schedule.step()
    return float(((model(x) - y) ** 2).mean().detach())


@functools.cache
def undisturbed(base: str) -> float:
    return final_loss(BASES[base])


CASES = [(base, kind) for base in BASES for kind in DISTURBED]
CASES.remove(("Lion", "hundred zeros"))  # over several seeds, below
CASES.remove(("RMSprop", "hundred zeros"))  # 1.11 to 1.14: its first steps are ten times as long


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a gradient was not finite, or more than 100 times as long")
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_a_gradient_that_is_far_off_does_not_decide_the_run(base: str, kind: str) -> None:
    """A first one of 1e-4 ended at inf with SGD; one of 1e6 cut AdamW's learning rate a thousandfold for good."""
    disturbed = final_loss(BASES[base], DISTURBED[kind])
    assert disturbed <= 1.05 * undisturbed(base)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["AdamW", "RMSprop"])
def test_a_head_that_starts_at_zero_trains(base: str) -> None:
    """Not Lion: its ratio is 1.10 on average over five seeds, anywhere from 0.81 to 1.32."""
    assert final_loss(BASES[base], zeros=True) <= 1.05 * undisturbed(base)


SEEDS = 5
ON_AVERAGE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "Lion, hundred zeros": (BASES["Lion"], {"factor": DISTURBED["hundred zeros"]}),
    "SGD, a head of zeros": (functools.partial(torch.optim.SGD, lr=0.1), {"zeros": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_AVERAGE)
def test_a_disturbance_does_not_decide_the_run_on_average(case: str) -> None:
    """Over several seeds, since one says little here: its ratio is anywhere from 0.96 to 1.12.

    Not with momentum and a head of zeros: the scale learned there is half as large again, for a loss 1.11 times as
    high on average.
    """
    build, disturbance = ON_AVERAGE[case]
    ratios = [final_loss(build, seed=seed, **disturbance) / final_loss(build, seed=seed) for seed in range(SEEDS)]
    assert math.exp(statistics.mean(map(math.log, ratios))) <= 1.05


@pytest.mark.slow
def test_a_base_whose_first_updates_are_next_to_nothing_trains() -> None:
    """RAdam takes plain gradient steps at first, which are as short as the gradients are."""
    small = functools.partial(final_loss, functools.partial(torch.optim.RAdam, lr=0.1))
    assert small(lambda step: 0.1) <= 1.05 * undisturbed("AdamW")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_comes_near_zero_does_not_destroy_the_run(seed: int) -> None:
    """The scale ran away once everything was fitted: the test accuracy of digits fell from 91% to 9%."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = mechanize(torch.optim.AdamW(model.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        rows = torch.randint(1437, (64,))
        model.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    assert nn.functional.cross_entropy(model(x[:1437]), y[:1437]).item() < 1e-2
    assert (model(x[1437:]).argmax(1) == y[1437:]).float().mean().item() > 0.9
