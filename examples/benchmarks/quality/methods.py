"""The methods compared: a sweep of the base's learning rate, Mechanic, and installed peers.

Peers: `pip install mechanic-pytorch prodigyopt dadaptation schedulefree prodigy-plus-schedule-free`;
ScheduleFree+ is only in a checkout of facebookresearch/schedule_free.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from task import Problem
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.muon import MuonWithAdamW
from mechanic_plugins.optimizer import step
from mechanic_plugins.rule import decide
from mechanic_plugins.rule import default as relative

__all__ = ["METHODS", "USUAL", "Method"]

Build = Callable[[Problem, nn.Module, float], Optimizer]
_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "muon": MuonWithAdamW,
}


def _options(problem: Problem, member: nn.Module, lr: float) -> dict[str, Any]:
    """The base's keyword arguments, as a user would write them."""
    options = {"lr": lr, "weight_decay": problem.weight_decay, **problem.base_options}
    if problem.base == "sgd":
        options["momentum"] = 0.9
    if problem.base == "muon":
        options["adamw_params"] = member.ends()
    return options


def _trained(member: nn.Module) -> list[nn.Parameter]:
    return [p for p in member.parameters() if p.requires_grad]


def base_optimizer(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    """Builds the base alone."""
    return _CLASSES[problem.base](_trained(member), **_options(problem, member, lr))


@dataclass(frozen=True)
class Method:
    """A way to train. `lrs` are the learning rates to try, None for the problem's sweep."""

    build: Build
    lrs: tuple[float, ...] | None = (1.0,)
    package: str = "mechanic_plugins"
    bases: tuple[str, ...] = ("adamw", "adam", "sgd", "lion", "muon")
    schedule: bool = True
    step: Callable[[Any, Tensor], object] = lambda optimizer, _: optimizer.step()
    """Makes a step, given the optimizer and the loss."""

    def is_for(self, problem: Problem) -> bool:
        """Whether it can train this problem here and is of interest for it."""
        if problem.family == "trends" and self.package != "mechanic_plugins":
            return False
        return problem.base in self.bases and _is_installed(self.package)

    def lrs_for(self, problem: Problem) -> tuple[float, ...]:
        """The learning rates to run the problem at."""
        return tuple(problem.lrs) if self.lrs is None else self.lrs


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def mechanic(*lrs: float, **options: Any) -> Method:
    """Mechanic with these options, at these learning rates of the base."""

    def build(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
        return mechanize(base_optimizer(problem, member, lr), **options)

    return Method(build, lrs or (1.0,))


_NUMBERS = {
    name: getattr(relative, name)
    for name in ("TARGET", "RAMP", "WINDOW", "PATIENCE", "TOP", "FALL", "CLIP", "TOO_LONG")
}
"""The numbers of the default rule."""


def ablated(number: str, factor: float) -> Method:
    """Mechanic with one number of its rule multiplied. Sets globals, so a process trains one method at a time."""
    changed = {**_NUMBERS, **({number: _NUMBERS[number] * factor} if number else {})}

    def build(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
        for name, value in changed.items():
            for module in (relative, decide, step):  # what they import is their own
                if hasattr(module, name):
                    setattr(module, name, value)
        # GPU kernels have the numbers compiled in
        return mechanize(base_optimizer(problem, member, lr), backend="foreach" if number else "auto")

    return Method(build)


def _mechanic_pytorch(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    from mechanic_pytorch import mechanize as theirs

    built: Optimizer = theirs(_CLASSES[problem.base])(_trained(member), **_options(problem, member, lr))
    return built


def _prodigy(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    from prodigyopt import Prodigy

    built: Optimizer = Prodigy(_trained(member), lr=lr, weight_decay=problem.weight_decay)
    return built


def _dadapt(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    import dadaptation

    options: dict[str, Any] = {"lr": lr, "weight_decay": problem.weight_decay}
    built: Optimizer
    if problem.base == "sgd":
        built = dadaptation.DAdaptSGD(_trained(member), momentum=0.9, **options)
    elif problem.base == "lion":
        built = dadaptation.DAdaptLion(_trained(member), **options)
    else:
        built = dadaptation.DAdaptAdam(_trained(member), decouple=problem.base == "adamw", **options)
    return built


def _schedule_free(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    import schedulefree

    warmup = int(problem.warmup * problem.steps)
    options: dict[str, Any] = {"lr": lr, "weight_decay": problem.weight_decay, "warmup_steps": warmup}
    built: Optimizer = schedulefree.AdamWScheduleFree(_trained(member), **options)
    return built


def _schedule_free_plus(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    from schedulefree.adamc_schedulefree_plus_paper import AdamCScheduleFreePlusPaper

    # Its weight decay has another unit and defaults to 0. Its rate is the loss over the gradient's norm, so it
    # diverges if the gradient is clipped first (the language problems); those rows are not in the records.
    built: Optimizer = AdamCScheduleFreePlusPaper(_trained(member), lr=lr)
    return built


def _prodigy_plus(problem: Problem, member: nn.Module, lr: float) -> Optimizer:
    from prodigyplus.prodigy_plus_schedulefree import ProdigyPlusScheduleFree

    built: Optimizer = ProdigyPlusScheduleFree(_trained(member), lr=lr, weight_decay=problem.weight_decay)
    return built


METHODS: dict[str, Method] = {
    "sweep": Method(base_optimizer, None),
    "mechanic": ablated("", 1.0),
    "mechanic, other lrs": mechanic(1e-6, 1e-3, 10.0),
    "mechanic but bfloat16 delta": mechanic(kept_dtype=torch.bfloat16),
    "mechanic, rule paper": mechanic(rule="paper"),
    "mechanic, rule experiments": mechanic(rule="experiments"),
    "mechanic_pytorch": Method(_mechanic_pytorch, package="mechanic_pytorch", bases=("adamw", "adam", "sgd", "lion")),
    "prodigy": Method(_prodigy, package="prodigyopt", bases=("adamw",)),
    "d-adaptation": Method(_dadapt, package="dadaptation", bases=("adamw", "adam", "sgd", "lion")),
    "schedule-free, lr 0.0025": Method(
        _schedule_free, (0.0025,), package="schedulefree", bases=("adamw",), schedule=False
    ),
    "schedule-free+": Method(
        _schedule_free_plus,
        package="schedulefree.adamc_schedulefree_plus_paper",
        bases=("adamw",),
        schedule=False,
        step=lambda optimizer, loss: optimizer.step_func(loss),
    ),
    "prodigy-plus": Method(_prodigy_plus, package="prodigyplus", bases=("adamw",), schedule=False),
}
USUAL = tuple(METHODS)
"""The methods compared by default."""
METHODS |= {
    f"mechanic, {name} x{factor:g}": ablated(name, factor)
    for name in _NUMBERS
    for factor in {"TOP": (0.0, 3.0), "FALL": (0.0, 2.0), "CLIP": (0.5, 1e3), "TOO_LONG": (1e3,)}.get(name, (0.5, 2.0))
}
METHODS["mechanic, rule paper, s_decay 0.1"] = mechanic(rule="paper", s_decay=0.1)
