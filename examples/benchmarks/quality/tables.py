"""Tables: logistic regressions, MLPs, regressions, separable tables, a stream, and runs that reach zero loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import data
import models
import torch
from pictures import supervised
from task import Base, Problem, Size, Task, batches, half_decades
from torch import Tensor
from torch.nn import functional as F

__all__ = ["rows_of_tables"]

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
LOWER_LRS: dict[Base, tuple[float, ...]] = {"adamw": half_decades(3e-5, 1e-1), "sgd": half_decades(3e-4, 1)}
"""Sweeps for little data, where the best rates are those too low to fit it fully."""
CONVEX_LRS = {"dna": (1e-4, 10), "usps": (1e-4, 10), "vowel": (1e-3, 100)}
"""Sweeps whose best lies outside of 1e-3 to 10."""
_CONVEX_BATCH = 16


def rows_of_tables(size: Size, folder: Path | None) -> Iterator[Problem]:
    """The problems of all families of this module."""
    if size == "gpu":
        return
    yield from _convex_rows(size, folder)
    yield from _mlp_rows(size, folder)
    yield from _stream_rows(size, folder)
    yield from _collapse_rows(size, folder)


# ------------------------------------------------------------------------------------------------ networks


def _networks(sets: data.Split, hidden: Sequence[int], batch: int, seeds: Sequence[int], device: torch.device) -> Task:
    """The task of a network for each seed, with classes or real numbers as targets."""
    x, y, x_test, y_test = (t.to(device) for t in sets)
    width = 1 if y.is_floating_point() else int(torch.cat([y, y_test]).max()) + 1
    model = models.MLPs(seeds, x.shape[1], hidden, width).to(device)
    orders = [batches(len(x), min(batch, len(x)), seed, device) for seed in seeds]

    def draw() -> tuple[Tensor, Tensor]:
        rows = torch.stack([next(order) for order in orders])
        return x[rows], y[rows]

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return _losses(model(inputs), targets)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, inputs, targets in (("train", x[:8192], y[:8192]), ("test", x_test, y_test)):
            outputs = model(inputs.expand(len(seeds), *inputs.shape))
            found[f"{part}_loss"] = _losses(outputs, targets.expand(len(seeds), -1))
            if not targets.is_floating_point():
                found[f"{part}_error"] = (outputs.argmax(-1) != targets).float().mean(1)
        return found

    return Task(list(model.members), draw, losses, evaluate)


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each member's mean over the rows."""
    if targets.is_floating_point():
        return F.mse_loss(outputs.squeeze(-1), targets, reduction="none").mean(1)
    every = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return every.view(targets.shape).mean(1)


def _classes(
    folder: Path | None,
    name: str,
    hidden: Sequence[int],
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    *,
    rows: int | None = None,
    random_labels: bool = False,
) -> Task:
    x, y, x_test, y_test = data.table(folder, name, rows)
    if random_labels:
        y = torch.randint(int(y.max()) + 1, y.shape, generator=torch.Generator().manual_seed(0))
    return _networks((x, y, x_test, y_test), hidden, batch, seeds, device)


def _numbers(
    folder: Path | None, name: str, hidden: Sequence[int], batch: int, seeds: Sequence[int], device: torch.device
) -> Task:
    return _networks(data.regression(folder, name), hidden, batch, seeds, device)


