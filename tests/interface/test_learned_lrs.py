"""`learned_lrs` against what the weights did, over histories in which param groups come, go and change by hand."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import differences, everything, perceptron, train, two_groups
from torch import nn
from torch.optim import lr_scheduler

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize

CAP = 1e-12
"""So low that both rules reach it with their first move and stay there."""


@dataclass
class Run:
    """SGD on given gradients, so that a step's length tells the rate. Group 0 is never changed alone."""

    options: dict[str, Any]
    lrs: list[float]
    kind: str
    """What moves all groups: nothing, "by hand", or a scheduler."""
    peaks: list[float] = field(default_factory=list)
    """Each group's lr where the schedule stands at 1: 0 while it is held at 0."""
    first_lrs: list[float] = field(default_factory=list)
    place: float = 1.0
    top: float = 0.0
    """The highest place so far."""
    rates: float = 0.0
    places: float = 0.0
    """The sums over group 0's steps of the rate and of the place in the schedule."""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.opt: MechanicOptimizer | None = None
        self.scheduler: Any = None
        for lr in self.lrs:
            self.add(lr)
        if self.kind == "lambda":
            self.scheduler = lr_scheduler.LambdaLR(self.opt, [self.factor] * len(self.lrs))
        if self.kind == "cosine":
            warm_up = lr_scheduler.LinearLR(self.opt, 0.25, total_iters=6)
            cosine = lr_scheduler.CosineAnnealingLR(self.opt, 60)
            self.scheduler = lr_scheduler.SequentialLR(self.opt, [warm_up, cosine], milestones=[6])
        self.note_place()

    @staticmethod
    def factor(step: int) -> float:
        return min((step + 1) / 4, 1.0) * max(0.0, 1 - step / 60)

    def note_place(self) -> None:
        if self.scheduler is not None:
            self.place = self.opt.param_groups[0]["lr"] / self.peaks[0]

    def add(self, lr: float) -> None:
        start = torch.randn(40, generator=self.random, dtype=torch.float64)
        p = nn.Parameter(start * ("max_scale" not in self.options))  # from 0 the smallest move is exact
        group = {"params": [p], "lr": lr * self.place}
        self.peaks.append(lr)
        self.first_lrs.append(lr)
        if self.opt is None:
            self.opt = mechanize(torch.optim.SGD([group]), **self.options)
        else:
            self.opt.add_param_group(group)
        for part in self.parts():
            part.base_lrs.append(lr)
            if hasattr(part, "lr_lambdas"):
                part.lr_lambdas.append(self.factor)

    def parts(self) -> list[Any]:
        return [] if self.scheduler is None else getattr(self.scheduler, "_schedulers", [self.scheduler])

    def set(self, index: int, peak: float) -> None:
        """Changes one group by hand, and what schedulers know of it."""
        self.peaks[index] = peak
        self.opt.param_groups[index]["lr"] = peak * self.place
        for part in self.parts():
            part.base_lrs[index] = peak

    def set_all(self, place: float) -> None:
        self.place = place
        for group, peak in zip(self.opt.param_groups, self.peaks, strict=True):
            group["lr"] = peak * place

    def step(self) -> list[float]:
        """Makes a step. Returns the rate of each group, |dx| / |g|."""
        params = [p for group in self.opt.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        gradients = [torch.randn(40, generator=self.random, dtype=torch.float64) for _ in params]
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.opt.step()
        if any("was taken back" in str(warning.message) for warning in said):  # groups of other lrs were added
            self.rates = self.places = 0.0
            self.top = max(self.top, self.place)
            return self.step()
        moves = [p.detach() - x for p, x in zip(params, before, strict=True)]
        rates = [float(move.norm() / gradient.norm()) for move, gradient in zip(moves, gradients, strict=True)]
        self.top = max(self.top, self.place)
        self.rates += rates[0]
        self.places += self.place if rates[0] > 0 else 0.0
        if self.scheduler is not None:
            self.scheduler.step()
            self.note_place()
        return rates

    def at_the_top(self) -> list[float]:
        """The rates of a step at the top of the schedule."""
        self.scheduler = None
        self.set_all(self.top)
        return self.step()


GROUP = st.integers(1, 4)
STEPS = st.tuples(st.just("step"), st.integers(1, 6))
HELD = st.tuples(st.just("hold"), GROUP)
LOWERED = st.tuples(st.just("by hand"), GROUP, st.sampled_from([0.01, 0.1, 0.2]))
RAISED = st.tuples(st.just("by hand"), GROUP, st.sampled_from([5.0, 10.0, 100.0]))
ADDED = st.tuples(st.just("add"), st.sampled_from([0.03, 0.2, 0.5, 20.0]))
ALL = st.tuples(st.just("all"), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
ALL_RAISED = st.tuples(st.just("all"), st.sampled_from([2.0, 10.0]))
START = st.lists(st.sampled_from([0.01, 0.1, 0.5]), min_size=2, max_size=3)
KIND = st.sampled_from(["by hand", "lambda", "cosine"])
BUDGET = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def played(options: dict[str, Any], lrs: list[float], kind: str, program: list[tuple[Any, ...]]) -> Run:
    run, is_fresh = Run(options, lrs, kind), False
    for _ in range(8):  # the warm-up, and the first updates, which are only measured
        run.step()
    for name, *args in program:
        if name == "step":
            for _ in range(args[0]):
                run.step()
            is_fresh = False
        elif run.place == 0 and name != "all":
            continue
        elif name == "add" and len(run.peaks) < 5:
            run.add(args[0])
            for _ in range(3):  # its own tuner only measures at first
                run.step()
        elif name == "all" and kind == "by hand" and not is_fresh:  # one kind of change at a time
            run.set_all(args[0])
            run.step()
        elif name in ("by hand", "hold") and args[0] < len(run.peaks):
            factor = 0.0 if name == "hold" else args[1]
            known = run.peaks[args[0]]
            run.set(args[0], known * factor or (0.0 if known else run.first_lrs[args[0]]))
            is_fresh = True
    run.step()
    return run


@BUDGET
@given(
    rule=st.sampled_from(["relative", "paper"]),
    lrs=START,
    kind=KIND,
    program=st.lists(STEPS | HELD | LOWERED | RAISED | ADDED | ALL, max_size=12),
)
def test_every_group_has_its_rate_at_the_top_of_the_schedule(rule: Any, **history: Any) -> None:
    """A group that was added late at a higher lr, or lowered by hand, had the first group's rate."""
    check_capped({"rule": rule, "max_scale": CAP}, **history)


@BUDGET
@given(
    rule=st.sampled_from(["relative", "paper"]),
    lrs=START,
    kind=KIND,
    program=st.lists(STEPS | HELD | LOWERED | ADDED | ALL, max_size=12),
)
def test_every_tuner_has_its_rate_at_the_top_of_the_schedule(rule: Any, **history: Any) -> None:
    """A raised lr is another matter: the steps at the lower one count for the mean."""
    check_capped({"rule": rule, "max_scale": CAP, "scope": "group"}, **history)


def check_capped(options: dict[str, Any], **history: Any) -> None:
    run = played(options, **history)
    learned, plain = run.opt.learned_lrs, demechanize(copy.deepcopy(run.opt))
    assert learned == pytest.approx(run.at_the_top(), rel=1e-9, abs=0)
    assert [group["lr"] for group, lr in zip(plain.param_groups, learned, strict=True) if lr] == list(
        filter(None, learned)
    )


@BUDGET
@given(lrs=START, kind=KIND, program=st.lists(STEPS | HELD | LOWERED | RAISED | ADDED | ALL | ALL_RAISED, max_size=12))
def test_a_group_that_nobody_touched_has_its_mean_rate(**history: Any) -> None:
    """And the others have their present share of it."""
    run = played({}, **history)
    learned, mean = run.opt.learned_lrs, run.rates / run.places * run.top
    rates = run.at_the_top()
    assert learned == pytest.approx([mean * rate / rates[0] for rate in rates], rel=1e-9, abs=0)


@pytest.mark.parametrize("rule", [None, "paper"])
def test_a_change_by_hand_is_seen_across_a_checkpoint(rule: Any) -> None:
    """The lr of the last step is saved: which group has moved cannot be told from the current ones."""
    optimizers = []
    for resumes in (False, True):
        model = perceptron()
        opt = mechanize(torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1), rule=rule)
        train(model, opt, 10)
        opt.param_groups[1]["lr"] = 0.01
        if resumes:
            saved = copy.deepcopy(opt.state_dict())
            opt = mechanize(torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1), rule=rule)
            opt.load_state_dict(saved)
        train(model, opt, 10, first=10)
        optimizers.append(opt)
    first, *others = optimizers[0].learned_lrs
    assert others == pytest.approx([0.1 * first, first, first])
    assert not differences(*map(everything, optimizers))


def test_groups_with_a_curve_of_their_own_keep_their_shares() -> None:
    """A floor that a scheduler gives to all groups alike is no change by hand."""
    model = perceptron()
    opt = mechanize(torch.optim.SGD(two_groups(model)))
    scheduler = lr_scheduler.CosineAnnealingLR(opt, 30, eta_min=0.005)
    for step in range(30):
        train(model, opt, 1, first=step)
        scheduler.step()
    train(model, opt, 1, first=30)
    assert opt.param_groups[0]["lr"] == pytest.approx(opt.param_groups[1]["lr"])
    assert opt.learned_lrs == pytest.approx([opt.learned_lr, opt.learned_lr / 10])
