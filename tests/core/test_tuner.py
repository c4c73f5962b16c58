"""The tuner's step in plain floats, without an optimizer: what it depends on and what it must not depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from reference_default import PRIOR
from torch import Tensor

from mechanic_plugins.core.row import SCALARS, VECTORS, Products, Row
from mechanic_plugins.core.settings import Rule, Settings
from mechanic_plugins.core.tuner import SUMS, Decision, clip_factor, decide
from mechanic_plugins.core.tuner_state import TunerState, initial_state, with_scaled_gradients

RULES = get_args(Rule)
CPU = torch.device("cpu")
FIRST = (0.0, 4.0, 3.0, 2.0, 0.0, 4.0)
"""The sums of the first step: |g| = 2, two weights with a mean root of 1.5, four nonzero elements of the gradient."""
STEPS: list[tuple[float, ...]] = [
    (-2.0, 4.0, 9.0, 0.5, 1.0, 0.0),
    (-3.0, 4.0, 9.0, 1.0, 4.0, 0.0),
    (1.0, 2.0, 9.0, 1.5, 6.0, 0.25),
    (-0.5, 1.0, 8.0, -1.5, 6.0, 0.0),
]
"""The sign of dg changes, as on a real problem."""


def rows_of(settings: Settings, tuners: int = 1) -> list[Row]:
    return initial_state(settings, tuners=tuners, device=CPU).rows


def step(rows: list[Row], *sums: Sequence[float], settings: Settings | None = None, **options: Any) -> Decision:
    lrs = options.pop("lrs", [1.0] * len(rows))
    return decide(rows, [number for each in sums for number in each] + [1.0], lrs, settings or Settings(), **options)


def played(steps: Sequence[Sequence[float]], settings: Settings | None = None, lr: float = 1.0) -> Row:
    settings = settings or Settings()
    rows = rows_of(settings)
    for sums in steps:
        step(rows, sums, settings=settings, lrs=[lr])
    return rows[0]


def walk(seed: int, steps: int, lr: float = 1.0, factor: float = 1.0) -> list[float]:
    """The scales of an SGD run on a noisy quadratic of 8 weights, computed in plain floats."""
    generator = np.random.default_rng(seed)
    x_0, curvature = generator.normal(size=8), np.logspace(-2, 0, 8)
    x, waiting, rows, scales = x_0.copy(), np.zeros(8), rows_of(Settings()), []
    for t in range(steps):
        g = factor * (curvature * x + generator.normal(size=8))
        d = x - x_0 if rows[0].played > 0 else waiting
        sums = [d @ g, g @ g, np.cbrt(np.abs(x)).sum() if t == 0 else x @ x, 8 if t == 0 else d @ x]
        outcome = step(rows, [*sums, d @ d, 8 if t == 0 else 0], lrs=[lr])
        waiting = waiting - lr * g
        x = x - outcome.afters[0] * lr * g
        scales.append(outcome.afters[0] * lr * factor)  # normalised to a factor and lr of 1
    return scales


def test_the_default_rule_by_hand() -> None:
    """With lr 0.5: size = (3 / 2)^3, of 4 and then 9 elements; U = 2 / 0.5, then sqrt(10)."""
    rows, s_1 = rows_of(Settings()), PRIOR * (3 / 2) ** 3 * 9**0.375 / 2
    assert step(rows, FIRST, lrs=[0.5]).afters == [0.0]
    outcome = step(rows, STEPS[0], lrs=[0.5])
    assert outcome == Decision(True, False, 1.0, [0.0], [pytest.approx(s_1, rel=1e-15)])
    third = step(rows, (-3.0 * s_1, 4.0, 9.0, 1.0, s_1**2, 0.0), lrs=[0.5])
    assert third.afters == pytest.approx([s_1 * 4 / math.sqrt(10) * math.exp(3 / math.sqrt(40))], rel=1e-14)
    assert rows[0].h == pytest.approx(-3.0, rel=1e-15)
    assert (rows[0].travelled, rows[0].elapsed) == pytest.approx((0.5 * (s_1 + third.afters[0]), 1.0))


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e40, 1e100])
def test_the_scale_of_the_loss_does_not_matter(factor: float) -> None:
    assert walk(0, 200, factor=factor) == pytest.approx(walk(0, 200), rel=1e-9)


@pytest.mark.parametrize("lr", [1e-8, 1e6])
def test_the_base_lr_does_not_matter(lr: float) -> None:
    assert walk(0, 200, lr=lr) == pytest.approx(walk(0, 200), rel=1e-9)


def test_it_is_a_function_of_its_inputs_bit_for_bit() -> None:
    settings = Settings(scope="group", max_scale=3.0)
    rows = rows_of(settings, 2)
    step(rows, FIRST, FIRST, settings=settings)
    for sums in STEPS:
        again = copy.deepcopy(rows)
        assert step(rows, sums, STEPS[0], settings=settings) == step(again, sums, STEPS[0], settings=settings)
        assert rows == again


@pytest.mark.parametrize("rule", RULES)
def test_tuners_do_not_know_of_each_other(rule: Rule) -> None:
    """Each param group has its own row."""
    settings = Settings(rule=rule)
    other = [(-10 * dg, gg, 2 * xx, dx, dd, dp) for dg, gg, xx, dx, dd, dp in (FIRST, *STEPS)]
    together = rows_of(settings, 2)
    for a, b in zip((FIRST, *STEPS), other, strict=True):
        step(together, a, b, settings=settings)
    assert together == [played((FIRST, *STEPS), settings), played(other, settings)]


@pytest.mark.parametrize("rule", ["relative", "paper", "theory"])
def test_nothing_is_played_before_there_is_a_delta(rule: Rule) -> None:
    """A warm-up from lr 0 has many such steps: there must be no 0 / 0, and counting must not start too early."""
    first = FIRST if rule == "relative" else (0.0, 4.0, 9.0, 0.0, 0.0, 0.0)
    row = played([first, *[(0.0, 4.0, 9.0, 0.0, 0.0, 0.0)] * 4], Settings(rule=rule))
    assert row.played == 0
    assert all(map(math.isfinite, row.numbers()))


@pytest.mark.parametrize("rule", RULES)
def test_weights_at_zero_and_gradients_at_zero_divide_nothing_by_zero(rule: Rule) -> None:
    for sums in ((-1.0, 1.0, 0.0, 0.0, 1.0, 0.0), (0.0,) * 6, (0.0, 0.0, 1.0, 1.0, 1.0, 0.0)):
        assert all(map(math.isfinite, played([sums] * 3, Settings(rule=rule)).numbers())), sums


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_held_keeps_the_scale(rule: Rule) -> None:
    settings = Settings(rule=rule)
    row = played([FIRST, *STEPS[:2]], settings)
    held = copy.deepcopy(row)
    outcome = step([held], STEPS[2], settings=settings, hold=True)
    assert outcome.applied
    walked = {"longest", "path", "travelled", "elapsed"}
    changed = {name for name in (*VECTORS, *SCALARS) if getattr(row, name) != getattr(held, name)}
    assert changed <= walked
    assert held.played == row.played


@pytest.mark.parametrize("sums", [(math.nan, *STEPS[0][1:]), (*STEPS[0][:4], math.inf, 0.0)])
def test_sums_that_are_not_finite_skip_the_step(sums: tuple[float, ...]) -> None:
    rows = [played([FIRST, *STEPS])]
    before = copy.deepcopy(rows)
    assert step(rows, sums)[:2] == (False, True)
    assert rows == before


def test_a_step_without_any_gradient_is_not_made_and_not_skipped() -> None:
    rows = [played([FIRST, *STEPS])]
    before = copy.deepcopy(rows)
    assert decide(rows, [0.0] * 7, [1.0], Settings())[:2] == (False, False)
    assert rows == before


def test_an_outlier_of_one_tuner_skips_the_step_of_all() -> None:
    rows = rows_of(Settings(), 2)
    step(rows, FIRST, FIRST)
    before = copy.deepcopy(rows)
    assert step(rows, (0.0, 4e4 + 1, 0.0, 0.0, 0.0, 0.0), (0.0, 9.0, 0.0, 0.0, 0.0, 0.0))[:2] == (False, True)
    assert [row.longest for row in rows] == [200.0, 3.0]
    assert [(row.gradients, row.path) for row in rows] == [(row.gradients, row.path) for row in before]


def test_outliers_are_skipped_a_few_times_only() -> None:
    """Gradients may have grown for good, or belong to a rare class that comes every 5,000 steps."""
    rows = [played([FIRST, *STEPS])]
    skipped = [step(rows, (0.0, 1e20, 9.0, 0.0, 1.0, 0.0)).skipped for _ in range(20)]
    assert skipped == sorted(skipped, reverse=True)
    assert 3 <= sum(skipped) <= 5

    rows, skips = [played([(*FIRST[:1], 1e-10, *FIRST[2:])])], 0
    for t in range(50_001):
        gg = 1.0 if t % 5_000 == 0 else 1e-10
        skips += step(rows, (0.0, gg, 9.0, 0.0, 1.0, 0.0)).skipped
    assert 1 <= skips <= 2


def test_published_rules_skip_no_outlier() -> None:
    settings = Settings(rule="paper")
    assert step([played([FIRST, *STEPS], settings)], (0.0, 1e20, 9.0, 0.0, 1.0, 0.0), settings=settings).applied


def test_a_penalty_is_part_of_what_is_minimised_by_the_default_rule_alone() -> None:
    penalised = (-3.0, 4.0, 9.0, 2.0, 4.0, 0.5)
    row = played([FIRST, STEPS[0]])
    scale = row.played
    step([row], penalised)
    assert row.h == pytest.approx(-2.5 / scale, rel=1e-15)
    assert played([FIRST, STEPS[0], penalised], Settings(rule="paper", s_decay=0.0)).h == -3.0


def test_s_decay_pulls_by_the_scale_that_was_played() -> None:
    settings = [Settings(rule="paper", s_init=0.1, s_decay=decay) for decay in (0.0, 0.5)]
    without, with_decay = (played([FIRST, *STEPS[:2]], each).h for each in settings)
    before = played([FIRST, STEPS[0]], settings[1]).played
    assert with_decay - without == pytest.approx(0.5 * before * 2.0 * 1.0 / 3.0, rel=1e-12)


@pytest.mark.parametrize("rule", ["relative", "paper", "experiments", "optax"])
@pytest.mark.parametrize("cap", [1e-6, 1e-9])
def test_the_cap_holds_in_sum_and_keeps_the_shares(rule: Rule, cap: float) -> None:
    start = {} if rule == "relative" else {"s_init": 1.0}
    steps = [(*each[:4], 1.0 if each is STEPS[0] else 0.0, each[5]) for each in STEPS]  # same length for both
    free, capped = (played([FIRST, *steps], Settings(rule=rule, max_scale=at, **start)) for at in (None, cap))
    assert free.played > cap
    assert capped.played == pytest.approx(cap, rel=1e-15)
    first = [played([FIRST, STEPS[0]], Settings(rule=rule, max_scale=at, **start)) for at in (None, cap)]
    assert np.divide(first[1].s, cap) == pytest.approx(np.divide(first[0].s, first[0].played), rel=1e-12)


def test_the_evidence_moves_the_scale_by_a_bounded_factor() -> None:
    """Holds however long the evidence agrees, as long as updates keep the length of the first.

    There are so many weights that ten thousand steps do not take them twenty times their size from the start.
    """
    for sign, bound in ((-1.0, math.exp(3)), (1.0, math.exp(-3))):
        rows = [played([(*FIRST[:5], 1e16), STEPS[0]])]
        once, length = rows[0].played, rows[0].length
        for _ in range(10_000):
            step(rows, (sign, 1.0, 9.0, 0.0, length**2 * rows[0].path, 0.0))
        assert rows[0].length == pytest.approx(length, rel=1e-9)
        assert rows[0].played / once == pytest.approx(bound, rel=0.1)


@pytest.mark.parametrize(("far", "times"), [(0.99, 1.0), (5.0, 5.0)])
def test_far_from_the_start_the_distance_is_the_size(far: float, times: float) -> None:
    """From twenty times the weights' size on, which is how far the evidence alone reaches."""
    row = played([FIRST, *STEPS[:2]])
    larger = row.copy()
    larger.size *= times
    square = row.touched * (far * math.exp(3) * row.size) ** 2
    for each in (row, larger):
        step([each], (-1.0, 4.0, 9.0, 0.0, square, 0.0))
    assert row.played == pytest.approx(larger.played, rel=1e-12)


