from __future__ import annotations

import ast
import inspect
import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mechanic_plugins.core import rules, tuner, tuner_state
from mechanic_plugins.core.gradients import GRADIENT_GROWTH, gradient_limit, limited
from mechanic_plugins.core.settings import Rule, Settings
from mechanic_plugins.core.tuner import advance, delta_factor, noted, rescale_to_lr
from mechanic_plugins.core.tuner_state import SCALARS, SUMS, Sums, TunerState, initial_state, keep_where

RULES = get_args(Rule)
SMOOTHED = [(rule, smoothing) for rule in RULES for smoothing in (0.0, 0.9) if (rule, smoothing) != ("theory", 0.9)]
CPU = torch.device("cpu")


def sums(*rows: tuple[float, float, float, float, float], penalty: float = 0.0) -> Sums:
    return Sums.of(torch.tensor([(*row, penalty * row[3]) for row in rows], dtype=torch.float64))


def play(settings: Settings, seen: list[Sums]) -> list[TunerState]:
    """The states after each step."""
    betas = torch.tensor(settings.betas, dtype=torch.float64)
    state = initial_state(settings, tuners=len(seen[0].dg), device=CPU)
    states = []
    for each in seen:
        state = advance(state, each, settings=settings, betas=betas, lr=torch.ones_like(state.lr))
        longest = gradient_limit(state.longest, each.gg.sqrt())[1]
        state = state._replace(longest=longest)
        states.append(state)
    return states


