"""A GAN: two competing networks, whose mechanized optimizers have their own scales."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import QUIET, lightning_of, same, trainer, weights
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from mechanic_plugins import mechanize
from mechanic_plugins.lightning import Mechanic

pytestmark = [*QUIET, pytest.mark.slow]

STEPS, BATCH, NOISE = 400, 64, 4


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


class Gan(nn.Module):
    """A generator of samples like two Gaussians in the plane, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = mlp(NOISE, 2), mlp(2, 1)

    def losses(self, real: Tensor, noise: Tensor) -> Any:
        """Yields the critic's loss, then the generator's, which must be taken after the critic's step."""
        made = self.generator(noise)
        yield F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        yield F.softplus(-self.critic(made)).mean()

    def optimizers(self) -> list[Adam]:
        return [Adam(net.parameters(), betas=(0.5, 0.999)) for net in (self.critic, self.generator)]


def gaussians() -> tuple[Tensor, Tensor]:
    """Data points, and noise for as many samples."""
    draw = torch.Generator().manual_seed(1)
    centres = torch.tensor([[2.0, 1.0], [2.0, -1.0]]).repeat(STEPS * BATCH // 2, 1)
    noise = torch.randn(len(centres), NOISE, generator=draw)
    return centres + 0.2 * torch.randn(centres.shape, generator=draw), noise


def plain_loop(gan: Gan) -> list[Any]:
    optimizers = [mechanize(optimizer) for optimizer in gan.optimizers()]
    for real, noise in zip(*(t.split(BATCH) for t in gaussians()), strict=True):
        for optimizer, loss in zip(optimizers, gan.losses(real, noise), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return optimizers


def by_hand(pl: ModuleType, gan: Gan) -> Any:
    """A module as in Lightning's own GAN examples: manual optimization with two optimizers."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gan = gan
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, loss in zip(self.optimizers(), self.gan.losses(*batch), strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return self.gan.optimizers()

    return Module()


def distance(gan: Gan) -> float:
    """The energy distance between 1000 samples and 1000 data points."""
    real, noise = (t[:1000] for t in gaussians())
    with torch.no_grad():
        made = gan.generator(noise)
    between, within, made_within = (torch.cdist(a, b).mean() for a, b in ((made, real), (real, real), (made, made)))
    return float(2 * between - within - made_within)


def test_both_scales_are_learned_and_the_samples_move_to_the_data() -> None:
    gan = Gan()
    untrained = distance(gan)
    critic, generator = plain_loop(gan)
    assert untrained > 1
    assert distance(gan) < untrained / 5
    assert critic.scale.item() != generator.scale.item()
    for optimizer in (critic, generator):
        assert math.isfinite(optimizer.scale.item())
        assert 1e-4 < optimizer.learned_lr < 1e-1
        assert optimizer.metrics()["mechanic/skipped_steps"] == 0


def test_lightning_trains_it_to_the_same_bits() -> None:
    pl = lightning_of("lightning.pytorch")
    gan, plain, callback = Gan(), Gan(), Mechanic()
    points = DataLoader(TensorDataset(*gaussians()), batch_size=BATCH)
    trainer(pl, callback, max_epochs=1).fit(by_hand(pl, gan), points)
    optimizers = plain_loop(plain)
    assert same(weights(gan), weights(plain))
    assert [o.scale.item() for o in callback.optimizers] == [o.scale.item() for o in optimizers]
