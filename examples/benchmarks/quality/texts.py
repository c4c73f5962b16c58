"""Texts: language models from scratch or tuned to another text, with all weights or LoRA; pretrained encoders."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import data
import models
import torch
from task import Base, Build, Problem, Size, Task, batches, half_decades
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["language", "pretrained", "rows_of_texts", "windows_of"]

_GPT: dict[Size, tuple[dict[str, int], int]] = {
    "smoke": ({"width": 16, "layers": 1, "length": 16}, 4),
    "cpu": ({"width": 64, "layers": 2, "length": 64}, 8),
    "gpu": ({"width": 384, "layers": 6, "length": 256}, 64),
}
"""Shapes and batch sizes; the largest has 10.7 million parameters."""
_GPT2: dict[Size, tuple[dict[str, int], int]] = {
    "smoke": ({"width": 16, "layers": 1, "length": 16, "heads": 2, "vocabulary": 300, "tied": True}, 4),
    "gpu": ({"width": 768, "layers": 12, "length": 512, "heads": 12, "vocabulary": 50257, "tied": True}, 16),
}
"""GPT-2 with its 124 million parameters, though bytes use only 256 of its tokens."""


def rows_of_texts(size: Size, folder: Path | None, encoder: str | None, cache: Path) -> Iterator[Problem]:
    """The problems of all families of this module."""
    if size != "gpu":
        yield from _small_rows(size, folder)
        yield from _text_to_text_rows(size, folder, cache)
        yield from _warmup_rows(size, folder, cache)
    if size != "cpu":
        yield from _gpt_rows(size, folder)
        yield _gpt2_row(size, folder)
        yield from _tuning_rows(size, folder, cache)
    if size == "cpu" and folder is not None and encoder is not None:
        yield from _encoder_rows(folder, encoder)
    yield from _trend_rows(size, folder)


# ------------------------------------------------------------------------------------------------ language models


def language(
    folder: Path | None,
    name: str,
    network: Callable[[], nn.Module],
    length: int,
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    *,
    start: Callable[[torch.device], dict[str, Tensor]] | None = None,
    lora: bool = False,
    static: bool = True,
) -> Task:
    """The task of predicting each byte of a text from those before it."""
    torch.manual_seed(seeds[0])
    train, test = (t.to(device) for t in data.text(folder, name))
    model = network()
    if start is not None:
        model.load_state_dict(start(device))
    if lora:
        torch.manual_seed(seeds[0])  # `start` may have trained and used random numbers
        models.add_lora(model)
    model.to(device)
    generator = torch.Generator(device).manual_seed(seeds[0])

    def draw() -> tuple[Tensor, ...]:
        return (windows_of(train, batch, length + 1, generator),)

    def losses(text: Tensor) -> Tensor:
        logits = model(text[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, source in (("train_loss", train), ("test_loss", test)):
            fixed = torch.Generator(device).manual_seed(12345)
            chosen = windows_of(source, 512 if device.type == "cuda" else 256, length + 1, fixed)
            found[part] = torch.stack([losses(some) for some in chosen.split(32)]).mean(0)
        return found

    return Task([model], draw, losses, evaluate, static)


def windows_of(source: Tensor, count: int, length: int, at: torch.Generator) -> Tensor:
    """Pieces of a text that begin anywhere."""
    first = torch.randint(0, len(source) - length, (count, 1), generator=at, device=source.device)
    return source[first + torch.arange(length, device=source.device)]


def _language(
    folder: Path | None,
    name: str,
    shape: dict[str, int],
    batch: int,
    seeds: Sequence[int],
    device: torch.device,
    *,
    start: Callable[[torch.device], dict[str, Tensor]] | None = None,
    lora: bool = False,
) -> Task:
    network = functools.partial(models.GPT, **shape)
    return language(folder, name, network, shape["length"], batch, seeds, device, start=start, lora=lora)


def _pretrained(
    folder: Path | None, name: str, shape: dict[str, int], steps: int, batch: int, cache: Path, device: torch.device
) -> dict[str, Tensor]:
    kept = cache / f"{name}-{'-'.join(map(str, shape.values()))}-{batch}-{steps}.pt"
    return pretrained(kept, functools.partial(_language, folder, name, shape, batch), steps, 1e-3, device)


def pretrained(kept: Path, build: Build, steps: int, lr: float, device: torch.device) -> dict[str, Tensor]:
    """A model after plain AdamW, trained once and kept in a file; other processes wait for it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            unfinished = kept.with_suffix(f".{os.getpid()}")
            torch.save(_trained(build([0], device), steps, lr), unfinished)
            unfinished.rename(kept)
    loaded: dict[str, Tensor] = torch.load(kept, map_location=device)
    return loaded


