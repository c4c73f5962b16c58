"""The MNIST example of github.com/facebookresearch/schedule_free, with Mechanic in place of its optimizer.

    python examples/airbench/mnist.py --script schedule_free/examples/mnist/main.py --seeds 1 2 3

The example calls optimizer.eval() once an epoch, which is when the schedule steps here. Pictures are transformed once,
not in every epoch, and shuffled on a CPU as they are on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from mechanic_plugins import mechanize

SCHEDULES = {"constant": 1.0, "falling": 0.7}
"""The factor on the rate after each epoch. 0.7 is that of torch's own MNIST example."""


class Loader:
    """Does what the example needs of a DataLoader. Batches of 64 are for training."""

    def __init__(self, dataset: Any, batch_size: int, **_others: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pictures, labels = zip(*(dataset[row] for row in range(len(dataset))), strict=True)
        self.dataset, self.batch_size, self.shuffles = dataset, batch_size, batch_size == 64
        self.pictures, self.labels = torch.stack(pictures).to(device), torch.tensor(labels, device=device)

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.labels)
        order = torch.randperm(count) if self.shuffles else torch.arange(count)
        for rows in torch.split(order.to(self.labels.device), self.batch_size):
            yield self.pictures[rows], self.labels[rows]


def built(schedule: str, params: Iterable[torch.nn.Parameter]) -> Optimizer:
    """Mechanic with the train() and eval() that the example calls."""
    optimizer: Any = mechanize(torch.optim.AdamW(params))
    optimizer.train, optimizer.eval = lambda: None, StepLR(optimizer, 1, SCHEDULES[schedule]).step
    return optimizer  # type: ignore[no-any-return]


def accuracies(script: Path, schedule: str, seed: int) -> list[float]:
    """The test accuracy after each epoch, as the example prints it."""
    said = io.StringIO()
    with (
        mock.patch.object(
            importlib.import_module("schedulefree"), "AdamWScheduleFree", lambda params, lr: built(schedule, params)
        ),
        mock.patch.object(torch.utils.data, "DataLoader", Loader),
        mock.patch.object(sys, "argv", [str(script), "--seed", str(seed)]),
        contextlib.redirect_stdout(said),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return [int(right) / int(of) for right, of in re.findall(r"Accuracy: (\d+)/(\d+)", said.getvalue())]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True, help="examples/mnist/main.py in a checkout")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--records", type=Path, default=Path("mnist.jsonl"), help="a line is added for each run")
    given = parser.parse_args(words)
    for seed, schedule in itertools.product(given.seeds, given.schedules):
        record = {"schedule": schedule, "seed": seed, "accuracies": accuracies(given.script, schedule, seed)}
        with given.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(*record.values())


if __name__ == "__main__":
    main()
