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
from torch import Tensor

from mechanic_plugins.rule.decide import Decision, clip_factor, decide, new_tuners
from mechanic_plugins.rule.default import CLIP, TARGET, DefaultTuner, is_due
from mechanic_plugins.rule.settings import Rule, Settings
from mechanic_plugins.rule.sums import Sums, with_scaled_gradients

RULES = get_args(Rule)
PUBLISHED = [rule for rule in RULES if rule != "relative"]
FIRST = (0.0, 4.0, 4.0, 0.0, 0.0, 0.0)
"""The sums of the first step: |g| = 2, |x| = 2."""
CHANGE = 0.25
"""What `played` measures: how much a step changes the median layer, per unit of scale * lr."""
STEPS: list[tuple[float, ...]] = [
    (-2.0, 4.0, 9.0, 0.5, 1.0, 0.0),
    (-3.0, 4.0, 9.0, 1.0, 4.0, 0.0),
    (1.0, 2.0, 9.0, 1.5, 6.0, 0.25),
    (-0.5, 1.0, 8.0, -1.5, 6.0, 0.0),
]
"""The sign of dg changes, as on a real problem."""
COUNTED = {"steps", "skipped", "top_lr", "g_squares", "g_count", "sum_scale_lr", "sum_lr"}
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


def measured(tuners: list[Any], change: float = CHANGE) -> list[Any]:
    """The tuners, which know what the last step has changed."""
    for tuner in tuners:
        if isinstance(tuner, DefaultTuner):
            assert tuner.take_measurement(change)
    return tuners


def played(steps: Sequence[Sequence[float]], settings: Settings | None = None, lr: float = 1.0) -> Any:
    [tuner] = new(settings)
    for sums in steps:
        [tuner] = measured([after(tuner, sums, settings, lrs=[lr])])
    return tuner


def changed(before: Any, now: Any) -> set[str]:
    """The fields that differ, bit for bit."""
    return {field.name for field in fields(before) if getattr(before, field.name) != getattr(now, field.name)}


def walk(seed: int, steps: int, lr: float = 1.0, factor: float = 1.0) -> list[float]:
    """The scales of an SGD run on a noisy quadratic of 8 weights, computed in plain floats."""
    generator = np.random.default_rng(seed)
    x_0, curvature = generator.normal(size=8), np.logspace(-2, 0, 8)
    x, tuners, scales = x_0.copy(), new(), []
    for t in range(steps):
        g = factor * (curvature * x + generator.normal(size=8))
        d = x - x_0
        outcome = step(tuners, [d @ g, g @ g, x @ x, d @ x, d @ d, 0.0], lrs=[lr])
        tuners, scale = outcome.tuners, outcome.new_scales[0]
        x = x - scale * lr * outcome.clip * g
        if is_due(t + 1):
            tuners[0].take_measurement(outcome.clip * np.linalg.norm(g) / np.linalg.norm(x))
        scales.append(scale * lr * factor)  # normalised to a factor and lr of 1
    return scales


def test_the_default_rule_by_hand() -> None:
    """With lr 0.5, and a change of 0.25 per unit of scale * lr."""
    first = step(new(), FIRST, lrs=[0.5])
    assert (first.is_made, first.clip, first.old_scales, first.new_scales) == (True, 1.0, [0.0], [0.0])
    second = step(measured(first.tuners), (0.0, 4.0, 9.0, 0.0, 0.0, 0.0), lrs=[0.5])
    s_1 = 0.02 * 0.1 / (0.25 * 0.5)  # the second of twenty gradients
    assert second.new_scales == pytest.approx([s_1], rel=1e-15)
    # z = 3 s_1 is the first, so q = 1. The gradients have grown beyond those at the measurement.
    third = step(measured(second.tuners), (-3.0 * s_1, 36.0, 9.0, 1.0, s_1**2, 0.0), lrs=[0.5])
    evidence = 0.15 * (1 - 0.1) / (0.1 + 60)
    growth = (4 * (39 / 40) ** 2 + 4 * 39 / 40 + 36) / ((39 / 40) ** 2 + 39 / 40 + 1) / 4
    s_2 = 0.02 * 0.15 / (0.25 * 0.5 * math.sqrt(growth)) * math.exp(evidence)
    assert third.new_scales == pytest.approx([s_2], rel=1e-14)
    [tuner] = third.tuners
    assert tuner.signal == pytest.approx(-3.0, rel=1e-15)
    assert (tuner.sum_scale_lr, tuner.sum_lr, tuner.steps) == pytest.approx((0.5 * (s_1 + s_2), 1.0, 3))
    assert (tuner.evidence, tuner.full_steps, tuner.gradients) == pytest.approx((evidence, 0.25, 3), rel=1e-14)


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
        together = measured(step(together, a, b, settings=settings).tuners)
    assert together == [played((FIRST, *STEPS), settings), played(other, settings)]


