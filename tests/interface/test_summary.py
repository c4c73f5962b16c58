from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from problems import perceptron, train
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize
from mechanic_plugins.summary import STILL_RISING, ScaleHistory, is_still_rising, remarks, report, rules


class Played:
    """Stands in for the optimizer that a history reads, with given scales instead of learned ones."""

    def __init__(self, scales: list[float], lrs: list[float] | None = None, *, steps: int = 0) -> None:
        self.history = ScaleHistory()
        for index, scale in enumerate(scales):
            self.scales = torch.tensor([scale], dtype=torch.float64)
            self.lrs = [lrs[index] if lrs else 1.0]
            self.tuner = type("Tuner", (), {"steps": torch.tensor(float(steps + index + 1))})
            self.history.record(self)  # type: ignore[arg-type]


def rise(steps: int, *, until: int, rate: float = 0.03, drift: float = 0.0) -> list[float]:
    """Scales that start with a 0, then grow at a constant rate, then drift."""
    return [0.0] + [1e-3 * math.exp(rate * min(t, until) + drift * max(0, t - until)) for t in range(1, steps)]


@pytest.mark.parametrize("steps", [10, 15, 20, 30, 100, 300, 1000, 5000])
def test_a_rise_that_lasts_to_the_end_is_seen(steps: int) -> None:
    assert is_still_rising(Played(rise(steps, until=steps)).history)


def test_ten_steps_towards_a_far_target_are_still_rising() -> None:
    """The jump of the first two steps used to hide every rise after it."""
    model, history = perceptron(), ScaleHistory()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    for _ in range(10):
        opt.zero_grad()
        (model(torch.ones(4, 4)) - 1000).square().mean().backward()
        opt.step()
        history.record(opt)
    assert STILL_RISING in remarks(opt, history)


@pytest.mark.parametrize(("steps", "until"), [(100, 60), (300, 150), (1000, 300), (10_000, 300)])
@pytest.mark.parametrize("drift", [0.0, 0.001, -0.001])
def test_a_rise_that_has_ended_is_not_confused_with_a_drift(steps: int, until: int, drift: float) -> None:
    assert not is_still_rising(Played(rise(steps, until=until, drift=drift)).history)


def test_a_resumed_run_has_not_seen_the_rise() -> None:
    scales = rise(400, until=0, drift=0.002)
    assert is_still_rising(Played(scales).history)
    assert not is_still_rising(Played(scales, steps=1).history)


@pytest.mark.parametrize("scales", [[], [0.0], [0.0] * 50, [0.0, 1.0, 1.1, 1.2], [1.0] * 50])
def test_too_little_to_tell(scales: list[float]) -> None:
    assert not is_still_rising(Played(scales).history)


def test_a_history_thins_out_and_stays_even() -> None:
    history = Played([float(i) for i in range(5000)]).history
    assert 256 <= len(history) < 512
    spacing = {b[0] - a[0] for a, b in zip(history.lrs(), history.lrs()[1:], strict=False)}
    assert spacing == {16.0}


@pytest.mark.parametrize("limit", [0, 14, 17])
def test_a_limit_that_cannot_be_halved_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit must be an even number >= 16, got {limit}"):
        ScaleHistory(limit)


class Trained:
    """A run under a cosine that ends at 0."""

    def __init__(self, steps: int, *, lrs: tuple[float, ...] = (0.1, 0.1, 0.2, 0.1)) -> None:
        self.model, self.history = perceptron(), ScaleHistory()
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.model.parameters(), lrs, strict=True)]
        self.opt = mechanize(torch.optim.AdamW(groups, lr=0.1))
        self.scheduler = CosineAnnealingLR(self.opt, steps)
        for step in range(steps):
            train(self.model, self.opt, 1, first=step)
            self.history.record(self.opt)
            self.scheduler.step()


def test_there_is_one_learned_learning_rate() -> None:
    """After the schedule's end, the report used to say 8.6e-07 for a rate of 0.15."""
    run = Trained(40)
    learned = run.opt.learned_lr
    assert run.opt.learned_lrs == pytest.approx([learned / 2, learned / 2, learned, learned / 2])
    largest = f"Mechanic learned a learning rate of {learned:.3g}, the largest of 4 param groups"
    assert report(run.opt) == f'{largest} (rule="relative").'
    assert 0.2 < max(map(max, run.history.lrs())) / learned < 5


