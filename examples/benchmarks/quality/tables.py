"""Rows of numbers: logistic regressions, MLPs, regressions, separable tables, a stream, and what fits to zero loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import data
import models
import torch
from task import Base, Problem, Size, Task, batches, half_decades
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["rows_of_tables", "supervised"]

CONVEX = ("dna", "glass", "iris", "letter", "pendigits", "usps", "vehicle", "vowel", "wine")
MLPS = ("glass", "letter", "optdigits", "pendigits", "texture", "vehicle", "vowel")
SEPARABLE: tuple[tuple[str, int | None], ...] = (("wine", None), ("iris", None), ("breast_cancer", None), ("dna", 200))
REGRESSIONS = ("diabetes", "diamonds")
LRS: dict[Base, tuple[float, ...]] = {
    "adamw": half_decades(3e-4, 1e-1),
    "adam": half_decades(3e-4, 1e-1),
    "sgd": half_decades(3e-3, 1),
    "lion": half_decades(3e-5, 1e-2),
}
_CONVEX_BATCH = 16


def rows_of_tables(size: Size, folder: Path | None) -> Iterator[Problem]:
    """All families of this module."""
    if size == "gpu":
        return
    yield from _convex_rows(size, folder)
    yield from _mlp_rows(size, folder)
    yield from _stream_rows(size, folder)
    yield from _collapse_rows(size, folder)


# ------------------------------------------------------------------------------------------------ convex


def _convex(folder: Path | None, name: str, seeds: Sequence[int], device: torch.device) -> Task:
    x, y, x_test, y_test = (t.to(device) for t in data.table(folder, name))
    model = models.LinearModels(len(seeds), inputs=x.shape[1], outputs=int(y.max()) + 1).to(device)
    orders = []
    for seed, member in zip(seeds, model.models, strict=True):
        torch.manual_seed(seed)
        member.reset_parameters()
        orders.append(batches(len(x), _CONVEX_BATCH, seed, device))

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.stack([next(order) for order in orders])
        return x[rows], y[rows]

    def losses(inputs: Tensor, labels: Tensor) -> Tensor:
        every = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="none")
        return every.view(labels.shape).mean(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, inputs, labels in (("train", x, y), ("test", x_test, y_test)):
            logits = model(inputs.expand(len(seeds), *inputs.shape))
            every = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(seeds)), reduction="none")
            found[f"{part}_loss"] = every.view(len(seeds), -1).mean(1)
            found[f"{part}_error"] = (logits.argmax(-1) != labels).float().mean(1)
        return found

    return Task(list(model.models), batch, losses, evaluate)


def _convex_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    for name in CONVEX if folder is not None else ("iris", "wine"):
        epochs = 10 if size == "smoke" else 100
        steps = epochs * (len(data.table(folder, name)[0]) // _CONVEX_BATCH)
        build = functools.partial(_convex, folder, name)
        for base in ("adamw", "sgd"):
            yield Problem(
                f"{name}, {base}",
                "convex",
                base,
                half_decades(1e-3, 10),
                steps,
                build,
                measure="test_error",
                schedule="step",
                warmup=0.0,
                ensemble=True,
            )


# ------------------------------------------------------------------------------------------------ networks


def supervised(model: nn.Module, sets: data.Split, *, batch: int, seed: int, augment: bool = False) -> Task:
    """Classes, or real numbers, from inputs."""
    x, y, x_test, y_test = sets
    order = batches(len(x), batch, seed, x.device)
    generator = torch.Generator(x.device).manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        rows = next(order)
        return _crop_and_flip(x, rows, generator) if augment else x[rows], y[rows]

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return _loss(model(inputs).float(), targets).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, inputs, targets in (("train", x[:4096], y[:4096]), ("test", x_test, y_test)):
            outputs = torch.cat([model(some).float() for some in inputs.split(512)])
            found[f"{part}_loss"] = _loss(outputs, targets).view(1)
            if not targets.is_floating_point():
                found[f"{part}_error"] = (outputs.argmax(1) != targets).float().mean().view(1)
        return found

    return Task([model], draw, losses, evaluate)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return F.mse_loss(outputs.squeeze(1), targets)
    return F.cross_entropy(outputs, targets)


def _crop_and_flip(pictures: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture moved by up to four pixels on its own, and half of them mirrored."""
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


