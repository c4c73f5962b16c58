"""The tuner's step in plain floats, without an optimizer: what it depends on and what it must not depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
import torch
from reference_default import PRIOR
from torch import Tensor

from mechanic_plugins.rule.decide import Decision, clip_factor, decide, new_tuners
from mechanic_plugins.rule.settings import Rule, Settings
from mechanic_plugins.rule.sums import Sums, with_scaled_gradients

RULES = get_args(Rule)
PUBLISHED = [rule for rule in RULES if rule != "relative"]
REACH = math.exp(3)
"""How far the evidence can move the default rule's scale, up or down."""
FIRST = (0.0, 4.0, 4.0, 3.0, 0.0, 2.0)
"""The sums of the first step: |g| = 2, four nonzero elements of the gradient, two weights with a mean root of 1.5."""
STEPS: list[tuple[float, ...]] = [
    (-2.0, 4.0, 9.0, 0.5, 1.0, 0.0),
    (-3.0, 4.0, 9.0, 1.0, 4.0, 0.0),
    (1.0, 2.0, 9.0, 1.5, 6.0, 0.25),
    (-0.5, 1.0, 8.0, -1.5, 6.0, 0.0),
]
"""The sign of dg changes, as on a real problem."""
COUNTED = {"steps", "skipped", "top_lr", "longest", "path", "sum_scale_lr", "sum_lr", "full_steps"}
"""What a step changes while the scale is held."""


def new(settings: Settings | None = None, count: int = 1, *, unit: float = 1.0) -> list[Any]:
    tuners = new_tuners(settings or Settings(), count)
    for tuner in tuners:
        tuner.unit = unit
    return tuners


def step(tuners: list[Any], *sums: Sequence[float], settings: Settings | None = None, **options: Any) -> Decision:
    lrs = options.pop("lrs", [1.0] * len(tuners))
    return decide(tuners, [number for each in sums for number in each] + [1.0], lrs, settings or Settings(), **options)


def after(tuner: Any, sums: Sequence[float], settings: Settings | None = None, **options: Any) -> Any:
    """The tuner after one more step."""
    return step([tuner], sums, settings=settings, **options).tuners[0]


def played(steps: Sequence[Sequence[float]], settings: Settings | None = None, lr: float = 1.0) -> Any:
    [tuner] = new(settings)
    for sums in steps:
        tuner = after(tuner, sums, settings, lrs=[lr])
    return tuner


def changed(before: Any, now: Any) -> set[str]:
    """The fields that differ, bit for bit."""
    return {field.name for field in fields(before) if getattr(before, field.name) != getattr(now, field.name)}


def walk(seed: int, steps: int, lr: float = 1.0, factor: float = 1.0) -> list[float]:
    """The scales of an SGD run on a noisy quadratic of 8 weights, computed in plain floats."""
    generator = np.random.default_rng(seed)
    x_0, curvature = generator.normal(size=8), np.logspace(-2, 0, 8)
    x, waiting, tuners, scales = x_0.copy(), np.zeros(8), new(), []
    for t in range(steps):
        g = factor * (curvature * x + generator.normal(size=8))
        d = x - x_0 if tuners[0].scale > 0 else waiting
        sizes = (8, np.cbrt(np.minimum(np.abs(x), 1)).sum(), 0.0, 8)
        outcome = step(tuners, [d @ g, g @ g, *(sizes if t == 0 else (8, d @ x, d @ d, 0))], lrs=[lr])
        tuners, scale = outcome.tuners, outcome.new_scales[0]
        waiting = waiting - lr * g
        x = x - scale * lr * g
        scales.append(scale * lr * factor)  # normalised to a factor and lr of 1
    return scales