def _trained(task: Task, steps: int, lr: float) -> dict[str, Tensor]:
    (model,) = task.members
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = task.losses(*task.batch()).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def _small_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """Problems that a CPU can train in a minute."""
    shape, batch = _GPT[size]
    for name in ("sources",) if folder is None else ("austen", "enwik8_10mb", "pystdlib"):
        build = functools.partial(_language, folder, name, shape, batch)
        for steps in (500, 1000, 3000):
            family = "language" if steps == 3000 else f"language, {steps} steps"
            for base, lrs in (("adamw", half_decades(3e-4, 3e-2)), ("lion", half_decades(3e-5, 3e-3))):
                count = 40 if size == "smoke" else steps
                label = f"{name}, {base}, {steps} steps"
                yield Problem(label, family, base, lrs, count, build, clip=1.0, weight_decay=0.1)


def _gpt_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    shape, batch = _GPT[size]
    build = functools.partial(_language, folder, "enwik8_10mb", shape, batch)
    rows: list[tuple[Base, int, tuple[float, ...], float]] = [
        ("adamw", 1500, half_decades(3e-4, 1e-2), 0.1),
        ("adamw", 5000, half_decades(3e-4, 3e-2), 0.1),
        ("lion", 1500, half_decades(3e-5, 3e-3), 1.0),
        ("muon", 1500, half_decades(3e-4, 3e-2), 0.1),
    ]
    for base, steps, lrs, decay in rows:
        count = 40 if size == "smoke" else steps
        yield Problem(
            f"GPT, {base}, {steps} steps", "GPT", base, lrs, count, build, clip=1.0, weight_decay=decay, bf16=True
        )


