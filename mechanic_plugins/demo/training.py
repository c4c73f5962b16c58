"""The training runs: a small classifier of handwritten digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from mechanic_plugins.api import mechanize
from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["BASES", "Run", "compare"]

Params = Iterable[nn.Parameter]

BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
BATCH_SIZE = 128
WARM_UP = 0.05


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 values in [0, 1], and their labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Run:
    """The outcome of one training run.

    `lr` is the highest learning rate in force: given to a fixed run, learned by Mechanic.
    """

    name: str
    lr: float
    losses: list[float]
    lrs: list[float]
    test_loss: float
    test_accuracy: float

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps; a single batch is too noisy."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


def digits(*, seed: int) -> Digits:
    """1,297 images to train on and 500 to test with, split by `seed`."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]
    return Digits(images=x[:-500], labels=y[:-500], test_images=x[-500:], test_labels=y[-500:])


def classifier(*, seed: int) -> nn.Module:
    """A small network; dropout keeps the loss above 0, so that too large a learning rate shows."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Dropout(0.3), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(128, 10)),
    )


def schedule(step: int, *, steps: int) -> float:
    """A short linear warm-up, then a cosine down to 0."""
    warm_up = WARM_UP * steps
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def train(
    model: nn.Module, *, data: Digits, optimizer: Optimizer, steps: int, seed: int
) -> Iterator[tuple[float, float]]:
    """Trains, and yields the loss and the effective learning rate of each step."""
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps=steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.labels), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item(), lr_in_force(optimizer)
        scheduler.step()


def lr_in_force(optimizer: Optimizer) -> float:
    """The effective learning rate: learned, or given."""
    if isinstance(optimizer, MechanicOptimizer):
        return optimizer.metrics()["mechanic/effective_lr"]
    return float(optimizer.param_groups[0]["lr"])


def peak_lr(optimizer: Optimizer) -> float:
    """The learned learning rate, or the given one."""
    if isinstance(optimizer, MechanicOptimizer):
        return optimizer.learned_lr
    return float(optimizer.param_groups[0]["initial_lr"])


@torch.no_grad()
def evaluate(model: nn.Module, *, data: Digits) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    model.eval()
    outputs = model(data.test_images)
    accuracy = (outputs.argmax(1) == data.test_labels).float().mean()
    return nn.functional.cross_entropy(outputs, data.test_labels).item(), accuracy.item()


def run(
    build: Callable[[Params], Optimizer], *, name: str, data: Digits, steps: int, seed: int, progress: tqdm[NoReturn]
) -> Run:
    """One training run; all runs share the initial weights and the batches."""
    model = classifier(seed=seed)
    optimizer = build(model.parameters())
    losses, lrs = [], []
    progress.set_description(name)
    for loss, lr in train(model, data=data, optimizer=optimizer, steps=steps, seed=seed):
        losses.append(loss)
        lrs.append(lr)
        progress.update()
    return Run(name, peak_lr(optimizer), losses, lrs, *evaluate(model, data=data))


def compare(
    base: str, *, lrs: Sequence[float], base_lr: float, steps: int, seed: int, quiet: bool = False
) -> tuple[Run, list[Run]]:
    """Mechanic's run, and one run per fixed learning rate.

    Args:
        base: A key of `BASES`.
        lrs: The sweep.
        base_lr: The learning rate of Mechanic's base; it should not matter.
        steps: Batches per run.
        seed: For the split, the initial weights, the batches and the dropout.
        quiet: No progress bar.
    """
    data, build = digits(seed=seed), BASES[base]
    with tqdm(total=steps * (1 + len(lrs)), unit="step", disable=quiet) as progress:
        start = partial(run, data=data, steps=steps, seed=seed, progress=progress)
        mechanic = start(lambda params: mechanize(build(params, lr=base_lr)), name="Mechanic")
        sweep = [start(partial(build, lr=lr), name=f"lr {lr:.1e}") for lr in lrs]
    return mechanic, sweep
