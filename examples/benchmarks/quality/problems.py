"""The problems: what is trained on what, for how long, by which base optimizer and schedule.

A problem is built for several members at once, one for each seed and learning rate, so that tiny models share their
launches; everything but the convex family has one member.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import data
import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FAMILIES", "Problem", "Size", "Task", "problems"]

Size = Literal["smoke", "cpu", "gpu"]
Base = Literal["adamw", "sgd", "lion"]
_Build = Callable[[Sequence[int], torch.device], "Task"]
FAMILIES = (
    "convex",
    "images",
    "language",
    "language, 500 steps",
    "language, 1000 steps",
    "fine-tuning",
    "streams",
    "warm-ups",
    "trends",
)
"""With the size "gpu", images and language have the network's name behind theirs."""


def half_decades(low: float, high: float) -> tuple[float, ...]:
    """1, 3, 10, ... times a power of ten, from low to high."""
    grid = (float(f"{a}e{e}") for e in range(-8, 3) for a in (1, 3))
    return tuple(lr for lr in grid if low <= lr <= high)


@dataclass(frozen=True)
class Task:
    """What a problem gives to the runner."""

    members: Sequence[nn.Module]
    """Each with an optimizer of its own."""
    losses: Callable[[], Tensor]
    """The next batch's training loss of each member."""
    evaluate: Callable[[], dict[str, Tensor]]
    """For each member, on fixed data: train_loss, and where it says something test_loss and accuracy."""


