"""Runs a job: trains a problem by a method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from catalogue import problems
from methods import METHODS, Method
from task import Problem, Task
from torch import Tensor, nn

__all__ = ["Job", "Record", "Setup", "run"]

Record = dict[str, Any]
POINTS = 60
"""The number of points kept of a run's history."""


class Job(NamedTuple):
    """Runs that share a process: all members of a table problem, otherwise a single one."""

    problem: str
    method: str
    members: tuple[tuple[float, int], ...]
    """Learning rates and seeds."""


class Setup(NamedTuple):
    """Everything a worker needs to build the problems itself."""

    size: Any
    data: Path | None
    encoder: str | None
    device: str
    cache: Path

    def problems(self) -> dict[str, Problem]:
        """The problems by name."""
        return {p.name: p for p in problems(self.size, self.data, self.encoder, self.cache)}


def run(job: Job, setup: Setup) -> list[Record]:
    """Trains and returns a record for each member."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True  # the default for convolutions
        torch.backends.cudnn.benchmark = True
    problem, method, device = setup.problems()[job.problem], METHODS[job.method], torch.device(setup.device)
    began = time.perf_counter()
    task = problem.build([seed for _, seed in job.members], device)
    history = train(problem, method, task, [lr for lr, _ in job.members], device)
    with torch.no_grad(), _autocast(problem, device):
        found = {name: values.tolist() for name, values in task.evaluate().items()}
    about = {"problem": problem.name, "family": problem.family, "base": problem.base, "method": job.method}
    seconds = round(time.perf_counter() - began, 1)
    records = []
    for index, (lr, seed) in enumerate(job.members):
        figures = {name: _finite(values[index]) for name, values in found.items()}
        ran = {"measure": problem.measure, "steps": problem.steps, "seconds": seconds}
        records.append({**about, "lr": lr, "seed": seed, **figures, **history[index], **ran})
    return records


def _finite(value: float) -> float:
    """Replaces NaN, which JSON lacks, and infinity by a very bad value."""
    return value if math.isfinite(value) else 1e9


def train(problem: Problem, method: Method, task: Task, lrs: Sequence[float], device: torch.device) -> list[Record]:
    """The training loop. Returns each member's recorded steps, losses and learning rates."""
    optimizers = [method.build(problem, member, lr) for member, lr in zip(task.members, lrs, strict=True)]
    factors = _factors(problem) if method.schedule else [1.0] * problem.steps
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["initial_lr"] = group["lr"]
    history: list[Record] = [{"at": [], "losses": [], "effective_lrs": []} for _ in optimizers]
    _set_training(task, True, optimizers)
    backward = _backward(problem, task, device)
    every = max(1, problem.steps // POINTS)
    for step in range(problem.steps):
        for group in groups:  # by hand: a scheduler would tell Mechanic the length of the run, which it must not know
            group["lr"] = group["initial_lr"] * factors[step]
        losses = backward()
        if problem.clip is not None:
            for member in task.members:
                nn.utils.clip_grad_norm_(member.parameters(), problem.clip)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            method.step(optimizer, loss)
        if step % every == 0:
            for record, optimizer, loss in zip(history, optimizers, losses.tolist(), strict=True):
                record["at"].append(step)
                record["losses"].append(round(_finite(loss), 5))
                record["effective_lrs"].append(float(f"{_peak_lr(optimizer, factors[step]):.4g}"))
    _set_training(task, False, optimizers)
    return history


# ------------------------------------------------------------------------------------------------ gradients


def _backward(problem: Problem, task: Task, device: torch.device) -> Callable[[], Tensor]:
    """A function that draws a batch, leaves its gradients in the parameters and returns the losses."""

    def on(batch: Sequence[Tensor]) -> Tensor:
        for member in task.members:
            member.zero_grad()
        with _autocast(problem, device):
            losses = task.losses(*batch)
        losses.sum().backward()
        return losses.detach()

    if device.type == "cuda" and task.static:
        return _graphed(on, task)
    return lambda: on(task.batch())


def _graphed(on: Callable[[Sequence[Tensor]], Tensor], task: Task) -> Callable[[], Tensor]:
    """The same as a CUDA graph, because small networks wait for launches, even more with several processes.

    Gradients then have fixed addresses, which each replay overwrites.
    """
    inputs = [t.clone() for t in task.batch()]
    buffers = {t: t.clone() for member in task.members for t in member.buffers()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            on(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = on(inputs)
    for buffer, before in buffers.items():  # undo batch norm's updates from the runs above
        buffer.copy_(before)

    def replay() -> Tensor:
        for place, new in zip(inputs, task.batch(), strict=True):
            place.copy_(new)
        graph.replay()
        return losses

    return replay


def _autocast(problem: Problem, device: torch.device) -> torch.autocast:
    """Autocast without the cache of cast weights, which a CUDA graph must not share with code outside it."""
    enabled = problem.bf16 and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


# ------------------------------------------------------------------------------------------------ learning rates


def _peak_lr(optimizer: Any, factor: float) -> float:
    """The fixed peak learning rate that would give this step's rate."""
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
    if problem.schedule == "wsd":
        return min(1.0, 5 * (1 - share))
    if problem.schedule == "restarts":  # four rounds
        share = 4 * share % 1
    if problem.schedule in ("cosine", "restarts", "one-cycle"):  # one-cycle: a cosine after a long warm-up
        return 0.5 * (1 + math.cos(math.pi * share))
    if problem.schedule == "step":
        return 0.1 ** sum(share >= mark for mark in (0.6, 0.8, 0.95))
    if problem.schedule == "fifths":
        return 0.2 ** sum(share >= mark for mark in (0.3, 0.6, 0.8))
    return 1 - share if problem.schedule == "linear" else 1.0