def test_the_default_rule_by_hand() -> None:
    """With lr 0.5: size = (3 / 2)^3, of 4 and then 9 elements; U = 2 / 0.5, then sqrt(10)."""
    s_1 = PRIOR * (3 / 2) ** 3 * 9**0.375 / 2
    first = step(new(), FIRST, lrs=[0.5])
    assert first.new_scales == [0.0]
    second = step(first.tuners, STEPS[0], lrs=[0.5])
    assert (second.is_made, second.clip) == (True, 1.0)
    assert (second.old_scales, second.new_scales) == ([0.0], pytest.approx([s_1], rel=1e-15))
    third = step(second.tuners, (-3.0 * s_1, 4.0, 9.0, 1.0, s_1**2, 0.0), lrs=[0.5])
    s_2 = s_1 * 4 / math.sqrt(10) * math.exp(3 / math.sqrt(40))
    assert third.new_scales == pytest.approx([s_2], rel=1e-14)
    [tuner] = third.tuners
    assert tuner.signal == pytest.approx(-3.0, rel=1e-15)
    assert (tuner.sum_scale_lr, tuner.sum_lr, tuner.steps) == pytest.approx((0.5 * (s_1 + s_2), 1.0, 3))


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e40, 1e100])
def test_the_scale_of_the_loss_does_not_matter(factor: float) -> None:
    assert walk(0, 200, factor=factor) == pytest.approx(walk(0, 200), rel=1e-9)


@pytest.mark.parametrize("lr", [1e-8, 1e6])
def test_the_base_lr_does_not_matter(lr: float) -> None:
    assert walk(0, 200, lr=lr) == pytest.approx(walk(0, 200), rel=1e-9)


@pytest.mark.parametrize("rule", PUBLISHED)
@pytest.mark.parametrize("unit", [1 / 64, 8.0])
def test_published_constants_are_stated_for_a_base_lr_of_1(rule: Rule, unit: float) -> None:
    """Updates `unit` times as long give a scale 1 / unit as large, and the same weights. A power of 2 is exact."""
    settings = Settings(rule=rule, s_init=0.1, s_decay=0.5, eps=0.25)
    ones, others = new(settings), new(settings, unit=unit)
    for dg, gg, xx, dx, dd, dp in ((0.0, 4.0, 9.0, 0.0, 0.0, 0.0), *STEPS):
        one = step(ones, (dg, gg, xx, dx, dd, dp), settings=settings)
        sums = (unit * dg, gg, xx, unit * dx, unit**2 * dd, dp)
        other = step(others, sums, settings=settings, lrs=[unit])
        assert [scale * unit for scale in other.new_scales] == one.new_scales
        ones, others = one.tuners, other.tuners
    assert ones[0].scale > 0


@pytest.mark.parametrize("rule", RULES)
def test_it_is_a_function_of_its_inputs_bit_for_bit(rule: Rule) -> None:
    """The same decision twice, from arguments that it leaves alone: engines decide again after a failed move."""
    settings = Settings(rule=rule, scope="group", max_scale=3.0)
    tuners = step(new(settings, 2), FIRST, FIRST, settings=settings).tuners
    for sums in (*STEPS, (math.nan, *STEPS[0][1:]), (0.0, 1e20, 9.0, 0.0, 1.0, 0.0)):
        before, lrs = copy.deepcopy(tuners), [1.0, 2.0]
        vector = [*sums, *STEPS[0], 1.0]
        given = vector[:]
        outcome = decide(tuners, vector, lrs, settings, max_grad_norm=1.0)
        assert tuners == before
        assert (repr(vector), lrs) == (repr(given), [1.0, 2.0])
        assert decide(before, vector, lrs, settings, max_grad_norm=1.0) == outcome
        assert tuners == before
        tuners = outcome.tuners


@pytest.mark.parametrize("rule", RULES)
def test_tuners_do_not_know_of_each_other(rule: Rule) -> None:
    """With scope="group", each param group has its own."""
    settings = Settings(rule=rule)
    other = [(-10 * dg, gg, 2 * xx, dx, dd, dp) for dg, gg, xx, dx, dd, dp in (FIRST, *STEPS)]
    together = new(settings, 2)
    for a, b in zip((FIRST, *STEPS), other, strict=True):
        together = step(together, a, b, settings=settings).tuners
    assert together == [played((FIRST, *STEPS), settings), played(other, settings)]