def test_a_scale_taken_over_from_another_rule_knows_no_distance() -> None:
    """There, size is in units that have nothing to do with the weights."""
    rows = [played([FIRST, *STEPS[:2]]) for _ in range(2)]
    for row, square in zip(rows, (1.0, 1e12), strict=True):
        row.path = -1.0
        step([row], (-1.0, 4.0, 9.0, 0.0, square, 0.0))
    assert rows[0].played == rows[1].played


def test_a_walk_that_goes_all_ways_keeps_the_scale() -> None:
    """A random walk of n steps covers sqrt(n) steps; a straight one covers n, and its scale falls as 1 / sqrt(n)."""
    scales = {}
    for way in (0.5, 1.0):
        rows = [played([FIRST, STEPS[0]])]
        once, length, travelled = rows[0].played, rows[0].length, 0.0
        for _ in range(400):
            travelled += rows[0].played ** (1 / way)
            step(rows, (0.0, 1.0, 9.0, 0.0, (length * travelled**way) ** 2, 0.0))
        scales[way] = rows[0].played / once
    assert scales[0.5] == pytest.approx(1, rel=1e-9)
    assert 1 / 30 < scales[1.0] < 1 / 10


@pytest.mark.parametrize("steps", [400, 8_000])
def test_the_window_of_the_evidence_is_the_same_in_a_long_run(steps: int) -> None:
    """Two hundred steps of opposite evidence outweigh all earlier evidence, and twenty do not."""
    rows, signs = [played([FIRST, STEPS[0]])], []
    for t in range(steps + 200):
        direction = -1.0 if t < steps else 1.0
        step(rows, (direction, 1.0, 9.0, 0.0, 1e-6, 0.0))
        signs.append(rows[0].r[0] > 0)
    assert signs[: steps + 20] == [True] * (steps + 20)
    assert not signs[-1]


