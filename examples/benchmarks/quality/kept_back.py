"""Networks by which no number of the rule was chosen.

The text classifier is why the weights' size is no root mean square: a form of the rule with that never left chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import data
import models
import torch
from pictures import supervised
from task import Problem, Size, Task, batches, half_decades
from texts import language
from torch import Tensor, nn

__all__ = ["rows_kept_back"]


def rows_kept_back(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Eight networks, under four schedules."""
    if size == "cpu":
        return
    small = size == "smoke"
    row = functools.partial(Problem, family="kept back", bf16=True)
    adam, sgd = half_decades(1e-4, 1e-2), half_decades(1e-2, 1)

    build = _pictures(folder, "cifar10_20k", lambda c, p: models.ConvNeXt(c, 10, width=8 if small else 64), crops=True)
    yield row(
        "ConvNeXt, adamw", base="adamw", lrs=adam, steps=40 if small else 2400, build=build, measure="test_error",
        weight_decay=0.05,
    )  # fmt: skip

    wide = {"width": 4, "blocks": (1,)} if small else {"width": 96, "blocks": (2, 2, 2)}
    build = _pictures(folder, "cifar10_20k", lambda c, p: models.ResNet(c, 10, **wide), crops=True)
    yield row(
        "wide ResNet, sgd, step", base="sgd", lrs=sgd, steps=40 if small else 2400, build=build, measure="test_error",
        weight_decay=5e-4, base_options={"nesterov": True}, schedule="step",
    )  # fmt: skip

    narrow = {"width": 8, "blocks": (1,)} if small else {"width": 32, "blocks": (1, 1, 1)}
    grouped = functools.partial(nn.GroupNorm, 8)
    build = _pictures(folder, "fashion_mnist", lambda c, p: models.ResNet(c, 10, **narrow, norm=grouped))
    yield row(
        "ResNet with group norm, sgd, constant", base="sgd", lrs=half_decades(3e-3, 0.3), steps=40 if small else 1500,
        build=build, measure="test_error", schedule="constant", warmup=0.0,
    )  # fmt: skip

    build = _pictures(folder, "fashion_mnist", lambda c, p: models.Mixer(c, p, 10, width=8 if small else 128))
    yield row(
        "Mixer, adamw, wsd", base="adamw", lrs=adam, steps=40 if small else 1500, build=build, measure="test_error",
        weight_decay=0.05, schedule="wsd",
    )  # fmt: skip

    yield row(
        "VAE, adam, constant", base="adam", lrs=adam, steps=60 if small else 2000, schedule="constant", warmup=0.0,
        build=functools.partial(_vae, folder, 16 if small else 512),
    )  # fmt: skip

    lstm = functools.partial(models.LSTM, width=16 if small else 512, layers=1 if small else 2)
    yield row(
        "LSTM, adamw", base="adamw", lrs=half_decades(3e-4, 3e-2), steps=60 if small else 1500, clip=1.0,
        build=lambda seeds, device: language(
            folder, "pystdlib", lstm, 16 if small else 128, 32, seeds, device, static=False
        ),
    )  # fmt: skip

    shape = {"width": 16, "layers": 1, "length": 16} if small else {"width": 256, "layers": 4, "length": 256}
    yield row(
        "GPT, batch of 4, adamw", base="adamw", lrs=adam, steps=40 if small else 3000, clip=1.0, weight_decay=0.1,
        build=lambda seeds, device: language(
            folder, "pystdlib", functools.partial(models.GPT, **shape), shape["length"], 4, seeds, device
        ),
    )  # fmt: skip

    if folder is not None:
        yield row(
            "text classifier, adamw, constant", base="adamw", lrs=half_decades(3e-5, 3e-3), steps=1000,
            measure="test_error", schedule="constant", warmup=0.0, weight_decay=0.01,
            build=functools.partial(_text_classifier, folder, "20newsgroups"),
        )  # fmt: skip


def _pictures(
    folder: Path | None, name: str, network: Callable[[int, int], nn.Module], *, crops: bool = False
) -> Callable[..., Task]:
    """Builds the task of naming what a picture shows; the network is made from its channels and its height."""

    def build(seeds: tuple[int, ...], device: torch.device) -> Task:
        torch.manual_seed(seeds[0])
        sets = tuple(t.to(device) for t in data.images(folder, name))
        model = network(*sets[0].shape[1:3]).to(device)
        return supervised(model, sets, batch=32 if folder is None else 128, seed=seeds[0], augment=crops)

    return build


def _vae(folder: Path | None, width: int, seeds: tuple[int, ...], device: torch.device) -> Task:
    torch.manual_seed(seeds[0])
    x, _, x_test, _ = data.images(folder, "fashion_mnist")
    x, x_test = x.flatten(1).to(device), x_test.flatten(1).to(device)
    model = models.VAE(x.shape[1], width=width).to(device)
    order = batches(len(x), 64, seeds[0], device)

    def losses(pictures: Tensor) -> Tensor:
        seen, mean, log_variance = model(pictures)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return (((seen - pictures) ** 2).sum(1) + divergence).float().mean().view(1)

    def evaluate() -> dict[str, Tensor]:
        torch.manual_seed(0)
        return {"train_loss": losses(x[:4000]), "test_loss": losses(x_test)}

    return Task([model], lambda: (x[next(order)],), losses, evaluate)


def _text_classifier(folder: Path, name: str, seeds: tuple[int, ...], device: torch.device) -> Task:
    """Reads the first 256 bytes of each text."""
    torch.manual_seed(seeds[0])
    sets = []
    for part in ("train", "test"):
        texts, labels = data.sentences(folder, name)[part]
        rows = [list(text.encode()[:256].ljust(256)) for text in texts]
        sets += [torch.tensor(rows).to(device), labels.to(device)]
    model = models.TextClassifier(int(sets[1].max()) + 1, length=256, width=128, layers=2, dropout=0.1)
    return supervised(model.to(device), tuple(sets), batch=64, seed=seeds[0])
