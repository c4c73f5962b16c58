"""Pictures: small ResNets; ResNet-18, a VGG and a ViT with random crops and flips; a diffusion model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import data
import models
import torch
from task import Problem, Size, Task, batches, half_decades
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["classes_of_pictures", "rows_of_pictures", "supervised"]


def rows_of_pictures(size: Size, folder: Path | None) -> Iterator[Problem]:
    """The problems of all families of this module."""
    if size != "gpu":
        yield from _small_rows(size, folder)
    if size != "cpu":
        yield from _large_rows(size, folder)
        yield from _diffusion_rows(size, folder)


def supervised(model: nn.Module, sets: data.Split, *, batch: int, seed: int, augment: bool = False) -> Task:
    """The task of predicting classes from inputs."""
    x, y, x_test, y_test = sets
    order = batches(len(x), batch, seed, x.device)
    generator = torch.Generator(x.device).manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        rows = next(order)
        return _crop_and_flip(x, rows, generator) if augment else x[rows], y[rows]

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).float(), targets).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, inputs, targets in (("train", x[:4096], y[:4096]), ("test", x_test, y_test)):
            outputs = torch.cat([model(some).float() for some in inputs.split(512)])
            found[f"{part}_loss"] = F.cross_entropy(outputs, targets).view(1)
            found[f"{part}_error"] = (outputs.argmax(1) != targets).float().mean().view(1)
        return found

    return Task([model], draw, losses, evaluate)


def _crop_and_flip(pictures: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each picture at random by up to four pixels and mirrors half of them."""
    height, width = pictures.shape[2:]
    device, count = pictures.device, len(rows)
    down, right = torch.randint(-4, 5, (2, count, 1), generator=generator, device=device)
    mirrored = torch.rand(count, 1, generator=generator, device=device) < 0.5
    across = torch.arange(width, device=device)
    columns = torch.where(mirrored, width - 1 - across, across) + right
    lines = torch.arange(height, device=device) + down
    inside = ((lines >= 0) & (lines < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None]
    lines, columns = lines.clamp(0, height - 1), columns.clamp(0, width - 1)
    channels = torch.arange(pictures.shape[1], device=device)[:, None, None]
    chosen = pictures[rows[:, None, None, None], channels, lines[:, None, :, None], columns[:, None, None]]
    return chosen * inside


def classes_of_pictures(
    folder: Path | None,
    name: str,
    network: Literal["resnet", "vgg", "vit"],
    shape: dict[str, Any],
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    *,
    augment: bool,
) -> Task:
    """The task of naming what a picture shows."""
    torch.manual_seed(seeds[0])
    x, y, x_test, y_test = (t.to(device) for t in data.images(folder, name))
    channels, pixels = x.shape[1:3]
    model: nn.Module
    if network == "resnet":
        layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        model = models.ResNet(channels, 10, **shape).to(device, memory_format=layout)
    elif network == "vgg":
        model = models.VGG(channels, pixels, 10, **shape).to(device)
    else:
        model = models.ViT(channels, pixels, 10, **shape).to(device)
    return supervised(model, (x, y, x_test, y_test), batch=batch, seed=seeds[0], augment=augment)


def _small_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Problems that a CPU can train in seconds."""
    shape: dict[str, Any] = {"width": 4, "blocks": (1, 1)}
    if size == "cpu":
        shape = {"width": 8, "blocks": (1, 1, 1), "shrink": 2}
    steps = 60 if size == "smoke" else 500
    sgd, adamw = half_decades(1e-2, 3), half_decades(3e-4, 3e-2)
    for name in ("digits",) if folder is None else ("fashion_mnist", "cifar10"):
        build = functools.partial(classes_of_pictures, folder, name, "resnet", shape, 32, augment=name == "cifar10")
        row = functools.partial(Problem, family="images", steps=steps, build=build, measure="test_error")
        yield row(f"{name}, sgd", base="sgd", lrs=sgd, weight_decay=5e-4)
        yield row(f"{name}, adamw", base="adamw", lrs=adamw)
        if name == "cifar10":
            yield row(f"{name}, sgd, steps", base="sgd", lrs=sgd, weight_decay=5e-4, schedule="step")


def _large_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """CIFAR-10 with the usual training: 30 epochs of 20,000 pictures."""
    name, batch, steps = "cifar10_20k", 128, 4700
    resnet: dict[str, Any] = {"width": 64, "blocks": (2, 2, 2, 2)}
    vgg: dict[str, Any] = {"widths": (64, 128, 256), "dropout": 0.3}
    vit = {"width": 192, "layers": 6, "patch": 4}
    if size == "smoke":
        name, batch, steps = "digits", 32, 40
        resnet, vit = {"width": 4, "blocks": (1, 1)}, {"width": 16, "layers": 1, "patch": 2}
        vgg = {"widths": (8,), "dropout": 0.3}
    row = functools.partial(Problem, steps=steps, measure="test_error", bf16=True)
    build = functools.partial(classes_of_pictures, folder, name, "resnet", resnet, batch, augment=True)
    sgd, adamw = half_decades(1e-2, 1), half_decades(3e-4, 1e-2)
    nesterov = {"nesterov": True}
    yield row("ResNet-18, sgd", "ResNet-18", "sgd", sgd, build=build, weight_decay=5e-4, base_options=nesterov)
    yield row("ResNet-18, adamw", "ResNet-18", "adamw", adamw, build=build, weight_decay=0.05)
    build = functools.partial(classes_of_pictures, folder, name, "vgg", vgg, batch, augment=True)
    lrs = half_decades(3e-3, 1e-1)
    yield row("VGG, sgd", "VGG", "sgd", lrs, build=build, weight_decay=5e-4, base_options=nesterov)
    build = functools.partial(classes_of_pictures, folder, name, "vgg", {**vgg, "norm": True}, batch, augment=True)
    yield row("VGG with batch norm, sgd", "VGG", "sgd", sgd, build=build, weight_decay=5e-4, base_options=nesterov)
    build = functools.partial(classes_of_pictures, folder, name, "vit", vit, batch, augment=True)
    yield row("ViT, adamw", "ViT", "adamw", half_decades(1e-4, 1e-2), build=build, weight_decay=0.05, clip=1.0)


# ------------------------------------------------------------------------------------------------ diffusion


def _diffusion(
    folder: Path | None, name: str, width: int, batch: int, seeds: Sequence[int], device: torch.device
) -> Task:
    """The task of predicting the noise in a picture, at every noise level (a cosine schedule)."""
    torch.manual_seed(seeds[0])
    x, _, x_test, _ = (t.to(device) for t in data.images(folder, name))
    model = models.UNet(x.shape[1], width=width).to(device)
    generator = torch.Generator(device).manual_seed(seeds[0])

    def noisy(pictures: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(pictures.shape, generator=source, device=device)
        time = torch.rand(len(pictures), generator=source, device=device)
        angle = (time * math.pi / 2)[:, None, None, None]
        return pictures * angle.cos() + noise * angle.sin(), time, noise

    def draw() -> tuple[Tensor, ...]:
        rows = torch.randint(len(x), (batch,), generator=generator, device=device)
        return noisy(x[rows], generator)

    def losses(pictures: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(model(pictures, time).float(), noise).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, pictures in (("train_loss", x), ("test_loss", x_test)):
            fixed = torch.Generator(device).manual_seed(12345)
            found[part] = torch.stack([losses(*noisy(some, fixed)) for some in pictures[:3000].split(250)]).mean(0)
        return found

    return Task([model], draw, losses, evaluate)


def _diffusion_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    width, batch, steps = (8, 16, 40) if size == "smoke" else (32, 128, 2000)
    build = functools.partial(_diffusion, folder, "fashion_mnist", width, batch)
    lrs = half_decades(3e-4, 3e-2)
    yield Problem("diffusion, adamw", "diffusion", "adamw", lrs, steps, build, clip=1.0, weight_decay=0.01)
