"""The table of all problems."""

from __future__ import annotations

from pathlib import Path

from pictures import rows_of_pictures
from tables import rows_of_tables
from task import Problem, Size
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
        "trends",
    ),
    "gpu": ("ResNet-18", "VGG", "ViT", "diffusion", "GPT", "GPT-2", "GPT tuned", "GPT with LoRA", "trends"),
}
"""What there is at each size; "smoke" has all of them."""


def problems(size: Size, folder: Path | None, encoder: str | None, cache: Path) -> list[Problem]:
    """All rows that this size and these data allow.

    Args:
        size: How large: "smoke" is a test of the code, "cpu" takes hours on two cores, "gpu" wants a GPU.
        folder: Real data sets; without them, scikit-learn's and Python's own sources.
        encoder: The path of a pretrained encoder in transformers' layout.
        cache: Where to keep the language models that are trained first and tuned then.
    """
    return [
        *rows_of_tables(size, folder),
        *rows_of_pictures(size, folder),
        *rows_of_texts(size, folder, encoder, cache),
    ]
