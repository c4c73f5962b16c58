"""Several param groups, and groups added later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import backward, differences, everything, filled, perceptron, train, two_groups

from mechanic_plugins import Settings, mechanize

pytestmark = pytest.mark.slow

ADAMW = torch.optim.AdamW


def takes_late_groups(base: type[torch.optim.Optimizer]) -> bool:
    """Older torch's Adagrad fails on a group added after construction, with or without Mechanic."""
    first, late = (torch.ones(2, requires_grad=True) for _ in range(2))
    plain = base([first])
    plain.add_param_group({"params": [late]})
    filled([first, late])
    try:
        plain.step()
    except KeyError:
        return False
    return True


LATE = [base for base in (ADAMW, torch.optim.Adagrad) if takes_late_groups(base)]


@pytest.mark.parametrize("scope", ["all", "group"])
@pytest.mark.parametrize("base", LATE, ids=lambda base: base.__name__)
def test_a_group_added_late_starts_at_its_own_weights(scope: Any, base: type[torch.optim.Optimizer]) -> None:
    model = perceptron()
    opt = mechanize(base(model[0].parameters(), lr=1.0), scope=scope)
    train(model, opt, 30)
    learned = opt.scales.tolist()
    new = [p.detach().clone() for p in model[2].parameters()]
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    assert opt.scales.tolist() == [learned[0], 0.0 if scope == "group" else learned[0]]
    assert opt.effective_lrs == [learned[0], opt.scales[1].item() * 0.1]
    assert opt.metrics()["mechanic/steps"] == 30
    for p, x0 in zip(model[2].parameters(), new, strict=True):
        assert torch.equal(p, x0)
    losses = train(model, opt, 60, first=30)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(scale > 0 for scale in opt.scales.tolist())
    assert opt.tuner.s.shape == ((2, 1) if scope == "group" else (1,))


def test_the_lr_of_a_late_group_is_read_when_it_is_asked_for() -> None:
    """effective_lrs used to cache its first answer for a group that has not made a step yet."""
    model = perceptron()
    opt = mechanize(ADAMW(model[0].parameters(), lr=1.0))
    train(model, opt, 3)
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    assert opt.effective_lrs[1] == opt.scale.item() * 0.5
    opt.param_groups[1]["lr"] = 0.25
    assert opt.effective_lrs[1] == opt.scale.item() * 0.25


def test_a_group_that_the_base_refuses_changes_nothing() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    before = everything(opt)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": list(model[0].parameters())})
    assert not differences(before, everything(opt))


def test_each_group_of_scope_group_learns_as_if_alone() -> None:
    models = perceptron(torch.float64), perceptron(torch.float64)
    together = mechanize(ADAMW(two_groups(models[0])), settings=Settings(scope="group", normalize_lr=False))
    groups = two_groups(models[1])
    alone = [mechanize(ADAMW([group]), settings=Settings(normalize_lr=False)) for group in groups]
    for step in range(40):
        train(models[0], together, 1, first=step)
        backward(models[1], step)
        for opt in alone:
            opt.step()
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert together.scales.tolist() == [opt.scale.item() for opt in alone]
    assert together.scales[0] != together.scales[1]


def test_one_group_may_maximize_while_another_minimizes() -> None:
    low, high = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt = mechanize(torch.optim.SGD([{"params": [low]}, {"params": [high], "maximize": True}], lr=0.1))
    for _ in range(200):
        opt.zero_grad()
        (low.square().sum() - (high - 3).square().sum()).backward()
        opt.step()
    assert low.abs().max() < 0.5
    assert (high - 3).abs().max() < 1.0