# dg falls and rises in sign, as on a real problem; the first step has delta = 0.
STEPS: list[tuple[float, float, float, float, float]] = [
    (0.0, 4.0, 9.0, 0.0, 0.0),
    (-2.0, 4.0, 9.0, 0.5, 1.0),
    (-3.0, 4.0, 9.0, 1.0, 4.0),
    (1.0, 2.0, 9.0, 1.5, 6.0),
    (-0.5, 1.0, 8.0, -1.5, 6.0),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tuners", [1, 3])
def test_every_rule_keeps_shapes_dtype_and_device(rule: Rule, tuners: int) -> None:
    settings = Settings.from_preset(rule=rule)
    before = initial_state(settings, tuners=tuners, device=CPU)
    after = play(settings, [sums(*[row] * tuners) for row in STEPS])[-1]
    for name, a, b in zip(TunerState._fields, before, after, strict=True):
        columns = 1 if name in SCALARS else 6
        assert a.shape == b.shape == (tuners, columns), name
        assert a.dtype == b.dtype == torch.float64, name


@pytest.mark.parametrize("rule", RULES)
def test_tuners_do_not_know_of_each_other(rule: Rule) -> None:
    """One row for each param group: a sum over the wrong dimension would mix them."""
    settings = Settings.from_preset(rule=rule)
    other = [(-10 * dg, gg, 2 * xx, dx, dd) for dg, gg, xx, dx, dd in STEPS]
    together = play(settings, [sums(a, b) for a, b in zip(STEPS, other, strict=True)])[-1]
    alone = [play(settings, [sums(row) for row in rows])[-1] for rows in (STEPS, other)]
    for name in TunerState._fields:
        assert torch.equal(getattr(together, name), torch.cat([getattr(a, name) for a in alone])), name


@pytest.mark.parametrize(("rule", "smoothing"), SMOOTHED)
def test_the_arguments_are_left_as_they_were(rule: Rule, smoothing: float) -> None:
    """Pure: an engine may ask twice, and a skipped step goes back to the state it had."""
    settings = Settings.from_preset(rule=rule, smoothing=smoothing, max_scale=1e-3)
    betas = torch.tensor(settings.betas, dtype=torch.float64)
    state = play(settings, [sums(row) for row in STEPS[:3]])[-1]
    copy = TunerState(*(t.clone() for t in state))
    once = advance(state, sums(STEPS[3]), settings=settings, betas=betas, lr=torch.ones_like(state.lr))
    again = advance(state, sums(STEPS[3]), settings=settings, betas=betas, lr=torch.ones_like(state.lr))
    assert all(map(torch.equal, state, copy))
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize(("rule", "smoothing"), SMOOTHED)
def test_nothing_happens_while_delta_is_zero(rule: Rule, smoothing: float) -> None:
    """A warm-up that starts at lr 0 has many such steps: no 0 / 0, and no count that starts too early."""
    settings = Settings.from_preset(rule=rule, smoothing=smoothing, s_init="auto")
    states = play(settings, [sums((0.0, 4.0, 9.0, 0.0, 0.0))] * 5)
    assert all(t.isfinite().all() for state in states for t in state)
    assert states[-1].played.item() == 0
    assert states[-1].s_init.item() == 0


@pytest.mark.parametrize("rule", RULES)
def test_weights_at_zero_and_gradients_at_zero_divide_nothing_by_zero(rule: Rule) -> None:
    for row in ((-1.0, 1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0, 1.0)):
        states = play(Settings.from_preset(rule=rule), [sums(row)] * 3)
        assert all(t.isfinite().all() for state in states for t in state), row


@pytest.mark.parametrize("rule", RULES)
def test_a_meta_device_can_play(rule: Rule) -> None:
    """No rule looks at a value: a tensor without any would raise, as a CUDA graph's capture does."""
    meta = torch.device("meta")
    settings = Settings.from_preset(rule=rule, smoothing=0.0 if rule == "theory" else 0.5, max_scale=1.0)
    state = initial_state(settings, tuners=2, device=meta)
    betas = torch.empty(6, dtype=torch.float64, device=meta)
    seen = Sums.of(torch.empty(2, len(SUMS), dtype=torch.float64, device=meta))
    after = advance(state, seen, settings=settings, betas=betas, lr=torch.ones_like(state.lr))
    kept = keep_where(torch.empty((), dtype=torch.bool, device=meta), after, state)
    assert [t.shape for t in kept] == [t.shape for t in state]


def test_the_module_knows_no_optimizer_and_no_distribution() -> None:
    tree = ast.parse("".join(map(inspect.getsource, (rules, tuner, tuner_state))))
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not names & {"item", "tolist", "cpu", "numpy", "distributed", "optim"}


def test_a_masked_step_keeps_every_entry() -> None:
    states = play(Settings.from_preset(rule="theory"), [sums(row) for row in STEPS])
    old, new = states[-2:]
    assert all(map(torch.equal, keep_where(torch.tensor(True), new, old), new))
    assert all(map(torch.equal, keep_where(torch.tensor(False), new, old), old))


def test_a_masked_step_with_nan_keeps_every_entry_too() -> None:
    """The step that is masked away is the one whose sums are not finite: NaN * 0 would leak, a choice does not."""
    settings = Settings()
    old = play(settings, [sums(row) for row in STEPS])[-1]
    betas = torch.tensor(settings.betas, dtype=torch.float64)
    nan = sums((float("nan"),) * 5)
    poisoned = advance(old, nan, settings=settings, betas=betas, lr=torch.ones_like(old.lr))
    assert poisoned.r.isnan().all()
    assert all(map(torch.equal, keep_where(torch.tensor(False), poisoned, old), old))


def test_auto_moves_a_share_of_the_weights_first_and_remembers_it() -> None:
    states = play(Settings(betas=(1.0,), eps=0.0, rule="paper"), [sums(row) for row in STEPS])
    assert states[1].s_init.item() == 3e-3 * (1 + 3.0) / 1.0
    assert states[1].played.item() == states[1].s_init.item()
    assert states[-1].s_init.item() == states[1].s_init.item()


def test_the_optimistic_rule_waits_for_a_second_gradient_and_for_longer_updates() -> None:
    states = play(Settings(), [sums(row) for row in STEPS])
    assert [state.played.item() > 0 for state in states] == [False, False, True, True, True]
    assert states[2].s_init.item() == pytest.approx(3e-3 * (1 + 3.0) / 1.0)  # two updates, of length 2 together
    longer = [*STEPS[:3], (1.0, 2.0, 9.0, 1.5, 36.0)]  # without those two one is left, of length 6
    lowered = play(Settings(), [sums(row) for row in longer])[-1]
    assert lowered.s_init.item() == pytest.approx(3e-3 * (1 + 3.0) / (6.0 / 2))
    hardly_longer = [*STEPS[:3], (1.0, 2.0, 9.0, 1.5, 3.9)]
    assert play(Settings(), [sums(row) for row in hardly_longer])[-1].s_init.item() == states[2].s_init.item()


def test_the_first_bet_expects_the_next_update_to_grow_with_the_gradient() -> None:
    ten_times = (-30.0, 400.0, 9.0, 1.0, 4.0)
    states = play(Settings(), [sums(row) for row in (*STEPS[:2], ten_times)])
    assert states[2].s_init.item() == pytest.approx(3e-3 * (1 + 3.0) / 1.0 / 10)


def test_losses_count_fully_where_the_schedule_has_ended() -> None:
    state = initial_state(Settings(), tuners=1, device=CPU)._replace(lr=torch.tensor([[0.5]]).double())
    weights = [rules.loss_weight(state, torch.tensor([[lr]]).double(), Settings()).item() for lr in (0.5, 0.0625, 0.0)]
    assert weights == pytest.approx([0.1, 0.55, 1.0])


def test_losses_count_fully_where_steps_are_long() -> None:
    lr = torch.ones(1, 1, dtype=torch.float64)
    for played, expected in ((2e-3, 0.1), (0.1, 0.25), (0.2, 1.0), (5.0, 1.0)):  # times the length of the first update
        state = initial_state(Settings(), tuners=1, device=CPU)
        state = state._replace(lr=lr, s_init=3e-3 * lr, played=played * lr)
        assert rules.loss_weight(state, lr, Settings()).item() == pytest.approx(expected)
        assert rules.loss_weight(state, lr, Settings(s_init=3e-3)).item() == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "allowed"), [("normalised", 0.2), ("growing", 0.2), ("signs", 3e-3)])
