"""torch's learning-rate schedulers on the wrapper and on the base. A torch warning fails these tests."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import backward, differences, everything, perceptron
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from mechanic_plugins import MechanicOptimizer, mechanize

# torch 2.6's SequentialLR calls its parts in a way that torch itself warns about, even around a plain optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")

Scheduler = Any
STEPS = 24


def sequential(opt: Optimizer) -> Scheduler:
    parts = [lr_scheduler.LinearLR(opt, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(opt, STEPS - 5)]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[5])


def chained(opt: Optimizer) -> Scheduler:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(opt, 0.5, 5), lr_scheduler.ExponentialLR(opt, 0.9)])


def warm_up_from_zero(opt: Optimizer) -> Scheduler:
    return lr_scheduler.LambdaLR(opt, lambda step: min(step / 10, 1.0))


SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "LambdaLR": warm_up_from_zero,
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [5, 15]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=1.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=6, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS + 1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=10),
}
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.2),
}


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.05}]


def schedule(scheduler: Scheduler, loss: torch.Tensor) -> None:
    scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def run(model: nn.Module, opt: Optimizer, scheduler: Scheduler, *, first: int, last: int) -> list[Any]:
    """Trains, and returns the learning rates and momenta of each step."""
    seen = []
    for step in range(first, last):
        loss = backward(model, step)
        seen.append([(float(g["lr"]), g.get("momentum"), g.get("betas")) for g in opt.param_groups])
        opt.step()
        schedule(scheduler, loss)
    return seen


def test_the_table_has_every_scheduler_of_torch() -> None:
    def is_scheduler(o: object) -> bool:
        return inspect.isclass(o) and issubclass(o, lr_scheduler.LRScheduler) and not o.__name__.startswith("_")

    known = {cls.__name__ for _, cls in inspect.getmembers(lr_scheduler, is_scheduler)} - {"LRScheduler"}
    assert known <= SCHEDULERS.keys()


CYCLES_MOMENTUM = ("CyclicLR", "OneCycleLR")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base"), [*((name, "SGD") for name in SCHEDULERS), *((name, "AdamW") for name in CYCLES_MOMENTUM)]
)
def test_a_scheduler_does_to_the_wrapper_what_it_does_to_the_base(name: str, base: str) -> None:
    """The wrapper shows the base's groups: rates and cycled momenta are as in a plain run, whatever is learned."""
    plain_model, model, early_model = (perceptron() for _ in range(3))
    plain = BASES[base](groups(plain_model))
    expected = run(plain_model, plain, SCHEDULERS[name](plain), first=0, last=STEPS)

    opt = mechanize(BASES[base](groups(model)))
    seen = run(model, opt, SCHEDULERS[name](opt), first=0, last=STEPS)

    early = BASES[base](groups(early_model))
    scheduler = SCHEDULERS[name](early)
    wrapped = mechanize(early)
    early_seen = run(early_model, wrapped, scheduler, first=0, last=STEPS)

    assert seen == early_seen
    if name != "ReduceLROnPlateau":  # it follows the loss, which differs
        assert seen == expected
    assert seen[0] != seen[-1]
    assert not differences(everything(opt), everything(wrapped))
    assert opt.scale.item() > 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_and_optimizer_resume_exactly(name: str) -> None:
    def build() -> tuple[nn.Sequential, MechanicOptimizer, Scheduler]:
        model = perceptron()
        opt = mechanize(torch.optim.SGD(groups(model), lr=0.2, momentum=0.9))
        return model, opt, SCHEDULERS[name](opt)

    model, opt, scheduler = build()
    run(model, opt, scheduler, first=0, last=STEPS // 2)
    file = io.BytesIO()
    parts = {"model": model, "opt": opt, "scheduler": scheduler}
    torch.save({key: part.state_dict() for key, part in parts.items()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=name not in NOT_PLAIN)
    run(model, opt, scheduler, first=STEPS // 2, last=STEPS)

    twin_model, twin, twin_scheduler = build()
    twin_model.load_state_dict(loaded["model"])
    twin.load_state_dict(loaded["opt"])
    twin_scheduler.load_state_dict(loaded["scheduler"])
    run(twin_model, twin, twin_scheduler, first=STEPS // 2, last=STEPS)
    assert not differences(everything(opt), everything(twin))
    assert opt.effective_lrs == twin.effective_lrs


NOT_PLAIN = {"SWALR"}  # its state_dict holds one of torch's functions, which weights_only refuses


def test_one_cycle_cycles_the_momentum_of_the_base() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.1))
    seen = run(model, opt, SCHEDULERS["OneCycleLR"](opt), first=0, last=STEPS)
    beta1 = [betas[0] for ((_, _, betas),) in seen]
    assert beta1[0] == pytest.approx(0.95)
    assert min(beta1) < 0.851  # the minimum, 0.85, lies between two steps
    assert beta1[-1] > 0.949
    assert opt.base.param_groups[0]["betas"] == opt.param_groups[0]["betas"]


def test_a_plateau_cuts_the_effective_lr_and_not_the_scale() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.5))
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=0)
    for step in range(10):
        backward(model, step)
        opt.step()
    opt.freeze()
    scale, effective = opt.scale.item(), opt.effective_lrs[0]
    scheduler.step(1.0)
    scheduler.step(2.0)
    backward(model, 10)
    opt.step()
    assert opt.scale.item() == scale
    assert opt.effective_lrs[0] == pytest.approx(0.1 * effective)


def test_a_copy_made_under_a_scheduler_does_not_step_the_original() -> None:
    """LRScheduler sets a bound `step` on the instance it is built on."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.5))
    run(model, opt, lr_scheduler.StepLR(opt, 5), first=0, last=6)
    twin_model, twin = copy.deepcopy((model, opt))
    before = everything(opt)
    twin_scheduler = lr_scheduler.StepLR(twin, 5)
    run(twin_model, twin, twin_scheduler, first=6, last=12)
    assert not differences(before, everything(opt))
    assert differences(before, everything(twin))
