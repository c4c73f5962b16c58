"""The MNIST example of github.com/facebookresearch/schedule_free, with other optimizers in place of its own.

    python examples/airbench/mnist.py --script schedule_free/examples/mnist/main.py --method mechanic --seed 1

Its train() and test() switch the optimizer between train and eval once an epoch, which is when a schedule steps here.
Its pictures are transformed once and kept on the device, not once an epoch: nothing else takes as long.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from mechanic_plugins import mechanize

METHODS: dict[str, Callable[[Iterable[torch.nn.Parameter]], tuple[Optimizer, float]]] = {
    "adadelta": lambda params: (torch.optim.Adadelta(params, lr=1.0), 0.7),
    "mechanic": lambda params: (mechanize(torch.optim.AdamW(params)), 1.0),
    "mechanic, gamma 0.7": lambda params: (mechanize(torch.optim.AdamW(params)), 0.7),
}
"""The optimizer and the gamma of its schedule by epochs. Adadelta is the default of torch's own example."""


class Loader:
    """What the example asks of a DataLoader."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool = False, **_others: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pictures, labels = zip(*(dataset[row] for row in range(len(dataset))), strict=True)
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.pictures, self.labels = torch.stack(pictures).to(device), torch.tensor(labels, device=device)

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, device = len(self.labels), self.labels.device
        order = torch.randperm(count).to(device) if self.shuffle else torch.arange(count, device=device)
        for rows in torch.split(order, self.batch_size):
            yield self.pictures[rows], self.labels[rows]


def build(method: str, params: Iterable[torch.nn.Parameter]) -> Optimizer:
    """An optimizer with the train() and eval() that the example calls."""
    optimizer, gamma = METHODS[method](params)
    schedule = StepLR(optimizer, 1, gamma)
    optimizer.train = lambda: None  # type: ignore[attr-defined]
    optimizer.eval = schedule.step  # type: ignore[attr-defined]
    return optimizer


def accuracies(script: Path, method: str, seed: int, words: Sequence[str] = ()) -> list[float]:
    """The test accuracy after every epoch, as the example prints it."""
    schedulefree = importlib.import_module("schedulefree")
    own = schedulefree.AdamWScheduleFree

    def chosen(params: Iterable[torch.nn.Parameter], lr: float) -> Any:
        return own(params, lr=lr) if method == "schedule-free" else build(method, params)

    said = io.StringIO()
    with (
        mock.patch.object(schedulefree, "AdamWScheduleFree", chosen),
        mock.patch.object(torch.utils.data, "DataLoader", Loader),
        mock.patch.object(sys, "argv", [str(script), "--seed", str(seed), *words]),
        contextlib.redirect_stdout(said),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return [int(right) / int(of) for right, of in re.findall(r"Accuracy: (\d+)/(\d+)", said.getvalue())]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--method", choices=["schedule-free", *METHODS], default="mechanic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path, default=Path("mnist.jsonl"), help="a line is added for each run")
    given = parser.parse_args(words)
    found = accuracies(given.script, given.method, given.seed)
    with given.records.open("a") as file:
        file.write(json.dumps({"method": given.method, "seed": given.seed, "accuracies": found}) + "\n")
    print(given.method, given.seed, found)


if __name__ == "__main__":
    main()