def _mlp(
    folder: Path | None,
    name: str,
    hidden: Sequence[int],
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    *,
    rows: int | None = None,
    numbers: bool = False,
    random_labels: bool = False,
) -> Task:
    torch.manual_seed(seeds[0])
    sets = data.regression(folder, name) if numbers else data.table(folder, name, rows)
    x, y, x_test, y_test = (t.to(device) for t in sets)
    outputs = 1 if numbers else int(torch.cat([y, y_test]).max()) + 1
    if random_labels:
        y = torch.randint(outputs, y.shape, generator=torch.Generator().manual_seed(0)).to(device)
    model = models.MLP(x.shape[1], hidden, outputs).to(device)
    return supervised(model, (x, y, x_test, y_test), batch=min(batch, len(x)), seed=seeds[0])


def _mlp_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Two hidden layers: tables, small tables that are fitted to zero loss, and noisy real numbers."""
    steps = 60 if size == "smoke" else 1000
    hidden = (16, 16) if size == "smoke" else (64, 64)
    bases: tuple[Base, ...] = ("adamw", "sgd")
    for base in bases:
        decay = 0.01 if base == "adamw" else 0.0
        row = functools.partial(Problem, base=base, lrs=LRS[base], steps=steps, weight_decay=decay)
        for name in MLPS if folder is not None else ("digits",):
            build = functools.partial(_mlp, folder, name, hidden, 64)
            yield row(f"{name}, {base}, MLP", "MLPs", build=build, measure="test_error")
        for name, count in SEPARABLE if folder is not None else SEPARABLE[:2]:
            build = functools.partial(_mlp, folder, name, hidden, 64, rows=count)
            label = f"{name}{'' if count is None else f' ({count} rows)'}, {base}, separable"
            yield row(label, "separable", build=build, measure="test_error")
        for name in REGRESSIONS if folder is not None else REGRESSIONS[:1]:
            build = functools.partial(_mlp, folder, name, hidden, 64, numbers=True)
            yield row(f"{name}, {base}, regression", "regressions", build=build)


def _stream_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """One pass: no more steps than there are batches."""
    name = "digits" if folder is None else "optdigits"
    steps = 100 if size == "smoke" else len(data.table(folder, name)[0]) // 4
    build = functools.partial(_mlp, folder, name, (64,), 4)
    lrs = half_decades(1e-3, 1)
    yield Problem(
        "stream of digits, sgd", "streams", "sgd", lrs, steps, build, "test_error", schedule="constant", warmup=0.0
    )


# ------------------------------------------------------------------------------------------------ collapse


def _tied(folder: Path | None, seeds: Sequence[int], device: torch.device) -> Task:
    """A language model that knows its few bytes by heart; its output layer is its embedding."""
    torch.manual_seed(seeds[0])
    train, test = (t.to(device) for t in data.text(folder, "sources" if folder is None else "austen"))
    length = 16
    known, unknown = (source[:count].unfold(0, length + 1, 8) for source, count in ((train, 4096), (test, 16384)))
    sets = known[:, :-1], known[:, -1], unknown[:, :-1], unknown[:, -1]
    model = models.LastByte(width=32, layers=1, length=length, tied=True).to(device)
    return supervised(model, sets, batch=32, seed=seeds[0])


def _collapse_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Runs that reach a loss of zero, and must not leave it again."""
    name = "digits" if folder is None else "optdigits"
    build = functools.partial(_mlp, folder, name, (64,), 64, rows=1437)
    short = 60 if size == "smoke" else 1500
    row = functools.partial(Problem, family="collapse", warmup=0.0, measure="test_error")
    for base in ("adamw", "adam", "sgd", "lion"):
        lrs, decays = LRS[base][:-1], (0.0,) if base in ("adam", "sgd") else (0.0, 0.01, 0.1)
        for decay in decays:
            for schedule in ("cosine", "constant"):
                label = f"collapse, {base}, decay {decay:g}, {schedule}"
                yield row(label, base=base, lrs=lrs, steps=short, build=build, weight_decay=decay, schedule=schedule)
    adamw = functools.partial(row, base="adamw", lrs=LRS["adamw"][:-1], weight_decay=0.01)
    # Nothing can be validated where labels are random: what counts is that all of them are learned.
    labels = functools.partial(build, random_labels=True)
    yield adamw("collapse, random labels", steps=2 * short, build=labels, measure="train_error")
    yield adamw("collapse, tied embeddings", steps=short, build=functools.partial(_tied, folder))
    if size == "smoke":
        return
    for steps in (5000, 20000):
        yield adamw(f"collapse, adamw, constant, {steps} steps", steps=steps, build=build, schedule="constant")
        yield adamw(f"collapse, adamw, cosine, {steps} steps", steps=steps, build=build)
