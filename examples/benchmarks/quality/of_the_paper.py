"""The paper's experiments that need a GPU: ResNet-18 on CIFAR-10, and a small BERT, trained and tuned.

Its logistic regressions and its trends are the families "convex" and "trends" of the CPU's size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data
import models
import torch
from pictures import classes_of_pictures, supervised
from task import Problem, Size, Task, half_decades
from texts import pretrained, windows_of
from torch import Tensor
from torch.nn import functional as F

__all__ = ["rows_of_the_paper"]

MASK = 0
"""A byte that no text has."""
DROPOUTS = (0.0, 0.1)
"""The paper found that its algorithm does not go with dropout."""


def rows_of_the_paper(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    """The problems of the size "paper"."""
    yield _resnet_row(size, folder)
    yield from _bert_rows(size, folder, cache)


def _resnet_row(size: Size, folder: Path | None) -> Problem:
    """200 epochs of batches of 128; the rates and the weight decay are of the paper's grid."""
    if size == "smoke":
        name, shape, batch, steps = "digits", {"width": 4, "blocks": (1, 1)}, 32, 60
    else:
        name, shape, batch, steps = "cifar10_20k", {"width": 64, "blocks": (2, 2, 2, 2)}, 128, 200 * (20000 // 128)
    build = functools.partial(classes_of_pictures, folder, name, "resnet", shape, batch, augment=True)
    return Problem(
        "ResNet-18, sgd, 200 epochs", "ResNet-18, 200 epochs", "sgd", (0.03, 0.1, 0.3), steps, build, "test_error",
        "fifths", warmup=0.0, clip=1.0, weight_decay=5e-4, bf16=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ BERT


def _bert_rows(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    """Masked bytes, then sentences. The paper has words, models twenty times as large and other sentences."""
    shape, batch, steps, tuning = {"length": 128, "width": 256, "layers": 6}, 256, 10000, (16, 10)
    if size == "smoke":
        shape, batch, steps, tuning = {"length": 16, "width": 16, "layers": 1}, 8, 60, (8, 1)
    text, sets = ("sources", ("lines",)) if folder is None else ("enwik8_10mb", ("rotten_tomatoes", "20newsgroups"))
    row = functools.partial(Problem, base="adamw", schedule="linear", warmup=0.06, measure="test_error", bf16=True)
    for dropout in DROPOUTS:
        build = functools.partial(_masked, folder, text, {**shape, "dropout": dropout}, batch)
        yield row(
            f"BERT, adamw, dropout {dropout:g}", "BERT", steps=steps, build=build, clip=1.0, weight_decay=0.01,
            lrs=(1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
        )  # fmt: skip
    kept = cache / f"BERT-{text}-{'-'.join(map(str, shape.values()))}-{batch}-{steps}.pt"
    start = functools.partial(_masked, folder, text, {**shape, "dropout": 0.0}, batch)
    first = functools.partial(pretrained, kept, start, steps, 3e-4)
    few, epochs = tuning
    for name in sets:
        count = epochs * (len(data.sentences(folder, name)["train"][0]) // few)
        for dropout in DROPOUTS:
            build = functools.partial(_tuned, folder, name, {**shape, "dropout": dropout}, few, first)
            label = f"BERT on {name}, adamw, dropout {dropout:g}"
            yield row(label, "BERT tuned", lrs=half_decades(1e-5, 1e-3), steps=count, build=build)


def _masked(
    folder: Path | None, name: str, shape: dict[str, Any], batch: int, seeds: Sequence[int], device: torch.device
) -> Task:
    """The task of telling 15% of the bytes: of these, 80% are masked, 10% replaced and 10% left."""
    torch.manual_seed(seeds[0])
    train, test = (t.to(device) for t in data.text(folder, name))
    model = models.BERT(256, **shape).to(device)
    generator = torch.Generator(device).manual_seed(seeds[0])

    def masked(source: Tensor, count: int, at: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        text = windows_of(source, count, shape["length"], at)
        draw = functools.partial(torch.rand, text.shape, generator=at, device=device)
        asked, kind = draw() < 0.15, draw()
        shown = torch.where(asked & (kind < 0.8), MASK, text)
        other = torch.randint(256, text.shape, generator=at, device=device)
        return torch.where(asked & (kind > 0.9), other, shown), text, asked

    def losses(shown: Tensor, text: Tensor, asked: Tensor) -> Tensor:
        every = F.cross_entropy(model(shown).float().flatten(0, 1), text.flatten(), reduction="none")
        return ((every * asked.flatten()).sum() / asked.sum()).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, source in (("train", train), ("test", test)):
            shown, text, asked = masked(source, 512, torch.Generator(device).manual_seed(12345))
            logits = torch.cat([model(some).float() for some in shown.split(64)])[asked]
            found[f"{part}_loss"] = F.cross_entropy(logits, text[asked]).view(1)
            found[f"{part}_error"] = (logits.argmax(1) != text[asked]).float().mean().view(1)
        return found

    return Task([model], lambda: masked(train, batch, generator), losses, evaluate)


def _tuned(
    folder: Path | None, name: str, shape: dict[str, Any], batch: int, start: Any, seeds: Sequence[int],
    device: torch.device,
) -> Task:  # fmt: skip
    """The task of classifying sentences by an encoder that knows masked bytes, with a new head."""
    torch.manual_seed(seeds[0])
    sets = []
    for part in ("train", "test"):
        texts, labels = data.sentences(folder, name)[part]
        rows = [list(text.encode()[: shape["length"]].ljust(shape["length"])) for text in texts]
        sets += [torch.tensor(rows).to(device), labels.to(device)]
    learned = {key: value for key, value in start(device).items() if not key.startswith("head.")}
    torch.manual_seed(seeds[0])  # `start` may have trained and used random numbers
    model = models.BERT(int(sets[1].max()) + 1, **shape, pooled=True)
    model.load_state_dict(learned, strict=False)
    x, y, x_test, y_test = sets
    return supervised(model.to(device), (x, y, x_test, y_test), batch=batch, seed=seeds[0])
