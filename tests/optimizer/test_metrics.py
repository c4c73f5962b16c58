"""Metrics of the optimizer, and freezing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from problems import differences, perceptron, train, two_groups

from mechanic_plugins import mechanize
from mechanic_plugins.optimizer.readings import names_of

ADAMW = torch.optim.AdamW


METRICS = {
    f"mechanic/{name}" for name in ("scale", "effective_lr", "h", "grad_norm", "moved", "steps", "skipped_steps")
}


@pytest.mark.parametrize("scope", ["all", "group"])
def test_metrics_name_every_group_where_there_are_several(scope: Any) -> None:
    model = perceptron()
    groups = two_groups(model)
    groups[1]["name"] = "head"
    opt = mechanize(ADAMW(groups), scope=scope)
    train(model, opt, 10)
    metrics = opt.metrics()
    per_group = {f"mechanic/{what}/{name}" for what in ("scale", "effective_lr") for name in ("pg1", "head")}
    assert metrics.keys() == METRICS | per_group
    assert all(type(value) is float for value in metrics.values())
    scales = opt.scales.tolist()
    assert (scales[0] == scales[1]) is (scope == "all")
    assert metrics["mechanic/scale/head"] == scales[1]
    assert metrics["mechanic/effective_lr/head"] == opt.effective_lrs[1] == pytest.approx(0.05 * scales[1])
    assert metrics["mechanic/scale"] == opt.scale.item() == max(scales)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["pg2", None], ["pg2", "pg2_"]),
        ([None, "pg1", "pg1_"], ["pg1__", "pg1", "pg1_"]),
        (["pg2", "pg1"], ["pg2", "pg1"]),
        (["a", "a", "pg1"], ["pg1_", "pg2", "pg1"]),
        (["pg1", "pg1"], ["pg1", "pg2"]),
        ([1, "1", None], ["pg1", "pg2", "pg3"]),
    ],
)
def test_every_group_has_a_name_of_its_own(given: list[Any], names: list[str]) -> None:
    """A group named pg2 used to hide the second one, which had no name."""
    groups = [
        {"params": [torch.ones(2, requires_grad=True)]} | ({} if name is None else {"name": name}) for name in given
    ]
    opt = mechanize(torch.optim.SGD(groups, lr=0.1))
    assert names_of(opt.param_groups) == names
    assert {key for key in opt.metrics() if "scale/" in key} == {f"mechanic/scale/{name}" for name in names}


def test_metrics_of_one_group_before_and_after_a_step() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    assert opt.metrics() == dict.fromkeys(METRICS, 0.0)
    train(model, opt, 7)
    metrics = opt.metrics()
    assert metrics.keys() == METRICS
    assert metrics["mechanic/steps"] == 7
    assert metrics["mechanic/effective_lr"] == opt.effective_lrs[0] == opt.scale.item() * 0.5
    assert metrics["mechanic/h"] != 0


@pytest.mark.parametrize("scope", ["all", "group"])
def test_how_far_the_weights_have_moved(scope: Any) -> None:
    model = perceptron()
    start = [p.detach().clone() for p in model.parameters()]
    opt = mechanize(ADAMW(two_groups(model), lr=0.5), scope=scope)
    for step in range(8):
        far = math.hypot(*((p - x).norm().item() for p, x in zip(model.parameters(), start, strict=True)))
        train(model, opt, 1, first=step)
        assert opt.metrics()["mechanic/moved"] == pytest.approx(far if step > 1 else 0.0, rel=1e-5)
    assert far > 0.03


def test_how_far_is_not_always_known() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 5)
    opt.load_state_dict(opt.state_dict())
    assert opt.metrics().keys() == METRICS - {"mechanic/moved"}
    train(model, opt, 1)
    assert opt.metrics().keys() == METRICS
    opt.freeze(release=True)
    train(model, opt, 1)
    assert opt.metrics().keys() == METRICS - {"mechanic/moved"}
    model = perceptron()
    published = mechanize(ADAMW(model.parameters()), rule="paper")
    train(model, published, 5)
    assert published.metrics().keys() == METRICS - {"mechanic/moved"}


def test_the_effective_lr_is_that_of_the_step_made() -> None:
    """Schedulers step before logging, so the group's lr is the next step's, which is 0 at the end of a cosine."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=5)
    for step in range(5):
        lr = opt.param_groups[0]["lr"]
        train(model, opt, 1, first=step)
        scheduler.step()
        assert opt.effective_lrs == [opt.scale.item() * lr]
    assert opt.param_groups[0]["lr"] == 0
    assert opt.effective_lrs[0] > 0


def test_the_effective_lr_after_a_load_is_not_that_of_a_step_before_it() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    train(model, opt, 5)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.125
    opt.load_state_dict(saved)
    assert opt.effective_lrs == [opt.scale.item() * 0.125]


def test_a_frozen_scale_stays_while_training_goes_on() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 20)
    opt.freeze()
    tuner, weights = opt.tuner, copy.deepcopy(model.state_dict())
    train(model, opt, 10, first=20)
    assert all(map(torch.equal, tuner[:4], opt.tuner[:4]))
    assert differences(weights, model.state_dict())
    assert opt.metrics()["mechanic/steps"] == 30
    opt.unfreeze()
    train(model, opt, 5, first=30)
    assert not torch.equal(tuner.s, opt.tuner.s)


def test_frozen_training_is_the_bases_own_at_the_effective_lr() -> None:
    model = perceptron(torch.float64)
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.5))
    train(model, opt, 50)
    opt.freeze()
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=opt.effective_lrs[0])
    train(model, opt, 20, first=50)
    train(twin, plain, 20, first=50)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
