"""Runs of 30 to 200 steps end about as well as with ordinary, untuned learning rates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mechanic_plugins import mechanize

TRAINED = 1437  # of 1797
ORDINARY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),  # its own default
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD-momentum": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9),
}


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    found = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]


def loss_after(build: Callable[[Any], torch.optim.Optimizer], steps: int, *, cosine: bool, seed: int) -> float:
    x, y = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    for _ in range(steps):
        rows = torch.randint(TRAINED, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    with torch.no_grad():
        return F.cross_entropy(model(x[TRAINED:]), y[TRAINED:]).item()


@pytest.mark.slow
@pytest.mark.parametrize("cosine", [True, False], ids=["cosine", "constant"])
@pytest.mark.parametrize("steps", [30, 200])
@pytest.mark.parametrize("base", ORDINARY)
def test_a_short_run_is_as_good_as_at_an_ordinary_rate(base: str, steps: int, cosine: bool) -> None:
    seeds = 2  # five gave ratios within 0.08 of these, at 2.5 times the cost
    plain, ours = (
        sum(loss_after(build, steps, cosine=cosine, seed=seed) for seed in range(seeds)) / seeds
        for build in (ORDINARY[base], lambda params: mechanize(ORDINARY[base](params)))
    )
    assert ours <= 1.25 * plain


@pytest.mark.parametrize("base", ORDINARY)
def test_an_output_bias_at_the_targets_mean_does_not_set_the_scale(base: str) -> None:
    """One weight of 1e4 among many small ones, as at the start of a regression on house prices."""
    scales = []
    for bias in (0.0, 1e4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        nn.init.constant_(model[2].bias, bias)
        optimizer = mechanize(ORDINARY[base](model.parameters()))
        for step in range(2):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(x) - bias - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        scales.append(optimizer.scale.item())
    assert 0.5 <= scales[1] / scales[0] <= 2


@pytest.mark.parametrize("base", ["Adam", "SGD-momentum"])
def test_a_run_ends_alike_with_an_output_bias_of_any_size(base: str) -> None:
    """AdamW is left out: its decay pulls the bias down by 100 times its lr in each step, even without Mechanic."""
    losses = []
    for bias in (0.0, 1e4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        nn.init.constant_(model[2].bias, bias)
        optimizer = mechanize(ORDINARY[base](model.parameters()))
        for _ in range(200):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = (model(x) - bias - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert 0.8 <= losses[1] / losses[0] <= 1.25


@pytest.mark.parametrize("size", [30.0, 1e-6], ids=["embedding", "dead layers"])
def test_layers_of_another_size_do_not_set_the_scale(size: float) -> None:
    """Two of seven layers, as an embedding and a head may be."""
    scales = []
    for factor in (1.0, size):
        torch.manual_seed(0)
        layers = [nn.Parameter(torch.randn(20, 20)) for _ in range(7)]
        for layer in layers[:2]:
            layer.data *= factor
        optimizer = mechanize(torch.optim.SGD(layers, lr=1.0))
        for _ in range(2):
            for layer in layers:
                layer.grad = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
            optimizer.step()
        scales.append(optimizer.scale.item())
    assert 0.8 < scales[1] / scales[0] < 1.25


def test_weights_that_are_normalised_after_each_step_keep_their_rate() -> None:
    """As in nGPT, where the program and not the optimizer projects them onto a sphere."""
    rates = []
    for is_normalised in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)]
        model, target = nn.Sequential(layers[0], nn.Tanh(), layers[1]), torch.randn(8, 4)
        optimizer = mechanize(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(200):
            if is_normalised or step == 0:
                for layer in layers:
                    layer.weight.data = F.normalize(layer.weight.data, dim=1)
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            (model(x) - torch.tanh(x @ target)).square().mean().backward()
            optimizer.step()
        rates.append(optimizer.learned_lr)
    assert 0.5 <= rates[1] / rates[0] <= 2
