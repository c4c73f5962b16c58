"""The length of a run that nobody told, read off its learning-rate scheduler."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problems import backward, differences, everything, perceptron
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.optimizer.schedulers import length_of

STEPS = 240
Build = Callable[[Optimizer], Any]


def nanogpts(step: int) -> float:
    """Warm-up, cosine, and a floor after that."""
    if step < 20:
        return (step + 1) / 20
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min((step - 20) / (STEPS - 20), 1.0)))


def cosine(step: int, *, num_training_steps: int) -> float:
    """It would rise again."""
    return 0.5 * (1 + math.cos(math.pi * step / num_training_steps))


def warmed_up(opt: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(opt, 0.1, total_iters=40), lr_scheduler.CosineAnnealingLR(opt, STEPS - 40)]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[40])


TELLING: dict[str, Build] = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=STEPS),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, STEPS),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=STEPS),
    "warm-up, then cosine": warmed_up,
    "a function that ends at 0": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1 - step / STEPS)),
    "a function with a floor": lambda opt: lr_scheduler.LambdaLR(opt, nanogpts),
    "a function for each group": lambda opt: lr_scheduler.LambdaLR(opt, [nanogpts, lambda step: 1.0]),
    "as transformers has it": lambda opt: lr_scheduler.LambdaLR(opt, partial(cosine, num_training_steps=STEPS)),
}


def table(step: int) -> float:
    return [1.0, 1.0, 0.5][step]


SILENT: dict[str, Build] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 30),
    "milestones": lambda opt: lr_scheduler.MultiStepLR(opt, [30, 60]),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.99),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 50),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "warm-up": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=30),
    "a warm-up by a function": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 30)),
    "a constant function": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0),
    "a function that fades": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.1 ** (step // 30)),
    "an inverse root": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: (step + 1) ** -0.5),
    "a wave": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.1 + math.cos(step)),
    "a table": lambda opt: lr_scheduler.LambdaLR(opt, table),
}


def adamw(model: nn.Sequential, lr: float = 0.02) -> Optimizer:
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, opt: Optimizer, scheduler: Any, steps: range, *, every: int = 1) -> None:
    for step in steps:
        backward(model, step)
        opt.step()
        if (step + 1) % every == 0:
            scheduler.step(0.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def weights_and_scale(opt: MechanicOptimizer) -> dict[str, Any]:
    """Without the header, which says where the length came from."""
    return everything(opt, without=("mechanic_tuners",))


@pytest.mark.slow
@pytest.mark.parametrize("on_base", [False, True], ids=["on the wrapper", "on the base"])
@pytest.mark.parametrize("build", TELLING.values(), ids=TELLING)
def test_it_is_as_if_it_had_been_told(build: Build, on_base: bool) -> None:
    found, told = perceptron(), perceptron()
    base = adamw(found)
    finding = mechanize(base)
    train(found, finding, build(base if on_base else finding), range(30))
    assert finding.total_steps == STEPS
    being_told = mechanize(adamw(told), total_steps=STEPS)
    train(told, being_told, build(being_told), range(30))
    assert differences(weights_and_scale(finding), weights_and_scale(being_told)) == []


@pytest.mark.parametrize("build", SILENT.values(), ids=SILENT)
def test_schedulers_that_do_not_say(build: Build) -> None:
    model = perceptron()
    opt = mechanize(adamw(model))
    scheduler = build(opt)
    assert length_of(scheduler) is None
    train(model, opt, scheduler, range(2))
    assert opt.total_steps is None


def drawn() -> Build:
    factors = (1 - step / STEPS for step in range(STEPS))
    return lambda opt: lr_scheduler.LambdaLR(opt, lambda step: next(factors))


def counted() -> Build:
    calls = []

    def factor(step: int) -> float:
        calls.append(step)
        return max(0.0, 1 - len(calls) / STEPS)

    return lambda opt: lr_scheduler.LambdaLR(opt, factor)


class Counting:
    calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return max(0.0, 1 - self.calls / STEPS)


@pytest.mark.parametrize(
    "made",
    [drawn, counted, lambda: lambda opt: lr_scheduler.LambdaLR(opt, Counting())],
    ids=["drawn", "counted", "object"],
)
def test_functions_that_keep_count_are_not_asked(made: Callable[[], Build]) -> None:
    """Each call would move their schedule on."""
    model = perceptron()
    plain, opt = adamw(model), mechanize(adamw(model))
    for optimizer in (plain, opt):
        train(model, optimizer, made()(optimizer), range(4))
    assert opt.total_steps is None
    assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    opt = mechanize(adamw(model))
    with caplog.at_level(logging.INFO, logger="mechanic_plugins"):
        train(model, opt, lr_scheduler.CosineAnnealingLR(opt, STEPS), range(6))
    assert [record.message for record in caplog.records if "optimizer steps" in record.message] == [
        f"Mechanic: the run has {STEPS} optimizer steps, by its schedule."
    ]


def test_what_was_told_stays() -> None:
    model = perceptron()
    opt = mechanize(adamw(model), total_steps=75)
    train(model, opt, lr_scheduler.CosineAnnealingLR(opt, STEPS), range(4))
    assert opt.total_steps == 75


def test_a_scheduler_of_epochs_does_not_count_steps() -> None:
    model = perceptron()
    opt = mechanize(adamw(model))
    train(model, opt, lr_scheduler.CosineAnnealingLR(opt, 30), range(12), every=5)
    assert opt.total_steps is None


def test_schedulers_of_others_and_idle_ones_do_not_count() -> None:
    model, other = perceptron(), perceptron()
    opt, others = mechanize(adamw(model)), mechanize(adamw(other))
    idle = lr_scheduler.CosineAnnealingLR(opt, 5000)
    used, elsewhere = lr_scheduler.PolynomialLR(opt, STEPS), lr_scheduler.CosineAnnealingLR(others, 9000)
    for step in range(3):
        train(model, opt, used, range(step, step + 1))
        train(other, others, elsewhere, range(step, step + 1))
    assert (opt.total_steps, others.total_steps, idle.last_epoch) == (STEPS, 9000, 0)


def test_a_scheduler_that_is_stepped_more_often() -> None:
    """Accelerate's once for each rank; others once for each micro-batch."""
    model = perceptron()
    opt = mechanize(adamw(model))
    scheduler = lr_scheduler.CosineAnnealingLR(opt, 4 * STEPS)
    for step in range(3):
        train(model, opt, scheduler, range(step, step + 1))
        for _ in range(3):
            scheduler.step()
    assert opt.total_steps == STEPS