def _gpt2_row(size: Size, folder: Path | None) -> Problem:
    shape, batch = _GPT2[size]
    build = functools.partial(_language, folder, "enwik8_10mb", shape, batch)
    return Problem(
        "GPT-2, adamw, 1500 steps", "GPT-2", "adamw", half_decades(3e-4, 3e-3), 40 if size == "smoke" else 1500, build,
        clip=1.0, weight_decay=0.1, bf16=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ tuning


def _tuning_rows(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    """The GPT is tuned to another text without warm-up, with all weights or LoRA."""
    shape, _ = _GPT[size]
    texts = ("sources", "sources") if folder is None else ("enwik8_10mb", "pystdlib")
    first = functools.partial(_pretrained, folder, texts[0], shape, 20 if size == "smoke" else 1500, 64, cache)
    for family, lrs in (("GPT tuned", half_decades(3e-5, 3e-3)), ("GPT with LoRA", half_decades(3e-4, 3e-2))):
        build = functools.partial(_language, folder, texts[1], shape, 16, start=first, lora=family == "GPT with LoRA")
        for steps in (75, 200, 500):
            count = 40 if size == "smoke" else steps
            yield Problem(
                f"{family}, adamw, {steps} steps", family, "adamw", lrs, count, build, warmup=0.0, clip=1.0,
                weight_decay=0.01, bf16=True,
            )  # fmt: skip


def _text_to_text(size: Size, folder: Path | None, cache: Path) -> tuple[str, Build]:
    shape, batch = _GPT[size]
    texts = ("sources", "sources") if folder is None else ("pystdlib", "austen")
    first = functools.partial(_pretrained, folder, texts[0], shape, 20 if size == "smoke" else 1000, batch, cache)
    return f"{texts[0]} to {texts[1]}, adamw", functools.partial(_language, folder, texts[1], shape, batch, start=first)


def _text_to_text_rows(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    label, build = _text_to_text(size, folder, cache)
    steps, lrs = 20 if size == "smoke" else 500, half_decades(1e-4, 3e-2)
    yield Problem(label, "fine-tuning", "adamw", lrs, steps, build, clip=1.0, weight_decay=0.1)


class _Sentiment(nn.Module):
    """A new linear head on a pretrained encoder's mean over the words."""

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
    model = _Sentiment(body, int(splits["train"][2].max()) + 1, dropout).to(device)
    order = batches(len(splits["train"][2]), batch, seeds[0], device)

    def chosen(part: str, rows: Tensor) -> tuple[Tensor, ...]:
        words, mask, labels = splits[part]
        longest = int(mask[rows].sum(1).max())
        return words[rows, :longest], mask[rows, :longest], labels[rows]

    def losses(words: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(words, mask), labels).view(1)

    def evaluate() -> dict[str, Tensor]:
        found = {}
        for part, (_, _, labels) in splits.items():
            rows = torch.arange(min(512, len(labels)), device=device)
            logits = torch.cat([model(*chosen(part, some)[:2]) for some in rows.split(64)])
            found[f"{part}_loss"] = F.cross_entropy(logits, labels[rows]).view(1)
            found[f"{part}_error"] = (logits.argmax(1) != labels[rows]).float().mean().view(1)
        return found

    return Task([model], lambda: chosen("train", next(order)), losses, evaluate, static=False)


def _encoder_rows(folder: Path, encoder: str) -> Iterator[Problem]:
    row = functools.partial(Problem, family="fine-tuning", base="adamw", steps=200, clip=1.0, weight_decay=0.01)
    for name in ("rotten_tomatoes", "20newsgroups"):
        for dropout in (0.0, 0.1):
            build = functools.partial(_encoder_tuning, folder, encoder, name, dropout, 16)
            label = f"{name}, adamw, dropout {dropout:g}"
            yield row(label, lrs=half_decades(1e-5, 1e-2), build=build, measure="test_error")


# ------------------------------------------------------------------------------------------------ warm-ups, trends


def _warmup_rows(size: Size, folder: Path | None, cache: Path) -> Iterator[Problem]:
    """Warm-ups in the schedule: none, short and very long, from scratch and from another text."""
    shape, batch = _GPT[size]
    name = "sources" if folder is None else "austen"
    scratch = f"{name}, adamw", functools.partial(_language, folder, name, shape, batch)
    steps, warm = (40, (0, 4, 25)) if size == "smoke" else (3000, (0, 75, 2000))
    row = functools.partial(Problem, family="warm-ups", base="adamw", steps=steps, clip=1.0, weight_decay=0.1)
    for label, build in (scratch, _text_to_text(size, folder, cache)):
        for count in warm:
            lrs = half_decades(3e-4, 3e-2)
            yield row(f"{label}, warm-up {count}", lrs=lrs, build=build, warmup=count / steps)


def _trend_rows(size: Size, folder: Path | None) -> Iterator[Problem]:
    """The learned scale for several batch sizes and model widths, without a sweep."""
    shape, batch = _GPT[size]
    steps = 40 if size == "smoke" else 500
    name = "sources" if folder is None else "austen"
    sizes = [(batch // 4, shape["width"]), (batch, shape["width"]), (4 * batch, shape["width"])]
    sizes += [(batch, shape["width"] // 2), (batch, 2 * shape["width"])]
    for rows, width in sizes:
        build = functools.partial(_language, folder, name, {**shape, "width": width}, rows)
        label = f"{name}, adamw, batch {rows}, width {width}"
        yield Problem(label, "trends", "adamw", (), steps, build, clip=1.0, weight_decay=0.1)
