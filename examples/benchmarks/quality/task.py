"""The definition of a problem: model and data, number of steps, base optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Base", "Build", "Measure", "Problem", "Schedule", "Size", "Task", "batches", "half_decades"]

Size = Literal["smoke", "cpu", "gpu", "paper"]
Base = Literal["adamw", "adam", "sgd", "lion", "muon"]
Measure = Literal["test_loss", "test_error", "train_error"]
Schedule = Literal["cosine", "step", "fifths", "linear", "constant", "wsd", "one-cycle", "restarts"]
Build = Callable[[Sequence[int], torch.device], "Task"]


@dataclass(frozen=True)
class Task:
    """A model and its data, on one device.

    Models so tiny that they should share their launches have several members, one per seed and learning rate: the
    tables do, everything else has one.
    """

    members: Sequence[nn.Module]
    """The models, each with its own optimizer."""
    batch: Callable[[], tuple[Tensor, ...]]
    """Draws the next batch."""
    losses: Callable[..., Tensor]
    """The training loss of each member on a batch."""
    evaluate: Callable[[], dict[str, Tensor]]
    """Per member, on fixed data: train_loss, test_loss, and for classes test_error."""
    static: bool = True
    """Whether all batches have the same shapes, so that a CUDA graph can replay the step."""


@dataclass(frozen=True)
class Problem:
    """One row of the table."""

    name: str
    family: str
    base: Base
    lrs: Sequence[float]
    """The sweep, whose best must not lie at an end. Empty if only the learned scale is of interest."""
    steps: int
    build: Build
    """Builds the task from seeds, one for each member, and a device."""
    measure: Measure = "test_loss"
    """The measure by which the methods are ranked."""
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    clip: float | None = None
    weight_decay: float = 0.0
    base_options: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of the base."""
    bf16: bool = False
    """Whether to autocast to bfloat16 on a GPU."""
    ensemble: bool = False
    """Whether all members may be built at once."""


def half_decades(low: float, high: float) -> tuple[float, ...]:
    """1, 3, 10, ... times a power of ten, from low to high."""
    grid = (float(f"{a}e{e}") for e in range(-8, 3) for a in (1, 3))
    return tuple(lr for lr in grid if low <= lr <= high)


def batches(rows: int, size: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Indices, reshuffled in each epoch; the last, shorter batch is left out."""
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        order = torch.randperm(rows, generator=generator, device=device)
        yield from order[: rows // size * size].view(-1, size)
