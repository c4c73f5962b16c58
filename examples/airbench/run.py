"""airbench94, a public record script that trains CIFAR-10 to 94%, with Mechanic in place of its learning rates.

Uses legacy/airbench94.py of github.com/KellerJordan/cifar10-airbench unchanged. While its main() runs, the SGD that it
builds is mechanized: momentum, weight decay, Nesterov, schedule and the ratio of its two rates stay as they are.

    python examples/airbench/run.py --script cifar10-airbench/legacy/airbench94.py --data FOLDER

FOLDER holds cifar10/train.pt and cifar10/test.pt; otherwise the script downloads the pictures there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

from mechanic_plugins import MechanicOptimizer, mechanize

CELLS = (
    "mechanic:1:100", "script:1:100", "mechanic:10:30", "mechanic:0.1:30", "script:10:30", "script:0.1:30",
    "mechanic:10:30:file", "mechanic:0.1:30:file", "script:10:30:file", "script:0.1:30:file",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run: the method, the factor on the learning rate, and where it is applied.

    In the script's "file" it changes the weight decay too, which the script divides by the rate; in the "optimizer"
    only the rates are wrong.
    """

    method: str
    factor: float
    where: str
    seed: int


def loaded(path: Path) -> ModuleType:
    """Loads the script as a module and checks that it is airbench94."""
    spec = importlib.util.spec_from_file_location("airbench94", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"no Python file at {path}: it is legacy/airbench94.py of KellerJordan/cifar10-airbench.")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    options = getattr(script, "hyp", {}).get("opt", {})
    if missing := {"lr", "bias_scaler", "momentum", "weight_decay"} - set(options):
        raise ValueError(f"{path} is not airbench94.py: no {sorted(missing)} in its hyp['opt'].")
    return script


@contextlib.contextmanager
def replaced(script: ModuleType, change: Callable[[Optimizer], Optimizer]) -> Iterator[list[Optimizer]]:
    """Applies `change` to the next torch.optim.SGD that is built, and only to that one. Yields a list for it."""
    built: list[Optimizer] = []
    with contextlib.ExitStack() as stack:

        def build(groups: Sequence[dict[str, Any]], **options: Any) -> Optimizer:
            stack.close()
            lrs = [group["lr"] for group in groups]
            ratio = script.hyp["opt"]["bias_scaler"]
            if len(lrs) != 2 or abs(lrs[0] / lrs[1] - ratio) > 1e-6 * ratio or options.get("nesterov") is not True:
                raise ValueError(f"the script's SGD is not airbench94's: rates {lrs}, {options}.")
            built.append(change(torch.optim.SGD(groups, **options)))
            return built[0]

        stack.enter_context(mock.patch.object(torch.optim, "SGD", build))
        yield built


def train(script: ModuleType, run: Run) -> dict[str, Any]:
    """Runs the script's main() once. `rate` is the learning rate relative to the tuned one: 1 is the script's."""

    def change(optimizer: Optimizer) -> Optimizer:
        for group in optimizer.param_groups:
            group["lr"] *= run.factor if run.where == "optimizer" else 1.0
        return mechanize(optimizer) if run.method == "mechanic" else optimizer

    torch.manual_seed(run.seed)
    options = script.hyp["opt"]
    right = {**options}
    options["lr"] *= run.factor if run.where == "file" else 1.0
    try:
        with replaced(script, change) as built, contextlib.redirect_stdout(io.StringIO()):
            accuracy = script.main(run.seed)
    finally:
        options.update(right)
    if not built:
        raise ValueError("the script's main() built no torch.optim.SGD: it is not airbench94.py.")
    (optimizer,) = built
    scale = float(optimizer.scale) if isinstance(optimizer, MechanicOptimizer) else 1.0
    return {**asdict(run), "accuracy": round(accuracy, 4), "rate": round(scale * run.factor, 4)}


# ------------------------------------------------------------------------------------------------ many runs


def runs(cells: Sequence[str], first_seed: int = 0) -> list[Run]:
    """The runs of all cells, interleaved so that all cells are equally far whenever time runs out."""
    found = []
    for cell in cells:
        method, factor, count, *where = cell.split(":")
        for seed in range(int(count)):
            run = Run(method, float(factor), where[0] if where else "optimizer", first_seed + seed)
            found.append(((seed + 0.5) / int(count), run))
    return [run for _, run in sorted(found, key=lambda each: each[0])]


_script: dict[Path, ModuleType] = {}


def _one(task: tuple[Path, Path, Run, float]) -> dict[str, Any] | None:
    path, data, run, until = task
    if time.time() > until:
        return None
    os.chdir(data)  # the script reads ./cifar10
    if path not in _script:
        _script[path] = loaded(path)
    return train(_script[path], run)


@contextlib.contextmanager
def side_by_side(jobs: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A map over `jobs` processes, or in this process if that is 1."""
    if jobs == 1:
        yield map
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield pool.imap_unordered


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True, help="legacy/airbench94.py in a checkout")
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/train.pt and cifar10/test.pt")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="METHOD:FACTOR:RUNS[:file], as mechanic:10:30")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side on the one GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=Path("airbench.jsonl"), help="a line is added for each run")
    given = parser.parse_args(words)
    path, data = given.script.resolve(), given.data.resolve()
    try:
        loaded(path)
    except ValueError as error:
        parser.error(str(error))
    until = time.time() + given.seconds
    tasks = [(path, data, run, until) for run in runs(given.cells, given.first_seed)]
    with side_by_side(given.jobs) as each, given.records.open("a") as file:
        for record in each(_one, tasks):
            if record is not None:
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(*record.values(), file=sys.stderr)


if __name__ == "__main__":
    main()
