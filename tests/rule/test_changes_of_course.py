"""What happens to a run half way: schedules by hand, losses of another size, layers that are unfrozen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import backward, perceptron
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.3),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "Lion": lambda params: Lion(params, lr=0.3),
}


def warm_up_and_cosine(step: int) -> float:
    return (step + 1) / 20 if step < 20 else 0.5 * (1 + math.cos(math.pi * (step - 20) / 60))


@pytest.mark.parametrize("base", BASES)
def test_a_schedule_by_hand_is_a_scheduler_bit_for_bit(base: str) -> None:
    """Schedulers note the peak in the param groups, which nobody does by hand: nothing may depend on it."""
    ends = []
    for by_hand in (True, False):
        model = perceptron()
        optimizer = mechanize(BASES[base](model.parameters()))
        scheduler = None if by_hand else LambdaLR(optimizer, warm_up_and_cosine)
        for step in range(80):
            if by_hand:
                optimizer.param_groups[0]["lr"] = 0.3 * warm_up_and_cosine(step)
            backward(model, step)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        ends.append((weights, optimizer.tuner, optimizer.learned_lr))
    assert torch.equal(ends[0][0], ends[1][0])
    assert all(map(torch.equal, ends[0][1], ends[1][1]))
    assert ends[0][2] == ends[1][2] > 0


class BagOfWords(nn.Module):
    """An embedding of tiny numbers, as where one starts at 1e-3, and a network of ordinary ones."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 32)
        nn.init.normal_(self.table.weight, std=1e-3)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, documents: Tensor) -> Tensor:
        return self.head(self.table(documents).mean(1))


@pytest.mark.slow
def test_a_small_embedding_trains_beside_a_network() -> None:
    """One size for all weights left it where it was, or lost the network. AdamW at 1e-2 comes to no error."""
    generator = torch.Generator().manual_seed(3)
    topics = torch.randint(10, (2000,), generator=generator)
    labels = torch.randint(10, (2000,), generator=generator)
    documents = torch.randint(2000, (2000, 20), generator=generator)
    for document, label in zip(documents, labels, strict=True):
        words = (topics == label).nonzero().squeeze(1)
        document[:8] = words[torch.randint(len(words), (8,), generator=generator)]
    torch.manual_seed(0)
    model = BagOfWords(2000)
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
    schedule = CosineAnnealingLR(optimizer, 400)
    for _ in range(400):
        rows = torch.randint(1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(documents[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    errors = (model(documents[1500:]).argmax(1) != labels[1500:]).float().mean()
    assert errors < 0.1


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2000, 20, generator=generator)
    return x, torch.tanh(x @ torch.randn(20, 1, generator=generator)) + 0.1 * torch.randn(2000, 1, generator=generator)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_survives_a_loss_that_grows_thirtyfold(momentum: float) -> None:
    """As where the weight of a loss is raised: the old scale would make steps 30 times too long."""
    (x, y), losses = regression(), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = mechanize(torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum))
    for step in range(600):
        rows = torch.randint(2000, (32,))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        (loss * (30 if step >= 300 else 1)).backward()
        optimizer.step()
        losses.append(loss.item())
    variance = float(y.var())
    assert max(losses[300:]) < 2 * variance
    assert sum(losses[550:]) / 50 < 1.25 * sum(losses[250:300]) / 50


@pytest.mark.parametrize("base", ["AdamW", "SGD"])
@pytest.mark.parametrize("late", [False, True], ids=["frozen", "added late"])
def test_a_body_that_is_unfrozen_is_measured_then(base: str, late: bool) -> None:
    """Its layers had no part in the scale so far. The tuner starts over, with a ramp of its own."""
    (x, y), losses = regression(), []
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    head = nn.Linear(64, 1)
    body.requires_grad_(False)
    optimizer = mechanize(BASES[base]([*head.parameters()] if late else [*body.parameters(), *head.parameters()]))
    for step in range(260):
        if step == 200:
            body.requires_grad_(True)
            if late:
                optimizer.add_param_group({"params": [*body.parameters()], "lr": 0.3})
            before = float(optimizer.tuner.steps)
        rows = torch.randint(2000, (32,))
        optimizer.zero_grad()
        loss = F.mse_loss(head(body(x[rows])), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert before == 200
    assert max(losses[200:]) < 2 * max(losses[150:200])
    assert sum(losses[250:]) < sum(losses[190:200])
