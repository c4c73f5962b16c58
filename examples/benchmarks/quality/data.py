"""The data: from a folder of real data sets if one is given, else from scikit-learn and Python."""

from __future__ import annotations

import functools
import io
import lzma
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Split", "images", "regression", "sentences", "table", "text"]

Split = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training inputs and targets, then test inputs and targets."""


@functools.cache
def table(folder: Path | None, name: str, rows: int | None = None) -> Split:
    """Standardised rows, and classes; `rows` limits the training rows."""
    if folder is None:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        known = None
    else:
        with np.load(folder / f"tab_{name}.npz") as file:
            x, y = file["X"], file["y"]
            known = file.get("is_train")
    return _split(x, torch.as_tensor(y, dtype=torch.long), known, rows)


@functools.cache
def regression(folder: Path | None, name: str) -> Split:
    """Rows and targets, standardised. Rows are clamped: typos like diamonds of 6 cm would dominate the test loss."""
    if folder is None:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        with np.load(folder / f"reg_{name}.npz") as file:
            x, y = file["X"], file["y"]
    target = torch.as_tensor(y, dtype=torch.float32)
    x_train, y_train, x_test, y_test = _split(x, (target - target.mean()) / target.std(), None, None)
    return x_train.clamp(-5, 5), y_train, x_test.clamp(-5, 5), y_test


def _split(x: np.ndarray, y: Tensor, known: np.ndarray | None, limit: int | None) -> Split:
    """Splits as the data set does, or else takes a random fifth for testing."""
    if known is None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        train, test = order[len(x) // 5 :], order[: len(x) // 5]
    else:
        marked = torch.as_tensor(known)
        train, test = marked.nonzero().squeeze(1), (~marked).nonzero().squeeze(1)
    train = train[:limit]
    rows = torch.as_tensor(x, dtype=torch.float32)
    rows = (rows - rows.mean(0)) / rows.std(0).clamp(min=1e-6)  # over all rows: a column may be constant in a few
    return rows[train], y[train], rows[test], y[test]


@functools.cache
def images(folder: Path | None, name: str) -> Split:
    """Standardised pictures (channels, height, width) and classes."""
    if folder is None:
        x, y, x_test, y_test = table(None, "digits")
        return x.view(-1, 1, 8, 8), y, x_test.view(-1, 1, 8, 8), y_test
    with np.load(folder / f"img_{name}.npz") as file:
        if "X_train" in file:
            pixels, labels = ([file[f"{kind}_{part}"] for part in ("train", "test")] for kind in "Xy")
        else:
            pixels, labels = [_sheets(file, "tr"), _sheets(file, "te")], [file["ytr"], file["yte"]]
    train, test = (torch.as_tensor(x, dtype=torch.float32) / 255 for x in pixels)
    train, test = (x.unsqueeze(1) if x.dim() == 3 else x for x in (train, test))
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    y, y_test = (torch.as_tensor(each, dtype=torch.long) for each in labels)
    return (train - mean) / std, y, (test - mean) / std, y_test


def _sheets(file: np.lib.npyio.NpzFile, part: str) -> np.ndarray:
    """Reads pictures from WebP files of 1,000 each, in 25 rows of 40."""
    from PIL import Image

    found = []
    for key in sorted((k for k in file if k.startswith(part)), key=lambda k: int(k[len(part) :])):
        sheet = np.asarray(Image.open(io.BytesIO(file[key].tobytes())).convert("RGB"))
        found.append(sheet.reshape(25, 32, 40, 32, 3).transpose(0, 2, 4, 1, 3).reshape(1000, 3, 32, 32))
    return np.concatenate(found)


@functools.cache
def text(folder: Path | None, name: str) -> tuple[Tensor, Tensor]:
    """The bytes for training and those for testing; without a folder, Python's own sources."""
    if folder is None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        whole = b"".join(path.read_bytes() for path in sources)
        parts = [whole[: -len(whole) // 10], whole[-len(whole) // 10 :]]
    else:
        parts = [lzma.decompress((folder / f"lm_{name}_{part}.txt.xz").read_bytes()) for part in ("train", "val")]
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


@functools.cache
def sentences(folder: Path | None, name: str) -> dict[str, tuple[list[str], Tensor]]:
    """Texts and classes by split; without a folder, lines of Python's os module, and whether they are indented."""
    if folder is None:
        code = [line for line in Path(os.__file__).read_text().splitlines() if line]
        parts = {"train": code[::2], "test": code[1::2]}
        return {part: (some, torch.tensor([line[0] == " " for line in some]).long()) for part, some in parts.items()}
    lines = lzma.decompress((folder / f"tc_{name}.txt.xz").read_bytes()).decode().splitlines()
    rows = [line.split("\t", 2) for line in lines]
    names = sorted({label for _, label, _ in rows})
    found = {}
    for part in ("train", "test"):
        chosen = [(words, names.index(label)) for split, label, words in rows if split == part]
        found[part] = [words for words, _ in chosen], torch.tensor([label for _, label in chosen])
    return found
