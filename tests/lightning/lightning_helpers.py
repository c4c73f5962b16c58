"""A small problem, a Lightning module that trains on it, and a plain loop to compare with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from mechanic_plugins import mechanize

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
BATCH, BATCHES = 8, 6

QUIET = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # Lightning 2.6 with torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*still looking for its scale"),  # as most runs here are so short
]

Optimizers = Callable[[nn.Module], Any]


def lightning_of(namespace: str) -> ModuleType:
    return importlib.import_module(namespace)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH * BATCHES, 6, generator=generator)
    y = torch.tanh(x @ torch.randn(6, 4, generator=generator)) + 0.1 * torch.randn(len(x), 4, generator=generator)
    return x, y


def loader(batch_size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=batch_size)


def batches(epochs: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True)) * epochs


def adamw(model: nn.Module, **kwargs: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **kwargs})


def module(pl: ModuleType, optimizers: Optimizers = adamw, **attributes: Any) -> Any:
    """A LightningModule of this package; `attributes` replace its methods."""

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return optimizers(self.net)

    return type("Regression", (Regression,), attributes)()


def halving(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def built_in_init(pl: ModuleType, **attributes: Any) -> Any:
    """A module that builds optimizer and scheduler once and returns the same two in every fit."""
    model = module(pl, configure_optimizers=lambda self: ([self.kept], [self.schedule]), **attributes)
    model.kept = adamw(model.net)
    model.schedule = halving(model.kept)
    return model


def trainer(pl: ModuleType, *callbacks: Any, **kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**settings, **quiet, "max_epochs": 3, **kwargs}, callbacks=list(callbacks))


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether they are equal bit for bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@dataclass
class Plain:
    """The result of a plain loop with `mechanize`."""

    weights: list[Tensor]
    optimizer: Any
    losses: list[float]


def plain_loop(
    *,
    optimizers: Callable[[nn.Module], Optimizer] = adamw,
    epochs: int = 3,
    accumulate: int = 1,
    clip: Callable[[list[nn.Parameter]], Any] | None = None,
    schedule: Callable[[Optimizer], Any] | None = None,
    after_step: Callable[[Any, int], None] | None = None,
    model: nn.Module | None = None,
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    **options: Any,
) -> Plain:
    """The loop that a user would write, on the same batches."""
    model = net() if model is None else model
    base = optimizers(model)
    scheduler = schedule(base) if schedule else None
    optimizer = mechanize(base, **options)
    losses = []
    for index, (x, y) in enumerate(batches(epochs), start=1):
        loss = forward(model, x, y) if forward else F.mse_loss(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if index % accumulate:
            continue
        if clip:
            clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if after_step:
            after_step(scheduler, index)
    return Plain(weights(model), optimizer, losses)