def test_demechanize_after_a_finished_schedule() -> None:
    """The lr used to be 0.0, and a new scheduler trained 100 steps at it."""
    run = Trained(40)
    learned = run.opt.learned_lrs
    plain = demechanize(run.opt)
    assert [group["lr"] for group in plain.param_groups] == pytest.approx(learned)
    assert CosineAnnealingLR(plain, 10).base_lrs == pytest.approx(learned)


def test_demechanize_after_a_schedule_set_by_hand() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(20):
        opt.param_groups[0]["lr"] = 0.5 * (1 - step / 19)
        train(model, opt, 1, first=step)
    learned = opt.learned_lr
    assert demechanize(opt).param_groups[0]["lr"] == learned > 0


def trained_in_two_groups(lrs: list[float], steps: int = 30, **options: Any) -> MechanicOptimizer:
    model = perceptron()
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip((model[0], model[2]), lrs, strict=True)]
    opt = mechanize(torch.optim.AdamW(groups), **options)
    train(model, opt, steps)
    return opt


@pytest.mark.parametrize("rule", [None, "paper"])
@pytest.mark.parametrize("scope", ["all", "group"])
def test_demechanize_leaves_a_group_that_was_held_at_0_there(rule: Any, scope: Any) -> None:
    """It used to get the scale itself as its lr, 62."""
    opt = trained_in_two_groups([0.0, 1e-3], rule=rule, scope=scope)
    learned = opt.learned_lrs
    assert learned[0] == 0 < learned[1]
    assert [group["lr"] for group in demechanize(opt).param_groups] == learned


@pytest.mark.parametrize("rule", [None, "paper"])
def test_a_group_held_at_0_by_hand_under_a_scheduler_stays_there(rule: Any) -> None:
    """It was given the others' scale, from the `initial_lr` that the scheduler had noted."""
    model = perceptron()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    opt = mechanize(torch.optim.AdamW(groups, lr=1e-3), **({} if rule is None else {"rule": rule}))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 60)
    for _ in range(30):
        opt.param_groups[0]["lr"] = 0.0
        train(model, opt, 1)
        schedule.step()
    learned = opt.learned_lrs
    assert learned[0] == 0 < learned[1]
    assert [group["lr"] for group in demechanize(opt).param_groups] == learned


def test_demechanize_gives_a_group_that_learned_nothing_the_smallest_scale() -> None:
    model, extra = perceptron(), torch.ones(2, requires_grad=True)  # never has a gradient
    groups = [{"params": [extra], "lr": 0.1}, {"params": [extra.clone().detach()], "lr": 0.0}]
    opt = mechanize(torch.optim.AdamW([*groups, {"params": model.parameters(), "lr": 0.5}]), scope="group")
    train(model, opt, 30)
    learned = opt.learned_lrs
    assert learned[:2] == [0, 0]
    assert [group["lr"] for group in demechanize(opt).param_groups] == pytest.approx([learned[2] / 5, 0, learned[2]])


def test_nothing_learned_because_every_group_was_held_at_0() -> None:
    with pytest.raises(RuntimeError, match="the learning rate would be 0"):
        demechanize(trained_in_two_groups([0.0, 0.0]))


def test_a_single_learning_rate_is_one_number() -> None:
    run = Trained(10, lrs=(0.1,) * 4)
    assert report(run.opt) == f'Mechanic learned a learning rate of {run.opt.learned_lr:.3g} (rule="relative").'
    assert remarks(run.opt, None) == []


