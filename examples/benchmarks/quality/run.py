"""Is Mechanic as good as the best learning rate of a sweep?

    python examples/benchmarks/quality/run.py --size smoke                  # seconds, without any data
    python examples/benchmarks/quality/run.py --size cpu --data FOLDER      # hours on two cores; --only takes a part
    python examples/benchmarks/quality/run.py --size gpu --data FOLDER --encoder FOLDER --device cuda

Every finished run is a line in the results file; what is there is not run again. `report.py` makes the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from methods import METHODS, Method
from problems import FAMILIES, Problem, Task, problems
from torch import nn

Record = dict[str, Any]
POINTS = 60
"""How many points of a run's history are kept."""


class Job(NamedTuple):
    """Runs that share one process: all members of a convex problem, else a single one."""

    problem: str
    method: str
    members: tuple[tuple[float, int], ...]
    """Learning rates and seeds."""


class Setup(NamedTuple):
    """What a worker needs to build the problems for itself."""

    size: Any
    data: Path | None
    encoder: str | None
    device: str
    cache: Path

    def problems(self) -> dict[str, Problem]:
        """By name."""
        return {p.name: p for p in problems(self.size, self.data, self.encoder, self.cache)}


def main() -> None:
    """Runs what is missing."""
    arguments = _arguments()
    cache = arguments.out.parent / "pretrained"
    setup = Setup(arguments.size, arguments.data, arguments.encoder, arguments.device, cache)
    table = {name: p for name, p in setup.problems().items() if _is_chosen(p, arguments.only)}
    chosen = {name: METHODS[name] for name in arguments.methods or METHODS}
    jobs = list(_missing(table, chosen, seeds=range(arguments.seeds), done=_done(arguments.out)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} jobs to run")
    with arguments.out.open("a") as out:
        for number, records in enumerate(_results(jobs, setup, arguments.jobs), 1):
            out.writelines(json.dumps(record) + "\n" for record in records)
            out.flush()
            first, best = records[0], min(record["train_loss"] for record in records)
            about = f"{first['problem']} | {first['method']} | {best:.4f} | {first['seconds']:.0f} s"
            print(f"{number}/{len(jobs)} {about}", flush=True)


def _is_chosen(problem: Problem, only: Sequence[str]) -> bool:
    return not only or any(word in f"{problem.family}: {problem.name}" for word in only)


def _done(path: Path) -> set[tuple[str, str, float, int]]:
    if not path.exists():
        return set()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {(r["problem"], r["method"], r["lr"], r["seed"]) for r in records}


def _missing(
    table: dict[str, Problem], methods: dict[str, Method], *, seeds: range, done: set[tuple[str, str, float, int]]
) -> Iterator[Job]:
    for (name, problem), (label, method) in itertools.product(table.items(), methods.items()):
        if not method.is_for(problem):
            continue
        members = [
            (lr, seed)
            for lr, seed in itertools.product(method.lrs_for(problem), seeds)
            if (name, label, lr, seed) not in done
        ]
        if problem.ensemble and members:
            yield Job(name, label, tuple(members))
        else:
            yield from (Job(name, label, (member,)) for member in members)


def _results(jobs: Sequence[Job], setup: Setup, workers: int) -> Iterator[list[Record]]:
    if workers == 1:
        yield from (run(job, setup) for job in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, job, setup) for job in jobs]):
            yield future.result()


def run(job: Job, setup: Setup) -> list[Record]:
    """Trains, and says how it went: a record for each member."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it anyway
    problem, method = setup.problems()[job.problem], METHODS[job.method]
    began = time.perf_counter()
    task = problem.build([seed for _, seed in job.members], torch.device(setup.device))
    lrs = [lr for lr, _ in job.members]
    history = train(problem, method, task, lrs)
    with torch.no_grad():
        _set_training(task, False)
        found = {name: values.tolist() for name, values in task.evaluate().items()}
    records = []
    for index, (lr, seed) in enumerate(job.members):
        about = {"problem": problem.name, "family": problem.family, "base": problem.base, "method": job.method}
        figures = {name: _finite(values[index]) for name, values in found.items()}
        records.append({**about, "lr": lr, "seed": seed, **figures, **history[index], "steps": problem.steps})
    return [{**record, "seconds": round(time.perf_counter() - began, 1)} for record in records]


def _finite(value: float) -> float:
    """JSON knows no NaN; a run that has left the numbers is as bad as can be."""
    return value if math.isfinite(value) else 1e9


def train(problem: Problem, method: Method, task: Task, lrs: Sequence[float]) -> list[Record]:
    """The loop; returns for each member the steps at which it was looked at, its losses and learning rates."""
    optimizers = [method.build(problem, member.parameters(), lr) for member, lr in zip(task.members, lrs, strict=True)]
    factors = _factors(problem) if method.schedule else [1.0] * problem.steps
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: factors[min(t, len(factors) - 1)]) for o in optimizers]
    history: list[Record] = [{"at": [], "losses": [], "effective_lrs": []} for _ in optimizers]
    _set_training(task, True, optimizers)
    every = max(1, problem.steps // POINTS)
    for step in range(problem.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = task.losses()
        losses.sum().backward()
        if problem.clip is not None:
            for member in task.members:
                nn.utils.clip_grad_norm_(member.parameters(), problem.clip)
        for optimizer in optimizers:
            optimizer.step()
        if step % every == 0:
            for record, optimizer, loss in zip(history, optimizers, losses.tolist(), strict=True):
                record["at"].append(step)
                record["losses"].append(round(_finite(loss), 5))
                record["effective_lrs"].append(float(f"{_peak_lr(optimizer, factors[step]):.4g}"))
        for scheduler in schedulers:
            scheduler.step()
    _set_training(task, False, optimizers)
    return history


def _peak_lr(optimizer: Any, factor: float) -> float:
    """What a fixed peak learning rate would have to be, to give the rate that this step was made at."""
    if hasattr(optimizer, "effective_lrs"):
        now: float = optimizer.effective_lrs[0]
    else:
        group = optimizer.param_groups[0]
        now = float(group["lr"]) * float(group.get("d", 1.0))
    return now / factor if factor else 0.0


def _set_training(task: Task, training: bool, optimizers: Sequence[Any] = ()) -> None:
    for member in task.members:
        member.train(training)
    for optimizer in optimizers:  # Schedule-Free has two sets of weights
        switch = getattr(optimizer, "train" if training else "eval", None)
        if switch is not None:
            switch()


def _factors(problem: Problem) -> list[float]:
    warm = int(problem.warmup * problem.steps)
    return [_factor(problem, step, warm) for step in range(problem.steps)]


def _factor(problem: Problem, step: int, warm: int) -> float:
    if step < warm:
        return (step + 1) / warm
    share = (step - warm) / max(1, problem.steps - warm)
    if problem.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * share))
    if problem.schedule == "step":
        return 0.1 ** sum(share >= mark for mark in (0.6, 0.8, 0.95))
    return 1.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["smoke", "cpu", "gpu"], default="smoke")
    parser.add_argument("--data", type=Path, help="a folder of data sets (tab_*.npz, img_*.npz, lm_*.xz, tc_*.xz)")
    parser.add_argument("--encoder", help="a pretrained encoder's folder, in transformers' layout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at once")
    parser.add_argument("--only", nargs="*", default=[], help=f"words from 'family: problem'; families: {FAMILIES}")
    parser.add_argument("--methods", nargs="*", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--out", type=Path, default=Path("quality.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
