"""Going back to the base optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from problems import differences, everything, perceptron, train
from torch import nn

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize
from mechanic_plugins.checkpoints.leaving import filled, save_whole, scales_in


def with_idle_groups(scope: Any) -> tuple[nn.Module, MechanicOptimizer]:
    """Two groups that learn, one whose weights are frozen, and one that is empty, as LoRA+ makes them."""
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
    """With scope="group" they failed for ever: their own scale stays 0, however long the others train."""
    model, opt = with_idle_groups(scope)
    train(model, opt, 30)
    scales = opt.scales.tolist()
    learned = [scales[0], scales[2]]
    assert min(learned) > 0
    idle = scales[0] if scope == "all" else min(learned)
    plain = demechanize(opt)
    lrs = [group["lr"] for group in plain.param_groups]
    assert lrs == pytest.approx([0.1 * scales[0], 0.5 * idle, 0.03 * scales[2], 0.1 * idle])
    losses = train(model, plain, 50, first=30)
    assert sum(losses[-10:]) < sum(losses[:10])


def test_scope_group_without_any_step_is_refused_and_left_alone() -> None:
    _, opt = with_idle_groups("group")
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"scales are \[0.0, 0.0, 0.0, 0.0\].*Train a few steps"):
        demechanize(opt)
    assert not differences(before, everything(opt))


def test_nan_is_no_scale() -> None:
    with pytest.raises(ValueError, match="none of them above 0"):
        filled([0.0, float("nan")])


@pytest.mark.parametrize("name", [n for n in golden.CASES if n != "adafactor"])
def test_scales_can_be_read_off_a_file_of_0_1(name: str) -> None:
    """All but those of a base that is not linear in lr, whose unit 0.1 did not save."""
    saved = torch.load(golden.FOLDER / "0.1.0" / f"{name}.pt", weights_only=True)["optimizer"]
    _, opt = golden.build(golden.CASES[name])
    opt.load_state_dict(saved)
    assert scales_in(saved["param_groups"]) == opt.scales.tolist()


@pytest.mark.parametrize("name", golden.CASES)
def test_scales_can_be_read_off_a_state_dict(name: str) -> None:
    model, opt = golden.build(golden.CASES[name])
    golden.train(model, opt, golden.CASES[name], 0, 5)
    assert scales_in(opt.state_dict()["param_groups"]) == opt.scales.tolist()
    assert opt.scales.min() > 0


def test_a_group_without_a_scale_is_named_damaged() -> None:
    with pytest.raises(ValueError, match=r"cannot be read .*mechanic_played.* damaged"):
        scales_in([{"mechanic_tuners": 1, "mechanic_unit": 1.0}])


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
    lr = opt.effective_lrs[0]
    moments = {p: opt.state[p]["exp_avg"].clone() for p in model.parameters()}
    twin_model, twin = copy.deepcopy((model, opt))
    twin.freeze()
    plain = demechanize(opt)
    assert plain is base
    assert plain.param_groups[0]["lr"] == lr
    assert all(torch.equal(plain.state[p]["exp_avg"], moment) for p, moment in moments.items())
    keys = {k for entries in (*plain.param_groups, *plain.state.values()) for k in entries}
    assert not [k for k in keys if k.startswith("mechanic")]
    train(model, plain, 20, first=50)
    train(twin_model, twin, 20, first=50)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [0, 1])
def test_demechanize_before_anything_was_learned_is_refused(steps: int) -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, steps)
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"scales are \[0.0\].*Train a few steps"):
        demechanize(opt)
    assert not differences(before, everything(opt))


def test_demechanize_scales_what_a_scheduler_starts_from() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    torch.optim.lr_scheduler.ConstantLR(opt, factor=0.5)
    train(model, opt, 10)
    learned = opt.learned_lr
    plain = demechanize(opt)
    assert isinstance(plain.param_groups[0]["lr"], torch.Tensor)
    assert float(plain.param_groups[0]["lr"]) == pytest.approx(learned, rel=1e-6)
    assert float(plain.param_groups[0]["initial_lr"]) == pytest.approx(learned, rel=1e-6)
