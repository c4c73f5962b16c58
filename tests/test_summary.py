from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import perceptron, train
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.summary import ScaleHistory, is_still_rising, learned_lr, report


class Played:
    """What a history reads of an optimizer, with scales given beforehand: the rule that learns them is not asked."""

    def __init__(self, scales: list[float], lrs: list[float] | None = None, *, steps: int = 0) -> None:
        self.history = ScaleHistory()
        for index, scale in enumerate(scales):
            self.scales = torch.tensor([scale], dtype=torch.float64)
            self.lrs = [lrs[index] if lrs else 1.0]
            self.tuner = type("Tuner", (), {"steps": torch.tensor(float(steps + index + 1))})
            self.history.record(self)  # type: ignore[arg-type]


def rise(steps: int, *, until: int, rate: float = 0.03, drift: float = 0.0) -> list[float]:
    """The first step plays nothing; then a constant rate, then a drift."""
    return [0.0] + [1e-3 * math.exp(rate * min(t, until) + drift * max(0, t - until)) for t in range(1, steps)]


@pytest.mark.parametrize("steps", [20, 30, 100, 300, 1000, 5000])
def test_a_rise_that_lasts_to_the_end_is_seen(steps: int) -> None:
    assert is_still_rising(Played(rise(steps, until=steps)).history)


@pytest.mark.parametrize(("steps", "until"), [(100, 60), (300, 150), (1000, 300), (10_000, 300)])
@pytest.mark.parametrize("drift", [0.0, 0.001, -0.001])
def test_a_rise_that_has_ended_is_not_confused_with_a_drift(steps: int, until: int, drift: float) -> None:
    assert not is_still_rising(Played(rise(steps, until=until, drift=drift)).history)


def test_a_resumed_run_has_not_seen_the_rise() -> None:
    scales = rise(400, until=0, drift=0.002)
    assert is_still_rising(Played(scales).history)
    assert not is_still_rising(Played(scales, steps=1).history)


@pytest.mark.parametrize("scales", [[], [0.0], [0.0] * 50, rise(15, until=15), [1.0] * 50])
def test_too_little_to_tell(scales: list[float]) -> None:
    assert not is_still_rising(Played(scales).history)


def test_a_history_thins_out_and_stays_even() -> None:
    history = Played([float(i) for i in range(5000)]).history
    assert 256 <= len(history) < 512
    spacing = {b - a for a, b in zip(history.scales(), history.scales()[1:], strict=False)}
    assert spacing == {16.0}


@pytest.mark.parametrize("limit", [0, 14, 17])
def test_a_limit_that_cannot_be_halved_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit must be an even number >= 16, got {limit}"):
        ScaleHistory(limit)


def trained(steps: int, schedule: Callable[[Any], Any] | None = None) -> tuple[MechanicOptimizer, ScaleHistory]:
    model, history = perceptron(), ScaleHistory()
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.1, 0.2, 0.1), strict=False)]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1))
    scheduler = schedule(opt) if schedule else None
    for step in range(steps):
        train(model, opt, 1, first=step)
        history.record(opt)
        if scheduler is not None:
            scheduler.step()
    return opt, history


def test_the_peak_is_the_highest_lr_that_was_in_force() -> None:
    """The last scale would not do: where the schedule has gone to 0 it may be anything."""
    opt, history = trained(40, lambda o: CosineAnnealingLR(o, 40))
    peaks = [math.prod(pair) for pair in history.peaks()]
    assert peaks[2] == pytest.approx(2 * peaks[0])
    assert 0 < peaks[0] <= max(history.scales()) * 0.1
    assert f"pg3 {peaks[2]:.3g}" in report(opt, history)


def test_a_single_learning_rate_is_one_number() -> None:
    model, history = perceptron(), ScaleHistory()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(10):
        train(model, opt, 1, first=step)
        history.record(opt)
    lr = max(history.scales()) * 0.5
    assert report(opt, history).startswith(f"Mechanic learned a peak learning rate of {lr:.3g} (scale ")
    assert report(opt, history).endswith("x lr 0.5).")
    assert report(opt) == report(opt, ScaleHistory())


def test_nothing_learned_is_said() -> None:
    opt = mechanize(torch.optim.SGD(perceptron().parameters(), lr=0.5))
    assert "learned no learning rate" in report(opt)
    assert "learned no learning rate" in report(opt, ScaleHistory())


SCHEDULES: list[Callable[[Any], Any]] = [
    lambda o: CosineAnnealingLR(o, 20),
    lambda o: OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=25),
    lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learned_lr_is_of_the_schedules_peak(schedule: Callable[[Any], Any]) -> None:
    opt, _ = trained(20, schedule)
    scale = opt.scale.item()
    assert learned_lr(opt) == pytest.approx([scale * lr for lr in (0.1, 0.1, 0.2, 0.1)])


def test_recording_a_group_that_comes_later() -> None:
    opt, history = trained(3)
    extra = torch.ones(2, requires_grad=True)
    opt.add_param_group({"params": [extra], "lr": 0.7, "name": "head"})
    extra.grad = torch.ones(2)
    opt.step()
    history.record(opt)
    assert len(history.peaks()) == len(opt.param_groups)
    assert "head " in report(opt, history)