@pytest.mark.parametrize("rule", ["relative", "paper", "theory"])
def test_nothing_is_played_before_there_is_a_delta(rule: Rule) -> None:
    """A warm-up from lr 0 has many such steps: there must be no 0 / 0, and counting must not start too early."""
    tuner = new(Settings(rule=rule))[0]
    for _ in range(5):
        tuner = after(tuner, (0.0, 4.0, 9.0, 0.0, 0.0, 0.0), Settings(rule=rule))
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


@pytest.mark.parametrize("count", [1, 2])
def test_outliers_are_shortened_for_all_tuners_alike(count: int) -> None:
    """To five times the last ones, in the norm of all gradients, which is what the base is stepped with too."""
    tuners = new(count=count)
    for _ in range(5):
        tuners = measured(step(tuners, *[FIRST] * count).tuners)
    outlier = (0.5, 1e8, 4.0, 0.0, 0.1, 0.0)
    outcome = step(tuners, outlier, *[FIRST] * (count - 1))
    factor = CLIP * math.sqrt(4 * count) / math.sqrt(1e8 + 4 * (count - 1))
    assert outcome.clip == pytest.approx(factor, rel=1e-14)
    shortened = [(factor * dg, factor**2 * gg, *rest) for dg, gg, *rest in (outlier, *[FIRST] * (count - 1))]
    plain = step(tuners, *shortened)
    assert plain.clip == 1
    for a, b in zip(outcome.tuners, plain.tuners, strict=True):
        assert a.numbers() == pytest.approx(b.numbers(), rel=1e-12)


def test_gradients_that_stay_long_are_soon_taken_as_they_are() -> None:
    tuner, clips = played([FIRST] * 100), []
    for _ in range(30):
        outcome = step([tuner], (0.0, 4e4, 9.0, 0.0, 1.0, 0.0))
        [tuner] = outcome.tuners
        clips.append(outcome.clip)
    assert clips == sorted(clips)
    assert clips[0] == pytest.approx(0.05, rel=1e-9)
    assert clips.index(1.0) < 20


def test_a_first_gradient_of_a_tuner_is_not_judged() -> None:
    tuners = [played([FIRST]), *new()]
    assert step(tuners, FIRST, (0.0, 1e20, 9.0, 0.0, 0.0, 0.0)).clip == 1
    assert step(tuners, (0.0, 1e20, 9.0, 0.0, 0.0, 0.0), (0.0,) * 6).clip < 1


@pytest.mark.parametrize("rule", PUBLISHED)
def test_published_rules_shorten_no_outlier(rule: Rule) -> None:
    settings = Settings(rule=rule)
    tuner = played([FIRST, *STEPS], settings)
    outcome = step([tuner], (0.0, 1e20, 9.0, 0.0, 1.0, 0.0), settings=settings)
    assert (outcome.is_made, outcome.clip) == (True, 1.0)


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