def test_a_run_that_goes_on_mechanized() -> None:
    """What is left counts."""
    model = perceptron()
    plain = adamw(model)
    scheduler = lr_scheduler.CosineAnnealingLR(plain, STEPS)
    train(model, plain, scheduler, range(100))
    opt = mechanize(plain)
    train(model, opt, scheduler, range(100, 103))
    assert opt.total_steps == STEPS - 100


BY_HAND: dict[str, tuple[Callable[[int], float], int | None]] = {
    "a long warm-up": (lambda step: min(1.0, (step + 1) / 75), 1500),
    "a long warm-up from 0": (lambda step: min(1.0, step / 75), 1500),
    "a short warm-up": (lambda step: min(1.0, (step + 1) / 30), None),
    "next to none": (lambda step: 1.0 + 1e-6 * step, None),
    "a constant": (lambda step: 1.0, None),
    "a fall": (lambda step: 1 - step / 100, None),
}


@pytest.mark.parametrize(("factor", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_a_long_warm_up_belongs_to_a_long_run(factor: Callable[[int], float], expected: int | None) -> None:
    """In loops that set the learning rate by hand, nothing else is seen of the schedule."""
    model, twin = perceptron(), perceptron()
    opt, told = mechanize(adamw(model)), mechanize(adamw(twin), total_steps=expected or 1000)
    for step in range(20):
        for net, optimizer in ((model, opt), (twin, told)):
            backward(net, step)
            for group, lr in zip(optimizer.param_groups, (0.02, 0.01), strict=True):
                group["lr"] = lr * factor(step)
            optimizer.step()
    assert opt.total_steps == expected
    assert differences(weights_and_scale(opt), weights_and_scale(told)) == []


@pytest.mark.parametrize("on_base", [False, True], ids=["on the wrapper", "on the base, before"])
def test_a_long_warm_up_by_a_scheduler_that_says_no_more(on_base: bool) -> None:
    model = perceptron()
    base = adamw(model)
    warm_up = partial(lr_scheduler.LinearLR, start_factor=1e-9, total_iters=200)
    before = warm_up(base) if on_base else None
    opt = mechanize(base)
    train(model, opt, before or warm_up(opt), range(3))
    assert opt.total_steps == 4000


def resumed(saved: bytes, build: Build, **options: Any) -> tuple[nn.Sequential, MechanicOptimizer, Any]:
    states = torch.load(io.BytesIO(saved), weights_only=True)
    model = perceptron()
    opt = mechanize(adamw(model), **options)
    scheduler = build(opt)
    for thing, state in zip((model, opt, scheduler), states, strict=True):
        thing.load_state_dict(state)
    return model, opt, scheduler


def saved(*things: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("at", [1, 2, 25])
@pytest.mark.parametrize(
    ("build", "expected"),
    [(TELLING["cosine"], STEPS), (lambda opt: lr_scheduler.LinearLR(opt, 0.2, total_iters=64), 1600)],
    ids=["cosine", "a long warm-up"],
)
def test_a_resumed_run_goes_on_as_if_undisturbed(build: Build, expected: int, at: int) -> None:
    model = perceptron()
    opt = mechanize(adamw(model))
    scheduler = build(opt)
    train(model, opt, scheduler, range(at))
    again, opt_again, scheduler_again = resumed(saved(model, opt, scheduler), build)
    assert opt_again.total_steps == (None if at == 1 else expected)
    train(model, opt, scheduler, range(at, 40))
    train(again, opt_again, scheduler_again, range(at, 40))
    assert opt_again.total_steps == expected
    assert differences(everything(opt), everything(opt_again)) == []


def test_a_run_that_goes_on_without_a_length_gets_none() -> None:
    """Its learning rate has fallen far below the one that it was built with: that is no warm-up."""

    def build(opt: Optimizer) -> Any:
        return lr_scheduler.StepLR(opt, 10)

    model = perceptron()
    opt = mechanize(adamw(model))
    scheduler = build(opt)
    train(model, opt, scheduler, range(25))
    again, opt_again, scheduler_again = resumed(saved(model, opt, scheduler), build)
    train(again, opt_again, scheduler_again, range(25, 30))
    assert opt_again.total_steps is None


def test_a_resumed_run_may_be_told_another_length() -> None:
    build = TELLING["cosine"]
    model = perceptron()
    opt = mechanize(adamw(model))
    scheduler = build(opt)
    train(model, opt, scheduler, range(10))
    _, told, _ = resumed(saved(model, opt, scheduler), build, total_steps=5000)
    assert told.total_steps == 5000
    header = json.loads(told.state_dict()["param_groups"][0]["mechanic_tuners"])
    assert header["later"]["mechanic_total_steps"] == STEPS, "what the scheduler told"


@pytest.mark.parametrize("wrong", [-1, 1.5, "many", True])
def test_a_damaged_length_is_refused(wrong: Any) -> None:
    model = perceptron()
    opt = mechanize(adamw(model))
    train(model, opt, TELLING["cosine"](opt), range(3))
    state = opt.state_dict()
    for group in state["param_groups"]:
        header = json.loads(group["mechanic_tuners"])
        header["later"]["mechanic_total_steps"] = wrong
        group["mechanic_tuners"] = json.dumps(header)
    with pytest.raises(ValueError, match=r"mechanic_total_steps has .*expected a whole number >= 0: it is damaged"):
        mechanize(adamw(perceptron())).load_state_dict(state)
