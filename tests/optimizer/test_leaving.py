"""Going back to the base optimizer."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import differences, everything, perceptron, train
from torch import nn

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize
from mechanic_plugins.optimizer.to_plain import filled, save_whole, scales_in


def with_idle_groups(scope: Any) -> tuple[nn.Module, MechanicOptimizer]:
    """Two groups that learn, one with frozen weights and an empty one, as LoRA+ makes them."""
    model = perceptron()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    groups = [
        {"params": list(model[0].parameters())},
        {"params": [frozen], "lr": 0.5},
        {"params": list(model[2].parameters()), "lr": 0.03},
        {"params": []},
    ]
    return model, mechanize(torch.optim.AdamW(groups, lr=0.1), scope=scope)


@pytest.mark.parametrize("scope", ["all", "group"])
def test_groups_that_learned_nothing_take_the_smallest_scale(scope: str) -> None:
    """With scope="group" they could never be converted: their own scale stays 0 however long the others train."""
    model, opt = with_idle_groups(scope)
    train(model, opt, 30)
    learned = opt.learned_lrs
    scales = [learned[0] / 0.1, learned[2] / 0.03]
    assert min(scales) > 0
    idle = min(scales)
    plain = demechanize(opt)
    lrs = [group["lr"] for group in plain.param_groups]
    assert lrs == pytest.approx([learned[0], 0.5 * idle, learned[2], 0.1 * idle], rel=1e-12)


def test_scope_group_without_any_step_is_refused_and_left_alone() -> None:
    _, opt = with_idle_groups("group")
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"rates are \[0.0, 0.0, 0.0, 0.0\].*Train a few steps"):
        demechanize(opt)
    assert not differences(before, everything(opt))


def test_nan_is_no_scale() -> None:
    with pytest.raises(ValueError, match="none of them above 0"):
        filled([0.0, float("nan")])


@pytest.mark.parametrize("rule", [None, "paper", "optax"])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adafactor], ids=["linear", "not linear"])
def test_scales_can_be_read_off_a_state_dict(base: Any, rule: Any) -> None:
    model = perceptron()
    opt = mechanize(base(model.parameters(), lr=0.1), rule=rule)
    train(model, opt, 5)
    assert scales_in(opt.state_dict()["param_groups"]) == opt.scales.tolist()
    assert opt.scales.min() > 0


@pytest.mark.parametrize("value", [None, "", math.nan, -1.0, []], ids=str)
def test_a_group_without_a_scale_is_named_damaged(value: Any) -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 5)
    [group] = copy.deepcopy(opt.state_dict()["param_groups"])
    content = json.loads(group["mechanic_tuner"])
    content["tuner"]["scale"] = value
    with pytest.raises(ValueError, match=r"the checkpoint's scale is .* in param group 0.* it is damaged"):
        scales_in([{**group, "mechanic_tuner": json.dumps(content)}])
    with pytest.raises(ValueError, match=r"the checkpoint's mechanic_tuner is .* it is damaged"):
        scales_in([{**group, "mechanic_tuner": ""}])


class Unsavable:
    def __reduce__(self) -> Any:
        raise OSError("no space left")


def test_a_failing_save_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    save_whole([1], target)
    with pytest.raises(OSError, match="no space left"):
        save_whole([torch.zeros(3), Unsavable()], target)
    assert torch.load(target) == [1]
    assert list(tmp_path.iterdir()) == [target]


def test_demechanize_goes_on_at_the_learned_rate_with_its_moments() -> None:
    model = perceptron(torch.float64)
    base = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    opt = mechanize(base)
    train(model, opt, 50)
    lr = opt.learned_lr
    moments = {p: opt.state[p]["exp_avg"].clone() for p in model.parameters()}
    twin_model = copy.deepcopy(model)
    twin = torch.optim.AdamW(twin_model.parameters(), lr=lr, weight_decay=0.0)
    plain = demechanize(opt)
    assert plain is base
    assert plain.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-12)
    assert all(torch.equal(plain.state[p]["exp_avg"], moment) for p, moment in moments.items())
    keys = {k for entries in (*plain.param_groups, *plain.state.values()) for k in entries}
    assert not [k for k in keys if k.startswith("mechanic")]
    twin.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, plain, 20, first=50)
    train(twin_model, twin, 20, first=50)
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))


@pytest.mark.parametrize("steps", [0, 1])
def test_demechanize_before_anything_was_learned_is_refused(steps: int) -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, steps)
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"rates are \[0.0\].*Train a few steps"):
        demechanize(opt)
    assert not differences(before, everything(opt))


def test_demechanize_leaves_nothing_of_a_schedule() -> None:
    """A new scheduler starts from the learned peak, wherever the old one was. A tensor lr stays a tensor."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    torch.optim.lr_scheduler.ConstantLR(opt, factor=0.5)
    train(model, opt, 10)
    lr = opt.learned_lr
    plain = demechanize(opt)
    assert isinstance(plain.param_groups[0]["lr"], torch.Tensor)
    assert float(plain.param_groups[0]["lr"]) == pytest.approx(lr, rel=1e-6)
    assert "initial_lr" not in plain.param_groups[0]