@pytest.mark.parametrize(("sign", "power"), [(-1.0, 0.9), (1.0, -1.1)])
def test_evidence_that_agrees_moves_the_scale_by_a_power_of_time(sign: float, power: float) -> None:
    """E grows by (1 - 0.1) / (n + 60), so exp(E) as (n + 60)^0.9."""
    tuner = played([FIRST] * 30)
    scales, counts = [], []
    for _ in range(10_000):
        tuner = after(tuner, (sign, 4.0, 9.0, 0.0, 0.0, 0.0))
        scales.append(tuner.scale)
        counts.append(tuner.full_steps + 60)
    slope = math.log(scales[-1] / scales[99]) / math.log(counts[-1] / counts[99])
    assert slope == pytest.approx(power, rel=1e-3)


def test_noise_moves_the_scale_little() -> None:
    """Its sum is bounded, and TOP alone moves the scale by a tenth's power of time."""
    random = np.random.default_rng(0)
    tuner = played([FIRST] * 30)
    for _ in range(10_000):
        tuner = after(tuner, (random.normal(), 4.0, 9.0, 0.0, 0.0, 0.0))
    assert tuner.evidence == pytest.approx(-0.1 * math.log(10_000 / 80), abs=0.3)


def test_a_schedule_that_falls_lifts_the_scale_until_it_rises_again() -> None:
    tuner = played([FIRST] * 30)
    high = tuner.full_steps + 60
    for _ in range(100):
        tuner = after(tuner, FIRST, lrs=[0.5])
    assert tuner.bonus == pytest.approx(0.6 * math.log((high + 50) / high), rel=0.01)
    assert tuner.scale == pytest.approx(TARGET / CHANGE * math.exp(tuner.evidence + tuner.bonus), rel=1e-12)
    assert after(tuner, FIRST, lrs=[1 - 1e-9]).bonus == 0  # rounding is no fall


def test_measurements_are_averaged_over_the_steps() -> None:
    """Each stands for the steps since the one before."""
    tuner = played([FIRST] * 30)
    before, kept = tuner.full_steps, tuner.change_square
    for _ in range(5):
        tuner = after(tuner, FIRST)
    assert tuner.take_measurement(2.0)
    assert tuner.change_square == pytest.approx((before * kept + 5 * 4.0) / (before + 5), rel=1e-12)
    assert tuner.measured == tuner.full_steps


@pytest.mark.parametrize(("times", "may_stay"), [(9.9, True), (10.1, False)])
def test_an_absurdly_long_step_may_not_stay(times: float, may_stay: bool) -> None:
    tuner = after(played([FIRST] * 5), FIRST)
    assert tuner.take_measurement(times * CHANGE) is may_stay
    if not may_stay:
        assert tuner.change_square == pytest.approx((times * CHANGE) ** 2, rel=1e-15)
        assert (tuner.sum_scale_lr, tuner.sum_lr) == (0, 0)


@pytest.mark.parametrize("change", [0.0, math.nan, math.inf])
def test_a_change_that_is_none_is_not_taken_in(change: float) -> None:
    tuner = after(played([FIRST] * 5), FIRST)
    before = tuner.copy()
    assert tuner.take_measurement(change)
    assert tuner == before


def test_a_step_without_a_gradient_measures_nothing() -> None:
    """AdamW's decay would: the first real step was then a hundred times too long."""
    tuner = after(new()[0], (0.0, 0.0, 4.0, 0.0, 0.0, 0.0))
    assert tuner.take_measurement(0.01)
    assert tuner.change_square == 0


def test_what_waits_for_its_first_measurement() -> None:
    tuner = new()[0]
    assert not tuner.waits_for_measurement
    tuner = after(tuner, FIRST, lrs=[0.0])
    assert not tuner.waits_for_measurement  # held at 0 so far
    tuner = after(tuner, FIRST)
    assert tuner.waits_for_measurement
    measured([tuner])
    assert not tuner.waits_for_measurement


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
    """One group's schedule is at zero while others train."""
    tuner = after(played([FIRST]), STEPS[0], lrs=[0.0])
    for lr in (0.0, 0.0, 1.0):
        tuner = after(tuner, (0.0, 4.0, 9.0, 1.0, 0.0, 0.0), lrs=[lr])
    assert all(map(math.isfinite, tuner.numbers()))
    assert tuner.full_steps == pytest.approx(5 / 20)  # the fifth gradient's weight alone
