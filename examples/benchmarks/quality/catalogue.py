"""The table of all problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kept_back import rows_kept_back
from of_the_paper import rows_of_the_paper
from pictures import rows_of_pictures
from tables import rows_of_tables
from task import Problem, Schedule, Size
from texts import rows_of_texts

__all__ = ["FAMILIES", "problems"]

FAMILIES: dict[Size, tuple[str, ...]] = {
    "cpu": (
        "convex",
        "MLPs",
        "separable",
        "regressions",
        "streams",
        "collapse",
        "images",
        "language, 500 steps",
        "language, 1000 steps",
        "language",
        "fine-tuning",
        "warm-ups",
        "schedules",
        "trends",
    ),
    "gpu": (
        "ResNet-18",
        "VGG",
        "ViT",
        "diffusion",
        "GPT",
        "GPT-2",
        "GPT tuned",
        "GPT with LoRA",
        "schedules",
        "trends",
        "kept back",
    ),
    "paper": ("ResNet-18, 200 epochs", "BERT", "BERT tuned"),
}
"""The families at each size; "smoke" has all of them."""
WARMUPS: dict[Schedule, float] = {"constant": 0.0, "wsd": 0.05, "one-cycle": 0.3, "restarts": 0.0}
UNDER_OTHER_SCHEDULES: dict[str, tuple[Schedule, ...]] = {
    "digits, adamw, MLP": ("wsd", "one-cycle", "restarts"),
    "letter, adamw, MLP": ("constant", "wsd", "one-cycle", "restarts"),
    "letter, sgd, MLP": ("constant", "wsd", "one-cycle", "restarts"),
    "cifar10, sgd": ("constant", "wsd", "one-cycle", "restarts"),
    "austen, adamw, 1000 steps": ("constant", "wsd", "one-cycle", "restarts"),
    "diffusion, adamw": ("constant", "wsd"),
    "ResNet-18, sgd": ("constant", "wsd"),
    "VGG with batch norm, sgd": ("constant", "wsd"),
    "GPT, adamw, 1500 steps": ("constant", "wsd"),
}
"""Problems that are also trained with schedules other than a warm-up and a cosine."""


def problems(size: Size, folder: Path | None, encoder: str | None, cache: Path) -> list[Problem]:
    """All problems that this size and these data allow.

    Args:
        size: "smoke" is a test of the code, "cpu" takes hours on two cores, "gpu" needs a GPU, and so do those of
            the paper's experiments that are "paper".
        folder: Real data sets; without it, scikit-learn's data and Python's own sources.
        encoder: The path of a pretrained encoder in transformers' layout.
        cache: Where to keep the language models that are pretrained and then tuned.
    """
    if size == "paper":
        return list(rows_of_the_paper(size, folder, cache))
    rows = [
        *rows_of_tables(size, folder),
        *rows_of_pictures(size, folder),
        *rows_of_texts(size, folder, encoder, cache),
    ]
    rows += _under_other_schedules(rows)
    return [*rows, *rows_kept_back(size, folder), *(rows_of_the_paper(size, folder, cache) if size == "smoke" else ())]


def _under_other_schedules(rows: Iterable[Problem]) -> Iterator[Problem]:
    for row in rows:
        for schedule in UNDER_OTHER_SCHEDULES.get(row.name, ()):
            yield replace(
                row, name=f"{row.name}, {schedule}", family="schedules", schedule=schedule, warmup=WARMUPS[schedule]
            )