@pytest.mark.parametrize("rule", ["relative", "paper", "theory"])
def test_nothing_is_played_before_there_is_a_delta(rule: Rule) -> None:
    """A warm-up from lr 0 has many such steps: there must be no 0 / 0, and counting must not start too early."""
    first = FIRST if rule == "relative" else (0.0, 4.0, 9.0, 0.0, 0.0, 0.0)
    tuner = played([first, *[(0.0, 4.0, 9.0, 0.0, 0.0, 0.0)] * 4], Settings(rule=rule))
    assert tuner.scale == 0
    assert all(map(math.isfinite, tuner.numbers()))


@pytest.mark.parametrize("rule", RULES)
def test_weights_at_zero_and_gradients_at_zero_divide_nothing_by_zero(rule: Rule) -> None:
    for sums in ((-1.0, 1.0, 0.0, 0.0, 1.0, 0.0), (0.0,) * 6, (0.0, 0.0, 1.0, 1.0, 1.0, 0.0)):
        for first in (sums, FIRST):
            tuner = played([first, *[sums] * 3], Settings(rule=rule))
            assert all(map(math.isfinite, tuner.numbers())), sums


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_held_keeps_the_scale(rule: Rule) -> None:
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS[:2]], settings)
    outcome = step([tuner], STEPS[2], settings=settings, hold=True)
    assert outcome.is_made
    assert outcome.new_scales == outcome.old_scales == [tuner.scale]
    assert changed(tuner, outcome.tuners[0]) <= COUNTED
    assert outcome.tuners[0].steps == tuner.steps + 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(7))
def test_sums_that_are_not_finite_skip_the_step(rule: Rule, place: int, value: float) -> None:
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS], settings)
    vector = [*STEPS[0], 1.0]
    vector[place] = value
    outcome = decide([tuner], vector, [1.0], settings, max_grad_norm=1.0)
    assert (outcome.is_made, outcome.new_scales) == (False, [tuner.scale])
    assert changed(tuner, outcome.tuners[0]) == {"skipped"}
    assert outcome.tuners[0].skipped == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_step_without_any_gradient_is_not_made_and_not_skipped(rule: Rule) -> None:
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS], settings)
    outcome = decide([tuner], [0.0] * 7, [1.0], settings)
    assert (outcome.is_made, outcome.new_scales) == (False, [tuner.scale])
    assert outcome.tuners == [tuner]


def test_an_outlier_of_one_tuner_skips_the_step_of_all() -> None:
    before = step(new(count=2), FIRST, FIRST).tuners
    outcome = step(before, (0.0, 4e4 + 1, 0.0, 0.0, 0.0, 0.0), (0.0, 9.0, 0.0, 0.0, 0.0, 0.0))
    assert not outcome.is_made
    assert [tuner.longest for tuner in outcome.tuners] == [200.0, 3.0]
    assert [tuner.skipped for tuner in outcome.tuners] == [1, 1]
    for was, tuner in zip(before, outcome.tuners, strict=True):
        assert changed(was, tuner) == {"longest", "skipped"}


def test_outliers_are_skipped_a_few_times_only() -> None:
    """Gradients may have grown for good, or belong to a rare class that comes every 5,000 steps."""
    tuner, skipped = played([FIRST, *STEPS]), []
    for _ in range(20):
        outcome = step([tuner], (0.0, 1e20, 9.0, 0.0, 1.0, 0.0))
        [tuner] = outcome.tuners
        skipped.append(not outcome.is_made)
    assert skipped == sorted(skipped, reverse=True)
    assert 3 <= sum(skipped) <= 5

    tuner = played([(*FIRST[:1], 1e-10, *FIRST[2:])])
    for t in range(50_001):
        gg = 1.0 if t % 5_000 == 0 else 1e-10
        tuner = after(tuner, (0.0, gg, 9.0, 0.0, 1.0, 0.0))
    assert 1 <= tuner.skipped <= 2


@pytest.mark.parametrize("rule", PUBLISHED)
def test_published_rules_skip_no_outlier(rule: Rule) -> None:
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS], settings)
    assert step([tuner], (0.0, 1e20, 9.0, 0.0, 1.0, 0.0), settings=settings).is_made


