"""What is compared: a sweep of the base's learning rate, Mechanic, and the peers that are installed.

They come by `pip install mechanic-pytorch prodigyopt dadaptation schedulefree`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from problems import Problem
from torch.nn import Parameter
from torch.optim import Optimizer

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion

__all__ = ["METHODS", "Method"]

Params = Iterable[Parameter]


def base_optimizer(problem: Problem, params: Params, lr: float) -> Optimizer:
    """The base as a user would build it."""
    if problem.base == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=problem.weight_decay)
    if problem.base == "lion":
        return Lion(params, lr=lr, weight_decay=problem.weight_decay)
    return torch.optim.AdamW(params, lr=lr, weight_decay=problem.weight_decay)


@dataclass(frozen=True)
class Method:
    """A way to train. `lrs` are those to try, None for the problem's sweep."""

    build: Callable[[Problem, Params, float], Optimizer]
    lrs: tuple[float, ...] | None = (1.0,)
    package: str = "mechanic_plugins"
    bases: tuple[str, ...] = ("adamw", "sgd", "lion")
    schedule: bool = True

    def is_for(self, problem: Problem) -> bool:
        """Whether it can train this problem here, and would tell something."""
        if problem.family == "trends" and self.package != "mechanic_plugins":
            return False
        return problem.base in self.bases and importlib.util.find_spec(self.package) is not None

    def lrs_for(self, problem: Problem) -> tuple[float, ...]:
        """The learning rates to run it at."""
        return tuple(problem.lrs) if self.lrs is None else self.lrs


def mechanic(*lrs: float, **options: Any) -> Method:
    """Mechanic with these options, at these learning rates of the base."""

    def build(problem: Problem, params: Params, lr: float) -> Optimizer:
        return mechanize(base_optimizer(problem, params, lr), **options)

    return Method(build, lrs or (1.0,))


def _mechanic_pytorch(problem: Problem, params: Params, lr: float) -> Optimizer:
    from mechanic_pytorch import mechanize as theirs

    bases = {"adamw": torch.optim.AdamW, "lion": Lion, "sgd": torch.optim.SGD}
    options: dict[str, Any] = {"momentum": 0.9} if problem.base == "sgd" else {}
    built: Optimizer = theirs(bases[problem.base])(params, lr=lr, weight_decay=problem.weight_decay, **options)
    return built


def _prodigy(problem: Problem, params: Params, lr: float) -> Optimizer:
    from prodigyopt import Prodigy

    built: Optimizer = Prodigy(params, lr=lr, weight_decay=problem.weight_decay)
    return built


def _dadapt(problem: Problem, params: Params, lr: float) -> Optimizer:
    import dadaptation

    built: Optimizer
    if problem.base == "sgd":
        built = dadaptation.DAdaptSGD(params, lr=lr, momentum=0.9, weight_decay=problem.weight_decay)
    elif problem.base == "lion":
        built = dadaptation.DAdaptLion(params, lr=lr, weight_decay=problem.weight_decay)
    else:
        built = dadaptation.DAdaptAdam(params, lr=lr, weight_decay=problem.weight_decay, decouple=True)
    return built


def _schedule_free(problem: Problem, params: Params, lr: float) -> Optimizer:
    import schedulefree

    kind = schedulefree.SGDScheduleFree if problem.base == "sgd" else schedulefree.AdamWScheduleFree
    warmup = int(problem.warmup * problem.steps)
    built: Optimizer = kind(params, lr=lr, weight_decay=problem.weight_decay, warmup_steps=warmup)
    return built


METHODS: dict[str, Method] = {
    "sweep": Method(base_optimizer, None),
    "mechanic": mechanic(),
    "mechanic, other lrs": mechanic(1e-6, 1e-3, 10.0),
    "mechanic, preset paper": mechanic(preset="paper"),
    "mechanic, preset 0.1": mechanic(preset="0.1"),
    "mechanic but hindsight 1": mechanic(hindsight=1.0),
    "mechanic but hindsight 0.1": mechanic(hindsight=0.1),
    "mechanic but hindsight 0": mechanic(hindsight=0.0),
    "mechanic but smoothing 0": mechanic(smoothing=0.0),
    "mechanic but first_move 1e-4": mechanic(first_move=1e-4),
    "mechanic but own_warmup off": mechanic(own_warmup=False),
    "mechanic but s_decay 0.01": mechanic(s_decay=0.01),
    "mechanic but s_decay 0.1": mechanic(s_decay=0.1),
    "mechanic_pytorch": Method(_mechanic_pytorch, package="mechanic_pytorch"),
    "prodigy": Method(_prodigy, package="prodigyopt", bases=("adamw",)),
    "d-adaptation": Method(_dadapt, package="dadaptation"),
    "schedule-free, lr 0.0025": Method(
        _schedule_free, (0.0025,), package="schedulefree", bases=("adamw",), schedule=False
    ),
}