def _convex_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Logistic regressions."""
    row = functools.partial(Problem, family="convex", measure="test_error", ensemble=True)
    for name in CONVEX if folder is not None else ("iris", "wine"):
        epochs = 10 if size == "smoke" else 100
        steps = epochs * (len(data.table(folder, name)[0]) // _CONVEX_BATCH)
        build = functools.partial(_classes, folder, name, (), _CONVEX_BATCH)
        for base in ("adamw", "sgd"):
            lrs = half_decades(*CONVEX_LRS.get(name, (1e-3, 10)))
            yield row(f"{name}, {base}", base=base, lrs=lrs, steps=steps, build=build, schedule="step", warmup=0.0)


def _mlp_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """MLPs with two hidden layers: tables, small tables that are fitted to zero loss, and noisy regressions."""
    steps = 60 if size == "smoke" else 1000
    hidden = (16, 16) if size == "smoke" else (64, 64)
    bases: tuple[Base, ...] = ("adamw", "sgd")
    for base in bases:
        decay = 0.01 if base == "adamw" else 0.0
        lower = LOWER_LRS[base]
        row = functools.partial(Problem, base=base, steps=steps, weight_decay=decay, ensemble=True)
        for name in MLPS if folder is not None else ("digits",):
            build = functools.partial(_classes, folder, name, hidden, 64)
            yield row(f"{name}, {base}, MLP", "MLPs", lrs=LRS[base], build=build, measure="test_error")
        for name, count in SEPARABLE if folder is not None else SEPARABLE[:2]:
            build = functools.partial(_classes, folder, name, hidden, 64, rows=count)
            label = f"{name}{'' if count is None else f' ({count} rows)'}, {base}, separable"
            yield row(label, "separable", lrs=lower, build=build, measure="test_error")
        for name in REGRESSIONS if folder is not None else REGRESSIONS[:1]:
            build = functools.partial(_numbers, folder, name, hidden, 64)
            yield row(f"{name}, {base}, regression", "regressions", lrs=lower, build=build)


def _stream_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """A single pass over the data."""
    name = "digits" if folder is None else "optdigits"
    steps = 100 if size == "smoke" else len(data.table(folder, name)[0]) // 4
    build = functools.partial(_classes, folder, name, (64,), 4)
    lrs = half_decades(1e-3, 1)
    row = functools.partial(Problem, measure="test_error", schedule="constant", warmup=0.0, ensemble=True)
    yield row("stream of digits, sgd", "streams", "sgd", lrs, steps, build)


# ------------------------------------------------------------------------------------------------ collapse


def _tied(folder: Path | None, seeds: Sequence[int], device: torch.device) -> Task:
    """The task of a language model that memorises its few bytes, with tied embeddings."""
    torch.manual_seed(seeds[0])
    train, test = (t.to(device) for t in data.text(folder, "sources" if folder is None else "austen"))
    length = 16
    known, unknown = (source[:count].unfold(0, length + 1, 8) for source, count in ((train, 4096), (test, 16384)))
    sets = known[:, :-1], known[:, -1], unknown[:, :-1], unknown[:, -1]
    model = models.LastByte(width=32, layers=1, length=length, tied=True).to(device)
    return supervised(model, sets, batch=32, seed=seeds[0])


def _collapse_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Runs that reach a loss of zero and must not leave it again."""
    name = "digits" if folder is None else "optdigits"
    build = functools.partial(_classes, folder, name, (64,), 64, rows=1437)
    short = 60 if size == "smoke" else 1500
    row = functools.partial(Problem, family="collapse", warmup=0.0, measure="test_error", ensemble=True)
    for base in ("adamw", "adam", "sgd", "lion"):
        lrs, decays = LRS[base][:-1], (0.0, 0.01) if base in ("adam", "sgd") else (0.0, 0.01, 0.1)
        for decay in decays:
            for schedule in ("cosine", "constant"):
                label = f"collapse, {base}, decay {decay:g}, {schedule}"
                yield row(label, base=base, lrs=lrs, steps=short, build=build, weight_decay=decay, schedule=schedule)
    adamw = functools.partial(row, base="adamw", lrs=LRS["adamw"][:-1], weight_decay=0.01)
    # Random labels cannot be validated: what counts is that all of them are learned.
    labels = functools.partial(build, random_labels=True)
    yield adamw("collapse, random labels", steps=2 * short, build=labels, measure="train_error")
    yield adamw("collapse, tied embeddings", steps=short, build=functools.partial(_tied, folder), ensemble=False)
    if size == "smoke":
        return
    for steps in (5000, 20000):
        yield adamw(f"collapse, adamw, constant, {steps} steps", steps=steps, build=build, schedule="constant")
        yield adamw(f"collapse, adamw, cosine, {steps} steps", steps=steps, build=build)