def test_a_penalty_is_part_of_what_is_minimised_by_the_default_rule_alone() -> None:
    penalised = (-3.0, 4.0, 9.0, 2.0, 4.0, 0.5)
    tuner = played([FIRST, STEPS[0]])
    assert after(tuner, penalised).signal == pytest.approx(-2.5 / tuner.scale, rel=1e-15)
    assert played([FIRST, STEPS[0], penalised], Settings(rule="paper", s_decay=0.0)).signal == -3.0


def test_s_decay_pulls_by_the_scale_that_was_played() -> None:
    settings = [Settings(rule="paper", s_init=0.1, s_decay=decay) for decay in (0.0, 0.5)]
    without, with_decay = (played([FIRST, *STEPS[:2]], each).signal for each in settings)
    before = played([FIRST, STEPS[0]], settings[1]).scale
    assert with_decay - without == pytest.approx(0.5 * before * 2.0 * 1.0 / 3.0, rel=1e-12)


@pytest.mark.parametrize("rule", ["relative", "paper", "experiments", "optax"])
@pytest.mark.parametrize("cap", [1e-6, 1e-9])
def test_the_cap_holds_in_sum_and_keeps_the_shares(rule: Rule, cap: float) -> None:
    start = {} if rule == "relative" else {"s_init": 1.0}
    steps = [(*each[:4], 1.0 if each is STEPS[0] else 0.0, each[5]) for each in STEPS]  # same length for both
    free, capped = (played([FIRST, *steps], Settings(rule=rule, max_scale=at, **start)) for at in (None, cap))
    assert free.scale > cap
    assert capped.scale == pytest.approx(cap, rel=1e-15)
    if rule != "relative":
        first = [played([FIRST, STEPS[0]], Settings(rule=rule, max_scale=at, **start)) for at in (None, cap)]
        assert np.divide(first[1].s, cap) == pytest.approx(np.divide(first[0].s, first[0].scale), rel=1e-12)
        assert sum(capped.s) == pytest.approx(cap, rel=1e-15)


@pytest.mark.parametrize(("sign", "bound"), [(-1.0, REACH), (1.0, 1 / REACH)])
def test_the_evidence_moves_the_scale_by_a_bounded_factor(sign: float, bound: float) -> None:
    """Holds however long the evidence agrees, as long as updates keep the length of the first.

    There are so many weights that ten thousand steps do not take them twenty times their size from the start.
    """
    tuner = played([(0.0, 4.0, 1e16, 3.0, 0.0, 2.0), STEPS[0]])
    once, length = tuner.scale, tuner.length
    for _ in range(10_000):
        tuner = after(tuner, (sign, 1.0, 9.0, 0.0, length**2 * tuner.path, 0.0))
    assert tuner.length == pytest.approx(length, rel=1e-9)
    assert tuner.scale / once == pytest.approx(bound, rel=0.1)


@pytest.mark.parametrize(("far", "times"), [(0.99, 1.0), (5.0, 5.0)])
def test_far_from_the_start_the_distance_is_the_size(far: float, times: float) -> None:
    """From twenty times the weights' size on, which is how far the evidence alone reaches."""
    tuner = played([FIRST, *STEPS[:2]])
    larger = tuner.copy()
    larger.size *= times
    square = tuner.trained * (far * REACH * tuner.size) ** 2
    scales = [after(each, (-1.0, 4.0, 9.0, 0.0, square, 0.0)).scale for each in (tuner, larger)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-12)


def test_a_walk_that_goes_all_ways_keeps_the_scale() -> None:
    """A random walk of n steps covers sqrt(n) steps; a straight one covers n, and its scale falls as 1 / sqrt(n)."""
    scales = {}
    for way in (0.5, 1.0):
        tuner = played([FIRST, STEPS[0]])
        once, length, travelled = tuner.scale, tuner.length, 0.0
        for _ in range(400):
            travelled += tuner.scale ** (1 / way)
            tuner = after(tuner, (0.0, 1.0, 9.0, 0.0, (length * travelled**way) ** 2, 0.0))
        scales[way] = tuner.scale / once
    assert scales[0.5] == pytest.approx(1, rel=1e-9)
    assert 1 / 30 < scales[1.0] < 1 / 10