@dataclass(frozen=True)
class Problem:
    """One row of the table."""

    name: str
    family: str
    base: Base
    lrs: Sequence[float]
    """The sweep. Its best must not lie at an end. Empty where only the learned scale is of interest."""
    steps: int
    build: _Build
    """From seeds, one for each member, and a device."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    warmup: float = 0.05
    clip: float | None = None
    weight_decay: float = 0.0
    ensemble: bool = False
    """Whether all members may be built at once."""


# ------------------------------------------------------------------------------------------------ convex

CONVEX = ("dna", "glass", "iris", "letter", "pendigits", "usps", "vehicle", "vowel", "wine")
_CONVEX_BATCH = 16


def _convex(folder: Path | None, name: str, seeds: Sequence[int], device: torch.device) -> Task:
    x, y = (t.to(device) for t in data.table(folder, name))
    classes = int(y.max()) + 1
    model = models.LinearModels(len(seeds), inputs=x.shape[1], outputs=classes).to(device)
    generators = []
    for seed, member in zip(seeds, model.models, strict=True):
        torch.manual_seed(seed)
        member.reset_parameters()
        generators.append(_batches(len(x), _CONVEX_BATCH, seed))

    def losses() -> Tensor:
        rows = torch.stack([next(generator) for generator in generators])
        return (
            F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten(), reduction="none").view(rows.shape).mean(1)
        )

    def evaluate() -> dict[str, Tensor]:
        logits = model(x.expand(len(seeds), *x.shape))
        every = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(seeds)), reduction="none")
        accuracy = (logits.argmax(-1) == y).float().mean(1)
        return {"train_loss": every.view(len(seeds), -1).mean(1), "accuracy": accuracy}

    return Task(list(model.models), losses, evaluate)


def _batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Shuffled anew in each epoch; the last, shorter batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(rows, generator=generator)
        yield from order[: rows // size * size].view(-1, size)


# ------------------------------------------------------------------------------------------------ pictures


def _classifier(model: nn.Module, sets: tuple[Tensor, ...], *, batch: int, seed: int, augment: bool) -> Task:
    x, y, x_test, y_test = sets
    batches = _batches(len(x), batch, seed)

    def losses() -> Tensor:
        rows = next(batches)
        pictures = _shifted(x[rows]) if augment else x[rows]
        return F.cross_entropy(model(pictures), y[rows]).view(1)

    def evaluate() -> dict[str, Tensor]:
        kept = slice(0, 2048)
        train, test = _logits(model, x[kept]), _logits(model, x_test)
        return {
            "train_loss": F.cross_entropy(train, y[kept]).view(1),
            "test_loss": F.cross_entropy(test, y_test).view(1),
            "accuracy": (test.argmax(1) == y_test).float().mean().view(1),
        }

    return Task([model], losses, evaluate)


def _shifted(pictures: Tensor) -> Tensor:
    """Moved by up to four pixels, and half of them mirrored."""
    down, right = torch.randint(0, 9, (2,)).tolist()
    padded = F.pad(pictures, (4, 4, 4, 4))
    height, width = pictures.shape[2:]
    moved = padded[:, :, down : down + height, right : right + width]
    mirrored = torch.rand(len(pictures), 1, 1, 1, device=pictures.device) < 0.5
    return torch.where(mirrored, moved.flip(3), moved)


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(256)])


def _images(
    folder: Path | None, name: str, shape: dict[str, Any], batch: int, seeds: Sequence[int], device: torch.device
) -> Task:
    torch.manual_seed(seeds[0])
    sets = tuple(t.to(device) for t in data.images(folder, name))
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model = models.ResNet(sets[0].shape[1], 10, **shape).to(device, memory_format=layout)
    return _classifier(model, sets, batch=batch, seed=seeds[0], augment=name == "cifar10")


def _stream(folder: Path | None, batch: int, seeds: Sequence[int], device: torch.device) -> Task:
    """One pass: the runner asks for no more steps than there are batches."""
    torch.manual_seed(seeds[0])
    x, y = (t.to(device) for t in data.table(folder, "digits" if folder is None else "optdigits"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    kept = len(x) // 5
    sets = x[kept:], y[kept:], x[:kept], y[:kept]
    return _classifier(models.MLP(x.shape[1], 64, 10).to(device), sets, batch=batch, seed=seeds[0], augment=False)


# ------------------------------------------------------------------------------------------------ texts


def _language(
    folder: Path | None,
    name: str,
    shape: dict[str, int],
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    start: Callable[[torch.device], dict[str, Tensor]] | None = None,
) -> Task:
    torch.manual_seed(seeds[0])
    train, test = (t.to(device) for t in data.text(folder, name))
    model = models.GPT(**shape).to(device)
    if start is not None:
        model.load_state_dict(start(device))
    generator = torch.Generator().manual_seed(seeds[0])

    def loss_on(source: Tensor, rows: Tensor) -> Tensor:
        windows = source[rows[:, None].to(device) + torch.arange(shape["length"] + 1, device=device)]
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).view(1)

    def losses() -> Tensor:
        return loss_on(train, torch.randint(0, len(train) - shape["length"] - 1, (batch,), generator=generator))

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, source in (("train_loss", train), ("test_loss", test)):
            fixed = torch.Generator().manual_seed(12345)
            rows = torch.randint(0, len(source) - shape["length"] - 1, (256,), generator=fixed)
            found[part] = torch.stack([loss_on(source, some) for some in rows.split(32)]).mean(0)
        return found

    return Task([model], losses, evaluate)


def _pretrained(
    folder: Path | None, name: str, shape: dict[str, int], steps: int, batch: int, cache: Path, device: torch.device
) -> dict[str, Tensor]:
    """A language model after a plain run of AdamW; trained once and kept."""
    kept = cache / f"{name}-{'-'.join(map(str, shape.values()))}-{batch}-{steps}.pt"
    if not kept.exists():
        task = _language(folder, name, shape, batch, [0], device)
        optimizer = torch.optim.AdamW(task.members[0].parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            task.losses().sum().backward()
            optimizer.step()
            schedule.step()
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        torch.save(task.members[0].state_dict(), unfinished)
        unfinished.rename(kept)
    loaded: dict[str, Tensor] = torch.load(kept, map_location=device)
    return loaded


class _Sentiment(nn.Module):
    """A pretrained encoder's mean over the words, and a new linear head."""

    def __init__(self, encoder: nn.Module, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=words, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.dropout(mean))


