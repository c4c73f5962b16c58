"""The data: from a folder of real data sets where one is given, else what comes with scikit-learn and Python."""

from __future__ import annotations

import functools
import lzma
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["images", "sentences", "table", "text"]


@functools.cache
def table(folder: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """Rows (standardised) and classes to train on."""
    if folder is None:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        with np.load(folder / f"tab_{name}.npz") as file:
            x, y = file["X"], file["y"]
            if "is_train" in file:
                x, y = x[file["is_train"]], y[file["is_train"]]
    rows = torch.as_tensor(x, dtype=torch.float32)
    rows = (rows - rows.mean(0)) / rows.std(0).clamp(min=1e-6)
    return rows, torch.as_tensor(y, dtype=torch.long)


@functools.cache
def images(folder: Path | None, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pictures (channels, height, width; standardised), their classes, and the same to test on."""
    if folder is None:
        x, y = table(None, "digits")
        pictures = x.view(-1, 1, 8, 8)
        return pictures[:1500], y[:1500], pictures[1500:], y[1500:]
    with np.load(folder / f"img_{name}.npz") as file:
        train, test = (torch.as_tensor(file[f"X_{part}"], dtype=torch.float32) / 255 for part in ("train", "test"))
        labels = [torch.as_tensor(file[f"y_{part}"], dtype=torch.long) for part in ("train", "test")]
    train, test = (x.unsqueeze(1) if x.dim() == 3 else x for x in (train, test))
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    return (train - mean) / std, labels[0], (test - mean) / std, labels[1]


@functools.cache
def text(folder: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """The bytes to train on, and those to test on; without a folder, Python's own sources."""
    if folder is None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        whole = b"".join(path.read_bytes() for path in sources)
        parts = [whole[: -len(whole) // 10], whole[-len(whole) // 10 :]]
    else:
        parts = [lzma.decompress((folder / f"lm_{name}_{part}.txt.xz").read_bytes()) for part in ("train", "val")]
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


@functools.cache
def sentences(folder: Path, name: str) -> dict[str, tuple[list[str], Tensor]]:
    """Texts and classes, by split."""
    lines = lzma.decompress((folder / f"tc_{name}.txt.xz").read_bytes()).decode().splitlines()
    rows = [line.split("\t", 2) for line in lines]
    names = sorted({label for _, label, _ in rows})
    found = {}
    for part in ("train", "test"):
        chosen = [(words, names.index(label)) for split, label, words in rows if split == part]
        found[part] = [words for words, _ in chosen], torch.tensor([label for _, label in chosen])
    return found