@pytest.mark.parametrize("steps", [400, 8_000])
def test_the_window_of_the_evidence_is_the_same_in_a_long_run(steps: int) -> None:
    """Two hundred steps of opposite evidence outweigh all earlier evidence, and twenty do not."""
    tuner, signs = played([FIRST, STEPS[0]]), []
    for t in range(steps + 200):
        tuner = after(tuner, (-1.0 if t < steps else 1.0, 1.0, 9.0, 0.0, 1e-6, 0.0))
        signs.append(tuner.z_sum > 0)
    assert signs[: steps + 20] == [True] * (steps + 20)
    assert not signs[-1]


def test_steps_that_hardly_move_prove_little() -> None:
    """At a thousandth of the run's mean scale, evidence counts a thousandth, so that a fallen scale can rise again."""
    tuner = played([FIRST, *STEPS[:2]])
    tuner.scale = tuner.sum_scale_lr / tuner.sum_lr / 1000
    now = after(tuner, (1.0, 1.0, 9.0, 0.0, tuner.length**2 * tuner.path, 0.0))
    assert now.z_squares == pytest.approx(tuner.z_squares * (1 - 1e-3 / 40) + 1e-3, rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_tuner_survives_as_a_list_of_numbers(rule: Rule) -> None:
    """Which is how a GPU holds it. Every field counts, and none is another's."""
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS], settings)
    numbers = tuner.numbers()
    assert len(numbers) == type(tuner).width(settings.n)
    assert type(tuner).of(numbers, settings.n) == tuner
    counted = [float(number) for number in range(1, len(numbers) + 1)]
    assert type(tuner).of(counted, settings.n).numbers() == counted
    assert sorted(tuner.floats() + tuner.lists()) == sorted(field.name for field in fields(tuner))


@pytest.mark.parametrize(("norm", "factor"), [(3.0, 1.0), (1.0, 1.0 / (2 + 1e-6)), (math.inf, 1.0)])
def test_clipping_by_the_norm_of_all_tuners(norm: float, factor: float) -> None:
    assert clip_factor([0.0, 2.0, 0, 0, 0, 0, 0.0, 2.0, 0, 0, 0, 0, 1.0], norm) == pytest.approx(factor, rel=1e-15)


def test_clipped_gradients_are_what_the_rule_sees() -> None:
    tuner = played([FIRST, *STEPS[:2]])
    outcome = step([tuner], STEPS[2], max_grad_norm=0.5)
    assert outcome.clip == pytest.approx(0.5 / math.sqrt(STEPS[2][1]), rel=1e-5)
    sums = Sums(*STEPS[2])
    seen = sums._replace(dg=outcome.clip * sums.dg, gg=outcome.clip**2 * sums.gg)
    assert step([tuner], seen).tuners == outcome.tuners


def test_scaled_gradients_scale_their_sums() -> None:
    """Engines use this to unscale and clip after taking the sums."""
    d, g, x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    factor = torch.tensor(0.25, dtype=torch.float64)

    def vector(g: Tensor) -> Tensor:
        tensors = {"d": d, "g": g, "x": x, "p": 0.1 * x}
        one = torch.stack([tensors[a].dot(tensors[b]) for a, b in Sums._fields])
        return torch.cat([one, 2 * one, torch.ones(1, dtype=torch.float64)])

    torch.testing.assert_close(with_scaled_gradients(vector(g), factor), vector(factor * g), rtol=1e-15, atol=0)


def test_a_schedule_that_stands_at_zero_at_the_first_move() -> None:
    """One group's schedule is at zero while others train. Steps that are only measured add nothing to its path."""
    tuner = after(played([FIRST]), STEPS[0], lrs=[0.0])
    for lr in (0.0, 0.0, 1.0):
        tuner = after(tuner, (0.0, 4.0, 9.0, 1.0, 0.0, 0.0), lrs=[lr])
    assert tuner.path == pytest.approx(tuner.scale**2, rel=1e-15)
    assert all(map(math.isfinite, tuner.numbers()))