def _encoder_tuning(
    folder: Path, encoder: str, name: str, dropout: float, batch: int, seeds: Sequence[int], device: torch.device
) -> Task:
    import transformers

    torch.manual_seed(seeds[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    body = transformers.AutoModel.from_pretrained(encoder, **drop)
    splits = {}
    for part, (texts, labels) in data.sentences(folder, name).items():
        tokens = tokenizer(texts, truncation=True, max_length=64, padding=True, return_tensors="pt")
        splits[part] = tokens["input_ids"].to(device), tokens["attention_mask"].to(device), labels.to(device)
    classes = int(splits["train"][2].max()) + 1
    model = _Sentiment(body, classes, dropout).to(device)
    batches = _batches(len(splits["train"][2]), batch, seeds[0])

    def logits_of(part: str, rows: Tensor) -> Tensor:
        words, mask, _ = splits[part]
        longest = int(mask[rows].sum(1).max())
        return model(words[rows, :longest], mask[rows, :longest])

    def losses() -> Tensor:
        rows = next(batches)
        return F.cross_entropy(logits_of("train", rows), splits["train"][2][rows]).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, key in (("train", "train_loss"), ("test", "test_loss")):
            rows = torch.arange(min(512, len(splits[part][2])))
            logits = torch.cat([logits_of(part, some) for some in rows.split(64)])
            labels = splits[part][2][rows]
            found[key] = F.cross_entropy(logits, labels).view(1)
            found["accuracy"] = (logits.argmax(1) == labels).float().mean().view(1)
        return found

    return Task([model], losses, evaluate)


# ------------------------------------------------------------------------------------------------ the table


def problems(size: Size, folder: Path | None, encoder: str | None, cache: Path) -> list[Problem]:
    """All rows that this size and these data allow.

    Args:
        size: How large: "smoke" is a test of the code, "cpu" takes hours on two cores, "gpu" wants a GPU.
        folder: Real data sets; without them, scikit-learn's and Python's own sources.
        encoder: The path of a pretrained encoder in transformers' layout.
        cache: Where to keep the language models that are trained first and tuned then.
    """
    return [
        *_convex_rows(size, folder),
        *_image_rows(size, folder),
        *_language_rows(size, folder),
        *_tuning_rows(size, folder, encoder, cache),
        *_stream_rows(size, folder),
        *_warmup_rows(size, folder, cache),
        *_trend_rows(size, folder),
    ]


def _convex_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    names = CONVEX if folder is not None else ("iris", "wine")
    for name in names:
        epochs = 10 if size == "smoke" else 100
        steps = epochs * (len(data.table(folder, name)[0]) // _CONVEX_BATCH)
        for base in ("adamw", "sgd"):
            build = functools.partial(_convex, folder, name)
            lrs = half_decades(1e-3, 10)
            yield Problem(
                f"{name}, {base}", "convex", base, lrs, steps, build, schedule="step", warmup=0.0, ensemble=True
            )


def _image_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    rows: dict[Size, tuple[dict[str, Any], int, int]] = {
        "smoke": ({"width": 4, "blocks": (1, 1)}, 32, 60),
        "cpu": ({"width": 8, "blocks": (1, 1, 1), "shrink": 2}, 32, 500),
        "gpu": ({"width": 64, "blocks": (2, 2, 2, 2)}, 128, 6000),
    }
    shape, batch, steps = rows[size]
    for name in ("digits",) if folder is None else ("fashion_mnist", "cifar10"):
        build = functools.partial(_images, folder, name, shape, batch)
        sgd, adamw = half_decades(1e-2, 3), half_decades(3e-4, 3e-2)
        network = ", ResNet-18" if size == "gpu" else ""
        family = f"images{network}"
        yield Problem(f"{name}, sgd{network}", family, "sgd", sgd, steps, build, weight_decay=5e-4)
        yield Problem(f"{name}, adamw{network}", family, "adamw", adamw, steps, build)
        if name == "cifar10":
            label = f"{name}, sgd, steps{network}"
            yield Problem(label, family, "sgd", sgd, steps, build, schedule="step", weight_decay=5e-4)


_GPT: dict[Size, tuple[dict[str, int], int]] = {
    "smoke": ({"width": 16, "layers": 1, "length": 16}, 4),
    "cpu": ({"width": 64, "layers": 2, "length": 64}, 8),
    "gpu": ({"width": 384, "layers": 6, "length": 256}, 64),
}


def _network(size: Size) -> str:
    """For the labels: at the two smaller sizes there is nothing to tell apart."""
    return ", 10.7M" if size == "gpu" else ""


def _language_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    shape, batch = _GPT[size]
    network = _network(size)
    for name in ("sources",) if folder is None else ("austen", "enwik8_10mb", "pystdlib"):
        build = functools.partial(_language, folder, name, shape, batch)
        for steps, family in (
            (500, "language, 500 steps"),
            (1000, "language, 1000 steps"),
            (3000 if size == "cpu" else 10000, "language"),
        ):
            for base, lrs in (("adamw", half_decades(3e-4, 3e-2)), ("lion", half_decades(3e-5, 3e-3))):
                count = 40 if size == "smoke" else steps
                label = f"{name}, {base}, {steps} steps{network}"
                yield Problem(label, f"{family}{network}", base, lrs, count, build, clip=1.0, weight_decay=0.1)


def _text_to_text(size: Size, folder: Path | None, cache: Path) -> tuple[str, _Build]:
    """A language model that goes on to another text."""
    shape, batch = _GPT[size]
    texts = ("sources", "sources") if folder is None else ("pystdlib", "austen")
    first = functools.partial(_pretrained, folder, texts[0], shape, 20 if size == "smoke" else 1000, batch, cache)
    return f"{texts[0]} to {texts[1]}, adamw", functools.partial(_language, folder, texts[1], shape, batch, start=first)


def _tuning_rows(size: Size, folder: Path | None, encoder: str | None, cache: Path) -> Iterator[Problem]:
    label, build = _text_to_text(size, folder, cache)
    steps, lrs = 20 if size == "smoke" else 500, half_decades(1e-4, 3e-2)
    yield Problem(f"{label}{_network(size)}", "fine-tuning", "adamw", lrs, steps, build, clip=1.0, weight_decay=0.1)
    if folder is None or encoder is None:
        return
    for name in ("rotten_tomatoes", "20newsgroups"):
        for dropout in (0.0, 0.1):
            steps = {"smoke": 5, "cpu": 200, "gpu": 1000}[size]
            build = functools.partial(_encoder_tuning, folder, encoder, name, dropout, 16)
            yield Problem(
                f"{name}, adamw, dropout {dropout:g}",
                "fine-tuning",
                "adamw",
                half_decades(1e-5, 1e-2),
                steps,
                build,
                clip=1.0,
                weight_decay=0.01,
            )


def _stream_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    rows = len(data.table(folder, "digits" if folder is None else "optdigits")[0])
    steps = 100 if size == "smoke" else rows * 4 // 5 // 4
    build = functools.partial(_stream, folder, 4)
    lrs = half_decades(1e-3, 1)
    yield Problem("stream of digits, sgd", "streams", "sgd", lrs, steps, build, schedule="constant", warmup=0.0)


def _warmup_rows(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    """A schedule's own warm-up: none, a short and a very long one, from scratch and from another text."""
    shape, batch = _GPT[size]
    name = "sources" if folder is None else "austen"
    scratch = f"{name}, adamw", functools.partial(_language, folder, name, shape, batch)
    steps, warm = (40, (0, 4, 25)) if size == "smoke" else (3000, (0, 75, 2000))
    for label, build in (scratch, _text_to_text(size, folder, cache)):
        for count in warm:
            yield Problem(
                f"{label}, warm-up {count}{_network(size)}",
                "warm-ups",
                "adamw",
                half_decades(3e-4, 3e-2),
                steps,
                build,
                warmup=count / steps,
                clip=1.0,
                weight_decay=0.1,
            )


def _trend_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """How the learned scale moves with the batch and with the model: no sweep is needed for that."""
    shape, batch = _GPT[size]
    steps = 40 if size == "smoke" else 500
    name = "sources" if folder is None else "austen"
    sizes = [(batch // 4, shape["width"]), (batch, shape["width"]), (4 * batch, shape["width"])]
    sizes += [(batch, shape["width"] // 2), (batch, 2 * shape["width"])]
    for rows, width in sizes:
        build = functools.partial(_language, folder, name, {**shape, "width": width}, rows)
        label = f"{name}, adamw, batch {rows}, width {width}"
        yield Problem(label, "trends", "adamw", (), steps, build, clip=1.0, weight_decay=0.1)