def test_gains_by_long_steps_count_less(steps: Any, allowed: float) -> None:
    settings, one = Settings(steps=steps), torch.ones(1, 1, dtype=torch.float64)
    state = initial_state(settings, tuners=1, device=CPU)
    for share, expected in ((0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (4.0, 0.0625)):  # of what is allowed
        state = state._replace(s_init=3e-3 * one, played=share * allowed * one)
        assert rules.gain_weight(state, settings).item() == pytest.approx(expected)
        assert rules.gain_weight(state, replace(settings, s_init=3e-3)).item() == 1.0


@pytest.mark.parametrize(("steps", "share"), [("normalised", 0.3), ("growing", 0.5)])
def test_a_loss_beyond_the_usual_size_counts_in_full(steps: Any, share: float) -> None:
    """With a loss of the usual size a tenth of it is taken from the reward, with a larger one all that goes beyond."""
    settings = Settings(betas=(1.0,), s_init=0.1, smoothing=0.0, steps=steps)
    state = play(settings, [sums(row) for row in STEPS[:3]])[-1]
    usual, betas = share * state.m, torch.tensor(settings.betas, dtype=torch.float64)
    rewards = []
    for loss in (0.5, 1.0, 2.0):
        seen = sums((loss * usual.item(), 1.0, 9.0, 0.0, 4.0))
        rewards.append(advance(state, seen, settings=settings, betas=betas, lr=torch.ones_like(state.lr)).r)
    taken = [((state.r - r) / (state.s * usual)).item() for r in rewards]
    assert taken == pytest.approx([0.1 * 0.5, 0.1, 0.1 + 1.0])


def test_the_usual_size_is_of_the_last_hundred_steps_where_steps_grow() -> None:
    assert [rules.recent_bettor(betas) for betas in (Settings().betas, (0.5,), (0.5, 0.9, 0.98))] == [1, 0, 2]
    state = initial_state(Settings(), tuners=1, device=CPU)._replace(m=torch.tensor([[1.0, 2, 3, 4, 5, 6]]).double())
    assert rules.usual_loss(state.m, Settings()).item() == pytest.approx(0.3 * 6)
    assert rules.usual_loss(state.m, Settings(steps="growing")).item() == pytest.approx(0.5 * 2)


@pytest.mark.parametrize(("rule", "counts"), [("optimistic", 1.0), ("paper", 0.0), ("optax", 0.0)])
def test_a_penalty_is_part_of_what_is_minimised(rule: str, counts: float) -> None:
    settings = Settings.from_preset(rule=rule, s_decay=0.0)  # type: ignore[arg-type]
    row = (-3.0, 4.0, 9.0, 2.0, 4.0)
    state = play(settings, [sums(STEPS[0]), sums(row, penalty=0.25)])[-1]
    assert state.h.item() == pytest.approx(-3.0 + counts * 0.25 * 2.0)


def test_an_outlier_is_skipped_a_few_times_and_then_taken() -> None:
    longest, norms = torch.tensor([[1.0]]).double(), torch.tensor(1e6).double()
    seen = []
    for _ in range(8):
        is_outlier, longest = gradient_limit(longest, norms)
        seen.append(bool(is_outlier))
    assert seen == [True] * 4 + [False] * 4
    assert longest.item() == 1e6


def test_a_gradient_that_has_grown_is_taken_in_part() -> None:
    """The first one, of a tuner that has seen none, is taken as it is."""
    longest, norms = torch.tensor([[1.0], [0.0], [4.0]]).double(), torch.tensor([[50.0], [3.0], [4.0]]).double()
    share = limited(longest, norms)
    assert share.flatten().tolist() == pytest.approx([GRADIENT_GROWTH / 50, 1.0, 1.0])
    outliers, longest = gradient_limit(longest, norms, share)
    assert not outliers.any()
    assert longest.flatten().tolist() == pytest.approx([GRADIENT_GROWTH, 3.0, 4.0])


def test_a_bettor_with_a_short_memory_does_not_run_away_as_h_fades() -> None:
    """Near zero loss h is negative and shrinks: without the relative floor the scale grew a hundred millionfold."""
    fading = [(-(0.9**step), 0.81**step, 9.0, 1.0, 4.0) for step in range(150)]
    grown = {}
    for rule in ("optimistic", "paper"):
        settings = Settings(rule=rule, s_init=1e-3, smoothing=0.0, hindsight=0.0, eps=0.0)
        scales = [state.played.item() for state in play(settings, [sums(row) for row in (STEPS[0], *fading)])[1:]]
        grown[rule] = scales[-1] / scales[20]
    assert grown["optimistic"] < 10
    assert grown["paper"] > 1e3 * grown["optimistic"]


def test_a_number_for_s_init_is_taken_as_it_is() -> None:
    states = play(Settings(s_init=0.25), [sums(row) for row in STEPS])
    assert {state.s_init.item() for state in states} == {0.25}


def test_s_decay_pulls_by_the_scale_that_was_played() -> None:
    def h(s_decay: float) -> Tensor:
        states = play(Settings(s_init=0.1, s_decay=s_decay), [sums(row) for row in STEPS[:3]])
        return torch.stack([states[2].h.squeeze(), states[1].played.squeeze()])

    without, _ = h(0.0)
    with_decay, played = h(0.5)
    assert with_decay - without == pytest.approx(0.5 * played.item() * 2.0 * 1.0 / 3.0, rel=1e-12)


def test_the_cap_holds_in_sum_and_keeps_the_shares() -> None:
    free = play(Settings(s_init=1.0), [sums(row) for row in STEPS])
    for cap in (1e-3, 0.05):
        capped = play(Settings(s_init=1.0, max_scale=cap), [sums(row) for row in STEPS])
        assert free[1].played.item() > cap
        assert all(state.played.item() <= cap * (1 + 1e-15) for state in capped)
        torch.testing.assert_close(capped[1].s / capped[1].s.sum(), free[1].s / free[1].s.sum(), rtol=1e-12, atol=0)


def test_a_cap_before_anything_was_bet_does_not_make_nan() -> None:
    state = play(Settings(max_scale=1.0), [sums(STEPS[0])])[-1]
    assert torch.equal(state.s, torch.zeros(1, 6, dtype=torch.float64))


def test_smoothing_plays_a_log_average_that_starts_at_the_first_scale() -> None:
    c = 0.75
    states = play(Settings(s_init=1e-3, smoothing=c, rule="paper"), [sums(row) for row in STEPS])
    assert states[1].played.item() == states[1].s.sum().item()
    for before, after in itertools.pairwise(states[1:]):
        expected = before.played.item() ** c * after.s.sum().item() ** (1 - c)
        assert after.played.item() == pytest.approx(expected, rel=1e-12)


def test_smoothing_does_not_reward_what_was_not_played() -> None:
    """r grows by the played scale times -h, shared among the bettors as they bet."""
    states = play(Settings(betas=(1.0,), s_init=1e-3, s_decay=0.0, smoothing=0.5), [sums(row) for row in STEPS[:3]])
    grown = states[2].r - states[1].r
    assert grown.item() == pytest.approx(3.0 * states[1].played.item(), rel=1e-12)


@pytest.mark.parametrize("hindsight", [0.0, 0.3, 1.0])
def test_hindsight_is_the_share_of_the_way_that_the_weights_go_along_delta(hindsight: float) -> None:
    settings = Settings(s_init=1e-3, smoothing=0.0, hindsight=hindsight)
    states = play(settings, [sums(row) for row in STEPS])
    assert any(a.played.item() > b.played.item() > 0 for a, b in itertools.pairwise(states))
    for before, after in itertools.pairwise(states[1:]):
        moved = after.played * delta_factor(before, after, settings)  # x - x_ref, in units of the old delta
        share = hindsight * after.played + (1 - hindsight) * before.played
        assert moved.item() == pytest.approx(share.item(), rel=1e-14)


@pytest.mark.parametrize(("preset", "kept"), [(None, 0), ("0.1", 1), ("paper", 1)])
def test_the_optimistic_rule_drops_what_it_gathered_before_its_first_scale(preset: str | None, kept: int) -> None:
    """Published rules play all that delta holds."""
    settings = Settings.from_preset(preset, s_init=1e-3)
    states = play(settings, [sums(row) for row in STEPS[:2]])
    assert states[0].played.item() == 0 < states[1].played.item()
    assert delta_factor(states[0], states[1], settings).item() == kept


def test_restated_for_a_higher_lr_nothing_moves_and_everything_follows() -> None:
    settings = Settings(s_init=1e-3)
    state = play(settings, [sums(row) for row in STEPS[:3]])[-1]._replace(lr=torch.tensor([[0.25]]).double())
    new, known, fall = rescale_to_lr(state, sums(STEPS[3]), torch.tensor([[1.0]]).double())
    assert (fall.item(), new.lr.item()) == (0.25, 1.0)
    before, after = state.played * sums(STEPS[3]).dg, new.played * known.dg  # h times the scale
    assert after.item() == pytest.approx(before.item(), rel=1e-14)
    # Delta is four times as long: so are m and the root of v, and the bets are a quarter.
    assert torch.equal(new.m, 4 * state.m)
    assert torch.equal(new.v, 16 * state.v)
    assert torch.equal(new.s, state.s / 4)
    assert torch.equal(new.r, state.r)
    assert known.dd.item() == 16 * STEPS[3][4]


@pytest.mark.parametrize("lr", [0.0, 0.1, 0.25, math.nan])
def test_an_lr_that_is_not_the_highest_restates_nothing(lr: float) -> None:
    state = play(Settings(s_init=1e-3), [sums(row) for row in STEPS[:3]])[-1]
    state = state._replace(lr=torch.tensor([[0.25]]).double())
    new, known, fall = rescale_to_lr(state, sums(STEPS[3]), torch.tensor([[lr]]).double())
    assert fall.item() == 1
    assert all(map(torch.equal, new, state))
    assert all(map(torch.equal, known, sums(STEPS[3])))


def test_the_first_lr_restates_nothing() -> None:
    state = initial_state(Settings(), tuners=1, device=CPU)
    new, _, fall = rescale_to_lr(state, sums(STEPS[1]), torch.tensor([[0.1]]).double())
    assert (fall.item(), new.lr.item()) == (1.0, pytest.approx(0.1))


def test_an_lr_of_nan_is_not_remembered() -> None:
    """While the scale is frozen nothing else looks at it: it would be the highest one for ever."""
    state = initial_state(Settings(), tuners=1, device=CPU)._replace(lr=torch.tensor([[0.25]]).double())
    assert noted(state, torch.tensor([[math.nan]]).double()).lr.item() == 0.25
    assert noted(state, torch.tensor([[0.5]]).double()).lr.item() == 0.5


def test_scaled_gradients_scale_their_sums() -> None:
    """What engines use to unscale and clip after the sums were taken."""
    d, g, x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    factor = torch.tensor(0.25, dtype=torch.float64)

    def vector(g: Tensor) -> Tensor:
        products = {"d": d, "g": g, "x": x, "p": 0.1 * x}
        one = torch.stack([products[a].dot(products[b]) for a, b in SUMS])
        return torch.cat([one, 2 * one, torch.ones(1, dtype=torch.float64)])

    scaled = tuner_state.with_scaled_gradients(vector(g), factor)
    torch.testing.assert_close(scaled, vector(factor * g), rtol=1e-15, atol=0)