def test_evidence_of_an_earlier_rule_is_bounded_too() -> None:
    """Checkpoints from when the window grew with the run hold thousands of steps: that would give an exponent of 10."""
    row = played([FIRST, *STEPS[:2]])
    before, row.r, row.v, row.m = row.copy(), [5000.0], [5000.0], [5000.0]
    for each in (row, before):
        step([each], (0.0, 1.0, 9.0, 0.0, 1.0, 0.0))
    assert row.played / before.played < math.exp(3)


def test_steps_that_hardly_move_prove_little() -> None:
    """At a thousandth of the run's mean scale, evidence counts a thousandth, so that a fallen scale can rise again."""
    row = played([FIRST, *STEPS[:2]])
    row.played, before = row.travelled / row.elapsed / 1000, row.v[0]
    step([row], (1.0, 1.0, 9.0, 0.0, row.length**2 * row.path, 0.0))
    assert row.v[0] == pytest.approx(before * (1 - 1e-3 / 40) + 1e-3, rel=1e-12)


def test_rows_survive_the_table() -> None:
    settings = Settings(rule="theory")
    rows = [played([FIRST, *STEPS], settings), played([FIRST, *STEPS[:2]], settings)]
    state = TunerState(settings.n, CPU, rows=rows, counts=(7.0, 2.0))
    again = state.with_flat(state.flat)
    assert (again.rows, again.counts, len(again)) == (rows, (7.0, 2.0), 2)
    for name in VECTORS:
        assert state.column(name).tolist() == [getattr(row, name) for row in rows]
    for name in SCALARS:
        assert state.column(name)[:, 0].tolist() == [getattr(row, name) for row in rows]