@pytest.mark.parametrize("rule", ["paper", "experiments", "optax", "theory"])
def test_a_report_names_the_rule(rule: Any) -> None:
    """No line, metric or config named it, so that no run could be told from one by another rule."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), rule=rule)
    train(model, opt, 20)
    assert report(opt) == f'Mechanic learned a learning rate of {opt.learned_lr:.3g} (rule="{rule}").'
    plain = mechanize(torch.optim.SGD(perceptron().parameters(), lr=0.5))
    assert rules([opt, plain]) == {"mechanic/rule": rule, "mechanic/rule-1": "relative"}
    assert f"rule={rule!r}" in repr(opt)
    assert "rule='relative'" in repr(plain)


def test_nothing_learned_is_said() -> None:
    opt = mechanize(torch.optim.SGD(perceptron().parameters(), lr=0.5))
    assert "learned no learning rate" in report(opt)
    assert remarks(opt, None) == remarks(opt, ScaleHistory())
    assert remarks(opt, None)[0].startswith("Mechanic made no step: optimizer.step() was replaced or never called")


def test_a_step_without_gradients_is_not_called_missing() -> None:
    opt, history = mechanize(torch.optim.SGD(perceptron().parameters(), lr=0.5)), ScaleHistory()
    for _ in range(3):
        opt.step()
        history.record(opt)
    assert [remark.partition(", so")[0] for remark in remarks(opt, history)] == [
        "Mechanic made no step: optimizer.step() was called, but none of its weights had a gradient"
    ]


def test_a_run_that_skips_too_many_steps_and_still_rises_says_both() -> None:
    run = Trained(10, lrs=(0.1,) * 4)
    run.model.zero_grad()
    for p in run.model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with pytest.warns(UserWarning, match="not finite"):
        run.opt.step()
    rising = Played(rise(10, until=10)).history
    assert remarks(run.opt, rising) == [
        STILL_RISING,
        "Mechanic skipped 1 of 11 steps, whose gradients were not finite or far larger than all before them.",
    ]


@pytest.mark.parametrize("why", ["a cap", "no gradient", "an lr of 0"])
def test_a_run_that_hardly_moved_says_so(why: str) -> None:
    model, history = perceptron(), ScaleHistory()
    opt = mechanize(torch.optim.AdamW(model.parameters()), max_scale=1e-4 if why == "a cap" else None)
    opt.param_groups[0]["lr"] *= why != "an lr of 0"
    for step in range(12):
        if why == "no gradient":
            opt.zero_grad()
            (0 * model(torch.ones(4, 4))).sum().backward()
            opt.step()
        else:
            train(model, opt, 1, first=step)
        history.record(opt)
        hardly = [remark for remark in remarks(opt, history) if "hardly anything was trained" in remark]
        assert len(hardly) == (step >= 9)
    assert re.match(r"Mechanic moved the weights by [\de.-]+ of their size in 12 steps, so hardly", hardly[0])


@pytest.mark.parametrize("steps", [10, 100])
def test_a_run_under_a_schedule_that_ends_at_zero_has_moved(steps: int) -> None:
    run = Trained(steps)
    assert run.opt.metrics()["mechanic/moved"] > 0.03
    assert not [remark for remark in remarks(run.opt, run.history) if "moved" in remark]


def test_recording_a_group_that_comes_later() -> None:
    run = Trained(3)
    extra = torch.ones(2, requires_grad=True)
    run.opt.add_param_group({"params": [extra], "lr": 0.7, "name": "head"})
    extra.grad = torch.ones(2)
    run.opt.step()
    run.history.record(run.opt)
    assert len(run.history.lrs()[-1]) == len(run.opt.param_groups)


@pytest.mark.parametrize("rule", [None, "paper"])
def test_a_rate_raised_by_hand_counts_as_a_warm_up(rule: Any) -> None:
    """The learned rate is the peak that would have gone as far, with the lower rate before it."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=1e-3), rule=rule)
    rates, lrs = [], []
    for step in range(44):
        opt.param_groups[0]["lr"] = 1e-3 if step < 40 else 1e-2
        train(model, opt, 1, first=step)
        rates += [rate for rate in opt.effective_lrs if rate]
        lrs += [opt.param_groups[0]["lr"] for rate in opt.effective_lrs if rate]
    assert opt.learned_lr == pytest.approx(sum(rates) / (sum(lrs) / 1e-2), rel=1e-12)


@pytest.mark.parametrize("loss_scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_a_run_in_which_every_step_was_favourable_was_too_short(noise: float, loss_scale: float) -> None:
    """Whatever the size of the loss. Noise that hides the way makes it none."""
    p = torch.nn.Parameter(torch.ones(20))
    opt, history = mechanize(torch.optim.SGD([p], lr=0.1)), ScaleHistory()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        p.grad = loss_scale * (0.1 + noise * torch.randn(20, generator=generator))
        opt.step()
        history.record(opt)
    assert (opt.agreement > 0.8) == (noise == 0)
    assert (STILL_RISING in remarks(opt, history)) == (noise == 0)
