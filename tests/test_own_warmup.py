"""A schedule's warm-up, which the scale's own rise takes the place of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import differences, everything, perceptron, train
from torch import nn

from mechanic_plugins import MechanicOptimizer, mechanize

ADAMW = torch.optim.AdamW


def ramped(model: nn.Module, opt: MechanicOptimizer, steps: int, *, warm: int, first: int = 0) -> None:
    """Trains with a linear warm-up of the lr over the first steps."""
    for step in range(first, first + steps):
        for group in opt.param_groups:
            group["lr"] = 0.25 * min(1.0, (step + 1) / warm)
        train(model, opt, 1, first=step)


@pytest.mark.parametrize("scope", ["all", "group"])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD", "AdamW", "Lion")], ids=str)
def test_a_warm_up_changes_nothing(row: Row, scope: Any) -> None:
    """The scale's own rise takes its place. Not with rounding alone: eps is stated for the lr of a step."""
    models = perceptron(torch.float64), perceptron(torch.float64)
    opts = [mechanize(row.build(m.parameters(), lr=0.25), eps=0.0, scope=scope) for m in models]
    for model, opt, warm in zip(models, opts, (1, 40), strict=True):
        ramped(model, opt, 60, warm=warm)
    assert opts[0].scale.item() == pytest.approx(opts[1].scale.item(), rel=1e-9)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_without_it_the_warm_up_counts() -> None:
    models = perceptron(torch.float64), perceptron(torch.float64)
    opts = [mechanize(ADAMW(m.parameters(), lr=0.25), own_warmup=False) for m in models]
    for model, opt, warm in zip(models, opts, (1, 40), strict=True):
        ramped(model, opt, 60, warm=warm)
    assert opts[0].scale.item() != pytest.approx(opts[1].scale.item(), rel=0.1)


def test_a_restart_to_an_lr_that_was_there_before_is_the_schedules_own() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.25))
    train(model, opt, 30)
    opt.param_groups[0]["lr"] = 0.0025
    train(model, opt, 1, first=30)
    scale = opt.scale.item()
    opt.param_groups[0]["lr"] = 0.25
    train(model, opt, 1, first=31)
    assert opt.scale.item() == pytest.approx(scale, rel=0.2)


def test_a_run_resumed_in_its_warm_up_goes_on_exactly() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    ramped(model, opt, 10, warm=20)
    twin = copy.deepcopy(model)
    resumed = mechanize(ADAMW(twin.parameters()))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, optimizer in ((model, opt), (twin, resumed)):
        ramped(each, optimizer, 20, warm=20, first=10)
    assert not differences(everything(opt), everything(resumed))


def test_a_skipped_step_of_a_warm_up_leaves_the_scale_for_the_next() -> None:
    model = perceptron(torch.float64)
    opt = mechanize(ADAMW(model.parameters(), lr=0.1))
    train(model, opt, 20)
    scale, weights = opt.scale.item(), copy.deepcopy(model.state_dict())
    opt.param_groups[0]["lr"] = 0.2
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert opt.scale.item() == scale
    assert not differences(weights, model.state_dict())
    train(model, opt, 1, first=20)
    assert opt.scale.item() == pytest.approx(scale / 2, rel=0.2)


def test_an_lr_that_rises_while_frozen_is_played_and_not_taken_back() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.1))
    train(model, opt, 20)
    opt.freeze()
    scale = opt.scale.item()
    opt.param_groups[0]["lr"] = 0.2
    train(model, opt, 5, first=20)
    assert opt.scale.item() == scale
    opt.unfreeze()
    train(model, opt, 1, first=25)
    assert opt.scale.item() == pytest.approx(scale, rel=0.2)


def test_a_base_that_ignores_its_schedule_is_left_alone() -> None:
    """Rprop reads its lr in the first step only: there is no warm-up to take the place of."""
    models = perceptron(), perceptron()
    opts = [mechanize(torch.optim.Rprop(m.parameters(), lr=0.01)) for m in models]
    for model, opt, later in zip(models, opts, (0.01, 0.5), strict=True):
        train(model, opt, 5)
        opt.param_groups[0]["lr"] = later
        train(model, opt, 20, first=5)
    assert opts[0].scale.item() == opts[1].scale.item() > 0
    assert not differences(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("how", ["raised by hand", "added late"])
def test_one_groups_higher_lr_leaves_the_others_alone(how: str) -> None:
    """The highest lr stood for the schedule: raising one group's a hundredfold cut all others' by as much."""
    model = perceptron(torch.float64)
    body, head = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": body}] if how == "added late" else [{"params": body}, {"params": head}]
    opt = mechanize(ADAMW(groups, lr=1e-3))
    train(model, opt, 60)
    before = opt.effective_lrs[0]
    if how == "added late":
        opt.add_param_group({"params": head, "lr": 0.1})
    opt.param_groups[1]["lr"] = 0.1
    train(model, opt, 1, first=60)
    assert opt.effective_lrs[0] == pytest.approx(before, rel=0.2)
    assert opt.effective_lrs[1] == pytest.approx(100 * opt.effective_lrs[0])


def test_a_schedule_that_raises_all_groups_is_cancelled_as_before() -> None:
    model = perceptron(torch.float64)
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "lr": 0.1}]
    opt = mechanize(ADAMW(groups))
    train(model, opt, 60)
    before = opt.effective_lrs
    for group in opt.param_groups:
        group["lr"] *= 50
    train(model, opt, 1, first=60)
    assert opt.effective_lrs == pytest.approx(before, rel=0.2)