@pytest.mark.parametrize(("norm", "factor"), [(None, 1.0), (3.0, 1.0), (1.0, 1.0 / (2 + 1e-6)), (math.inf, 1.0)])
def test_clipping_by_the_norm_of_all_tuners(norm: float | None, factor: float) -> None:
    assert clip_factor([0.0, 2.0, 0, 0, 0, 0, 0.0, 2.0, 0, 0, 0, 0, 1.0], norm) == pytest.approx(factor, rel=1e-15)


def test_clipped_gradients_are_what_the_rule_sees() -> None:
    rows, clipped = [played([FIRST, *STEPS[:2]])], [played([FIRST, *STEPS[:2]])]
    outcome = step(clipped, STEPS[2], max_grad_norm=0.5)
    products = Products(*STEPS[2])
    seen = products._replace(dg=outcome.clip * products.dg, gg=outcome.clip**2 * products.gg)
    step(rows, seen)
    assert clipped == rows


def test_scaled_gradients_scale_their_sums() -> None:
    """Engines use this to unscale and clip after taking the sums."""
    d, g, x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    factor = torch.tensor(0.25, dtype=torch.float64)

    def vector(g: Tensor) -> Tensor:
        products = {"d": d, "g": g, "x": x, "p": 0.1 * x}
        one = torch.stack([products[a].dot(products[b]) for a, b in SUMS])
        return torch.cat([one, 2 * one, torch.ones(1, dtype=torch.float64)])

    torch.testing.assert_close(with_scaled_gradients(vector(g), factor), vector(factor * g), rtol=1e-15, atol=0)


def test_a_schedule_that_stands_at_zero_at_the_first_move() -> None:
    """One group's schedule is at zero while others train. Steps that are only measured add nothing to its path."""
    rows = [played([FIRST])]
    step(rows, STEPS[0], lrs=[0.0])
    for _ in range(2):
        step(rows, (0.0, 4.0, 9.0, 1.0, 0.0, 0.0), lrs=[0.0])
    step(rows, (0.0, 4.0, 9.0, 1.0, 0.0, 0.0), lrs=[1.0])
    assert rows[0].path == pytest.approx(rows[0].played ** 2, rel=1e-15)
    assert all(map(math.isfinite, rows[0].numbers()))
