"""Tests the references against steps worked out by hand and records of the published implementations."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import RULES, Reference, Tuner
from reference_default import Default
from torch import Tensor

DATA = Path(__file__).parent / "data"


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sgd(lr: float = 1.0, **kwargs: Any) -> Any:
    return lambda copies: torch.optim.SGD(copies, lr=lr, foreach=False, **kwargs)


def one_weight(rule: str, **kwargs: Any) -> Reference:
    """One weight at 2, plain SGD with lr 1 (so u = -g), one beta of 0.5, s_init 0.1, no lambda, no eps."""
    settings = {"betas": (0.5,), "s_init": 0.1, "s_decay": 0.0, "eps": 0.0, "normalize_lr": False, "rule": rule}
    return Reference([vector(2.0)], sgd(), **{**settings, **kwargs})


def play(reference: Reference, *gradients: float) -> list[tuple[float, float]]:
    """Returns (s, x) after each step."""
    trace = []
    for g in gradients:
        reference.step([vector(g)])
        trace.append((float(reference.vectors("s")[0]), reference.x[0].item()))
    return trace


def test_paper_by_hand() -> None:
    # g = -1:  Delta = 0, so h = 0 and s = 0; u = 1, Delta = 1, x = 2.
    # g = -4:  h = 1 * -4, m = 4, v = 16, r = 0, s = 0.1 * 4 / 4 = 0.1; Delta = 5, x = 2 + 0.1 * 5.
    # g = -2:  h = 5 * -2, m = 10, v = 16 / 4 + 100 = 104, r = 0.1 * 10 = 1, s = (1 + 1) / sqrt(104); Delta = 7.
    # g = 3:   h = 21, m = 21, v = 26 + 441 = 467, r = max(0, 0.5 - 21 s) = 0, s = 2.1 / sqrt(467); Delta = 4.
    s_3, s_4 = 2 / math.sqrt(104), 2.1 / math.sqrt(467)
    reference = one_weight("paper")
    assert play(reference, -1, -4, -2, 3) == [
        pytest.approx(pair, rel=1e-15) for pair in [(0, 2), (0.1, 2.5), (s_3, 2 + 7 * s_3), (s_4, 2 + 4 * s_4)]
    ]
    assert [reference.vectors(name)[0] for name in "rmv"] == [0, 21, 467]


def test_paper_with_two_betas_and_eps_by_hand() -> None:
    # As above with betas 0.5 and 1 and eps 1. Second step: both s = (0.1 * 4 / 2) / (4 + 1) = 0.04, x = 2 + 0.08 * 5.
    # Third step: v = 104 and 116, r = 0.04 * 10, W = 0.1 * 10 / 2 + 0.4 = 0.9.
    reference = one_weight("paper", betas=(0.5, 1.0), eps=1.0)
    play(reference, -1, -4)
    assert reference.x[0].item() == pytest.approx(2.4, rel=1e-15)
    play(reference, -2)
    assert reference.vectors("s") == pytest.approx([0.9 / (math.sqrt(104) + 1), 0.9 / (math.sqrt(116) + 1)], rel=1e-15)


def test_experiments_and_optax_by_hand() -> None:
    # eps = 1. g = -1: h = 0, m = 1, v = 0, r = 0, s = 0.1 * 1 / 1; Delta = 1, x = 2 + 0.1.
    # g = -4: h = -4, m = 5, v = 16. experiments: r = 0.1 * 4, s = (0.5 + 0.4) / 5 = 0.18; Delta = 5, x = 2.9.
    #         optax clips h to the old m, 1: r = 0.1, s = (0.5 + 0.1) / 5 = 0.12; x = 2.6.
    # g = 2:  h = 10, m = 11, v = 104. r = 0.2 - 1.8 = -1.6 is kept; optax: r = 0.05 - 0.12 * 5 = -0.55. The wealth is
    #         0.1 * 11 in both, s = 1.1 / (sqrt(104) + 1); Delta = 3.
    last = 1.1 / (math.sqrt(104) + 1)
    experiments, optax = one_weight("experiments", eps=1.0), one_weight("optax", eps=1.0)
    assert play(experiments, -1, -4, 2) == [
        pytest.approx(pair, rel=1e-15) for pair in [(0.1, 2.1), (0.18, 2.9), (last, 2 + 3 * last)]
    ]
    assert play(optax, -1, -4, 2) == [
        pytest.approx(pair, rel=1e-15) for pair in [(0.1, 2.1), (0.12, 2.6), (last, 2 + 3 * last)]
    ]
    assert experiments.vectors("r") == pytest.approx([-1.6], rel=1e-15)
    assert optax.vectors("r") == pytest.approx([-0.55], rel=1e-15)


def test_theory_by_hand() -> None:
    # h = 0:   nothing is known yet.
    # h = -4:  clipped to 0; m = 4, W_0 = 0.1 * 4 from now on, q = 0, so s = 0.
    # h = -10: clipped to -4; m = 10, q = 4, r = 0, v = 16, s = 0.4 / sqrt(416) * 4 / sqrt(416).
    # h = 1:   m = 5, q = 2 - 1 = 1, r = -s, v = 16 / 4 + 1 = 5, s = (0.4 - s) / sqrt(105) * 1 / sqrt(105).
    tuner = Tuner("theory", betas=(0.5,), s_init=0.1, eps=0.0)
    scales = []
    for h in (0.0, -4.0, -10.0, 1.0):
        tuner.step(h)
        scales.append(float(tuner.s[0]))
    assert scales == pytest.approx([0, 0, 1.6 / 416, (0.4 - 1.6 / 416) / 105], rel=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_theory_keeps_its_wealth_and_its_promise(seed: int) -> None:
    """With beta = 1 and an h that favours a positive scale, the wealth grows and is never lost."""
    h = np.random.default_rng(seed).normal(-0.3, 1.0, size=2000)
    tuner = Tuner("theory", betas=(1.0,), s_init=1e-3, eps=0.0)
    wealth = []
    for h_t in h:
        tuner.step(float(h_t))
        wealth.append(1e-3 * tuner.m_1 + float(tuner.r[0]))
    assert min(wealth) > 0
    assert wealth[-1] > 1e3 * wealth[0]


def test_lambda_by_hand() -> None:
    # x = (3, 4), lambda = 0.5. g = (-1, 0): Delta = (1, 0). g = (-4, 0): S = 0, so h = -4, s = 0.1; Delta = (5, 0),
    # x = (3.5, 4). g = (-3, 4), of norm 5: <Delta, g> = -15, <Delta, x> = 17.5, ||x|| = sqrt(28.25).
    constants = {"betas": (0.5,), "s_init": 0.1, "s_decay": 0.5, "eps": 0.0, "normalize_lr": False}
    reference = Reference([vector(3.0, 4.0)], sgd(), rule="paper", **constants)
    for g in (vector(-1.0, 0.0), vector(-4.0, 0.0), vector(-3.0, 4.0)):
        reference.step([g])
    assert reference.parts[0].h == pytest.approx(-15 + 0.5 * 0.1 * 5 * 17.5 / math.sqrt(28.25), rel=1e-15)


def test_max_scale_by_hand() -> None:
    # Like the paper's case, but the 0.1 of the second step becomes 0.05, and so r = 0.05 * 10 in the third.
    last = min(0.05, (1 + 0.5) / math.sqrt(104))
    assert play(one_weight("paper", max_scale=0.05), -1, -4, -2) == [
        pytest.approx(pair, rel=1e-15) for pair in [(0, 2), (0.05, 2.25), (last, 2 + 7 * last)]
    ]


@pytest.mark.parametrize("rule", RULES)
def test_normalize_lr_cancels_the_base_lr(rule: str) -> None:
    """With lr 8 the weights are the same and s is an eighth, up to rounding, as u is computed from the weights."""
    gradients = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.3
    one, eight = (
        Reference([vector(1.0, -2.0, 3.0)], sgd(lr), betas=(0.9, 0.99), s_init=1e-2, rule=rule) for lr in (1.0, 8.0)
    )
    for g in gradients:
        one.step([g])
        eight.step([g])
        assert one.x[0].tolist() == pytest.approx(eight.x[0].tolist(), rel=1e-13)
        assert one.vectors("s") == pytest.approx(8 * eight.vectors("s"), rel=1e-13)


def test_scope_group_is_a_reference_for_each_group() -> None:
    starts = [vector(1.0, 2.0), vector(-3.0)]
    joint = Reference(
        starts,
        lambda copies: torch.optim.SGD([{"params": [p]} for p in copies], lr=1.0, foreach=False),
        s_init=1e-2,
        scope="group",
    )
    alone = [Reference([start], sgd(), s_init=1e-2) for start in starts]
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        g = [torch.randn(start.shape, dtype=torch.float64, generator=generator) for start in starts]
        joint.step(g)
        for one, grad in zip(alone, g, strict=True):
            one.step([grad])
    assert joint.vectors("s").shape == (2, 6)
    assert np.array_equal(joint.vectors("s"), np.stack([one.vectors("s") for one in alone]))
    assert all(torch.equal(joint.x[i], alone[i].x[0]) for i in range(2))


def test_maximize_is_minimising_the_negative() -> None:
    up = Reference([vector(1.0, 2.0)], sgd(maximize=True), s_init=1e-2)
    down = Reference([vector(1.0, 2.0)], sgd(), s_init=1e-2)
    for g in torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        up.step([g])
        down.step([-g])
    assert torch.equal(up.x[0], down.x[0])
    assert np.array_equal(up.vectors("s"), down.vectors("s"))


def test_a_parameter_without_gradients_counts_from_its_first_one_on() -> None:
    as_published = {"s_init": 1e-2, "s_decay": 0.5}
    with_idle = Reference([vector(1.0, 2.0), vector(100.0)], sgd(), **as_published)
    without = Reference([vector(1.0, 2.0)], sgd(), **as_published)
    gradients = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for g in gradients[:20]:
        with_idle.step([g, None])
        without.step([g])
    assert with_idle.vectors("s").sum() > 0
    assert np.array_equal(with_idle.vectors("s"), without.vectors("s"))

    with_idle.step([gradients[20], vector(1.0)])  # Delta of the idle weight is still 0 in this h ...
    without.step([gradients[20]])
    assert with_idle.parts[0].h != without.parts[0].h  # ... but ||x|| and ||g|| have grown
    assert with_idle.x[1].item() < 100
    before = with_idle.x[1].item()
    with_idle.step([gradients[21], None])  # it has no gradient, yet follows the scale
    assert with_idle.x[1].item() == 100.0 - with_idle.vectors("s").sum()
    assert with_idle.x[1].item() != before


def test_nothing_is_tuned_before_the_first_learning_rate() -> None:
    late = Reference([vector(1.0, 2.0)], sgd(0.0), s_init=1e-2, rule="optax")
    prompt = Reference([vector(1.0, 2.0)], sgd(0.5), s_init=1e-2, rule="optax")
    gradients = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    late.step([gradients[0]])
    assert late.x[0].tolist() == [1.0, 2.0]
    late.base.param_groups[0]["lr"] = 0.5
    for g in gradients:
        late.step([g])
        prompt.step([g])
    assert np.array_equal(late.vectors("s"), prompt.vectors("s"))
    assert torch.equal(late.x[0], prompt.x[0])


def load(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return golden


def replay(golden: dict[str, Any], tuner: Tuner, start: int) -> None:
    """Feeds the recorded h to the tuner from row `start` on, and compares its vectors after each.

    40 steps of the same dozen operations in another order may differ by a few roundings of 1.1e-16.
    """
    for row in golden["rows"][start:]:
        tuner.step(row["h"])
        for name in "srmv":
            seen, recorded = getattr(tuner, name), np.array(row[name])
            assert np.abs(seen - recorded).max() <= 1e-14 * np.abs(recorded).max(), name


@pytest.mark.parametrize("rule", ["optax", "experiments"])
def test_tuner_does_what_the_published_one_did(rule: str) -> None:
    golden = load(f"{rule}_mechanic")
    tuner = Tuner(rule, betas=golden["betas"], s_init=golden["s_init"], eps=golden["eps"])
    assert tuner.s.tolist() == golden["rows"][0]["s"]
    replay(golden, tuner, start=1)


def test_the_golden_files_reach_every_branch() -> None:
    for name in ("optax_mechanic", "experiments_mechanic"):
        r = np.array([row["r"] for row in load(name)["rows"]])
        assert (r < 0).any(), "r is never clamped"
    rows = load("optax_mechanic")["rows"]
    assert any(abs(row["h"]) > max(before["m"]) > 0 for before, row in pairwise(rows))
    r = np.array([row["r"] for row in load("mechanic_pytorch")["rows"]])
    assert (r[5:] == 0).any(), "r is never clamped"
    assert (r[-1] > 0).all()


def test_paper_rule_does_what_mechanic_pytorch_did() -> None:
    """That package starts m at 1e-6, so s is not 0 before the first h: the state is taken from its first row."""
    golden = load("mechanic_pytorch")
    tuner = Tuner("paper", betas=golden["betas"], s_init=golden["s_init"], eps=golden["eps"])
    first = golden["rows"][0]
    assert first["h"] == 0
    for name in "srmv":
        setattr(tuner, name, np.array(first[name]))
    replay(golden, tuner, start=1)


@pytest.mark.parametrize("rule", ["optax", "experiments"])
def test_weights_go_where_the_published_ones_went(rule: str) -> None:
    """Compares the whole algorithm, with h and lambda, with the published code run at a negligible eps.

    That code recovers Delta as (x - x_ref) / S: a rounding error of 2e-16 in x is one of 2e-16 / S in Delta, with S
    down to 5e-3 and |Delta| above 1. Hence 1e-12.
    """
    golden = load(f"{rule}_mechanic")
    reference = Reference(
        [vector(*golden["weights"][0])],
        sgd(),
        betas=golden["betas"],
        s_init=golden["s_init"],
        s_decay=0.01,
        eps=golden["eps_of_weights"],
        rule=rule,
        normalize_lr=False,
    )
    for g, x in zip(golden["gradients"], golden["weights"][1:], strict=True):
        reference.step([vector(*g)])
        assert (reference.x[0] - vector(*x)).abs().max().item() <= 1e-12


def default(start: Tensor, lr: float = 1.0, **options: Any) -> Default:
    return Default([start], sgd(lr, weight_decay=options.pop("weight_decay", 0.0)), **options)


def scale_of(judge: Default) -> float:
    return float(judge.vectors("s")[0])


def test_the_first_steps_of_the_default_rule_by_hand() -> None:
    # lr 2, x = (3, 4), g = (0, 1): u = -2 g is not applied, but measured: a = |g| / |x| = 1/5 per unit of S * lr.
    judge = default(vector(3.0, 4.0), 2.0)
    judge.step([vector(0.0, 1.0)])
    assert judge.x[0].tolist() == [3, 4]
    assert (judge.parts[0].a2, scale_of(judge)) == (pytest.approx(1 / 25, rel=1e-15), 0)
    # The second gradient: f = 2/20, and no z yet. n = w = f. The step of S * lr * g is measured again.
    judge.step([vector(0.0, 1.0)])
    S_2 = 0.02 * 0.1 / (1 / 5 * 2)
    assert scale_of(judge) == pytest.approx(S_2, rel=1e-14)
    assert judge.x[0].tolist() == pytest.approx([3, 4 - 2 * S_2], rel=1e-15)
    x = 4 - 2 * S_2
    a2 = 1 / 25  # relative to the weights before the step. The only one that counts: the first was before all steps
    assert judge.parts[0].a2 == pytest.approx(a2, rel=1e-12)
    # The third: f = 3/20. z > 0 is the only one, so q = 1; E = w * (1 - 0.1) / (n + 60) with the n before.
    judge.step([vector(0.0, 1.0)])
    E = 0.15 * 0.9 / 60.1
    assert judge.parts[0].E == pytest.approx(E, rel=1e-12)
    S_3 = 0.02 * 0.15 / (math.sqrt(a2) * 2) * math.exp(E)
    assert scale_of(judge) == pytest.approx(S_3, rel=1e-12)
    assert judge.parts[0].h == pytest.approx(-2, rel=1e-12)  # <D, g> / S, and D = -2 S g
    # A = the root mean square by n: 0.1 of the first's, and 0.15 of this one's.
    assert judge.parts[0].a2 == pytest.approx((0.1 * a2 + 0.15 / (9 + x**2)) / 0.25, rel=1e-12)


def test_the_ramp_ends_at_the_twentieth_gradient() -> None:
    """A gradient of zero, or None, is none. The evidence is taken out."""
    judge = default(vector(3.0, 4.0))
    targets = []
    for step in range(30):
        judge.step([vector(0.0, 0.0) if step == 10 else None if step == 12 else vector(0.01, 0.01)])
        part, f = judge.parts[0], min((step + 1 - (step >= 10) - (step >= 12)) / 20, 1)
        judge.x[0].copy_(vector(3.0, 4.0))  # the change stays the same
        targets.append(part.S * math.sqrt(part.a2) / math.exp(part.E) / f)
    assert targets[1:] == pytest.approx([0.02] * 29, rel=1e-2)


def test_evidence_and_bonus_by_hand() -> None:
    """Above the last lr so far the bonus ends; below it, nothing is taken from the evidence."""
    judge = default(vector(3.0, 4.0))
    for _ in range(40):
        judge.step([vector(0.0, 1e-3)])
    part = judge.parts[0]
    # All z are positive and grow with the distance: q = 1 in all but the first steps, where it is also 1.
    n = [sum(min(t, 20) / 20 for t in range(2, last + 1)) for last in range(2, 41)]
    weights = [min(t, 20) / 20 for t in range(3, 41)]
    E = sum(0.9 * w / (before + 60) for w, before in zip(weights, n[:-1], strict=True))
    assert part.n == pytest.approx(n[-1], rel=1e-12)
    assert part.E == pytest.approx(E, rel=1e-12)
    assert part.B == 0
    judge.base.param_groups[0]["lr"] = 0.5
    judge.step([vector(0.0, 1e-3)])
    assert part.E == pytest.approx(E + 0.5 / (n[-1] + 60), rel=1e-12)
    assert part.B == pytest.approx(0.6 * 0.5 / (n[-1] + 60), rel=1e-12)
    E, n_now = part.E, part.n
    assert n_now == pytest.approx(n[-1] + 0.5, rel=1e-12)
    assert part.S == pytest.approx(0.02 / math.sqrt(part.a2) * math.exp(part.E + part.B), rel=1e-12)
    judge.base.param_groups[0]["lr"] = 1.0
    judge.step([vector(0.0, -1e3)])  # shortened to 5 times the others, against a distance that is as long as ever
    assert part.E == pytest.approx(E - 1.1 / (n_now + 60), rel=1e-12)
    assert part.B == 0


def test_gradients_that_are_far_too_long_are_shortened_by_hand() -> None:
    judge, other = default(vector(3.0, 4.0)), default(vector(3.0, 4.0))
    for step in range(12):
        g = vector(0.3, -0.4) * (-1) ** step
        for each in (judge, other):
            each.step([g])
    judge.step([vector(3.0, -4.0)])  # the others have norm 0.5
    other.step([vector(1.5, -2.0)])
    assert judge.x[0].tolist() == pytest.approx(other.x[0].tolist(), rel=1e-15)
    assert judge.parts[0].g2 == pytest.approx(other.parts[0].g2, rel=1e-15)
    # Step 13 is not measured: the update is taken to be as long as the gradients. |g|^2 = 1/4, then 25/4.
    part, fades = judge.parts[0], [(39 / 40) ** k for k in range(13)]
    growth = (25 / 4 + sum(fades[1:]) / 4) / sum(fades) * 4
    S = 0.02 * 13 / 20 / math.sqrt(part.a2 * growth) * math.exp(part.E)
    assert scale_of(judge) == pytest.approx(S, rel=1e-12)


class Jumps(torch.optim.SGD):
    """Its updates are far longer from the fifth step on."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * (1.0 if self.steps < 5 else 100.0))


def test_a_step_that_is_absurdly_long_is_taken_back_by_hand() -> None:
    judge = Default([vector(3.0, 4.0)], lambda copies: Jumps(copies, lr=1.0))
    for _ in range(4):
        judge.step([vector(0.01, 0.0)])
    before, a2 = judge.x[0].clone(), judge.parts[0].a2
    judge.step([vector(0.01, 0.0)])
    assert torch.equal(judge.x[0], before)
    # The length is that of this step alone.
    assert judge.parts[0].a2 == pytest.approx(1 / (before[0].item() ** 2 + 16), rel=1e-12)
    assert judge.parts[0].a2 > 1e3 * a2
    part = judge.parts[0]
    end = part.a2
    judge.step([vector(0.01, 0.0)])
    # No longer by 100 times the target of this step, 0.02 * 6 / 20.
    assert (judge.x[0] - before).norm() == pytest.approx(0.02 * 0.3 / math.sqrt(end) * math.exp(part.E), rel=1e-9)


def test_a_matrix_that_is_trained_late_starts_the_rule_over_by_hand() -> None:
    head, body = vector(1.0, 2.0), torch.eye(2, dtype=torch.float64)
    judge = Default([head, body], sgd())
    for _ in range(50):
        judge.step([vector(1e-3, 1e-3), None])
    part = judge.parts[0]
    assert (part.t, judge.calls) == (50, 50)
    a2, size = part.a2, judge.x[0].norm().item()
    judge.step([vector(1e-3, 1e-3), 1e-3 * body])
    assert (part.t, judge.calls, part.B) == (1, 1, 0)
    assert part.E == pytest.approx(0.05 * 0.9 / 60)  # this step's alone
    growth = 1 + 1 / sum((39 / 40) ** k for k in range(51))  # this gradient's square is twice the others'
    assert part.S == pytest.approx(0.02 / 20 / math.sqrt(a2 * growth) * math.exp(part.E), rel=1e-9)
    changes = 1e-3, math.sqrt(2e-6) / size
    assert part.a2 == pytest.approx(max(changes) ** 2, rel=1e-9)  # measured anew


def test_a_vector_that_is_trained_late_does_not_start_it_over() -> None:
    judge = Default([vector(1.0, 2.0), vector(1.0, 1.0)], sgd())
    for step in range(30):
        judge.step([vector(1e-3, 1e-3), None if step < 20 else vector(1e-3, 1e-3)])
    assert judge.parts[0].t == 30


def test_weights_that_start_at_zero_count_by_hand() -> None:
    """What they should come to is unknown: a matrix counts as 1, n numbers in a vector as sqrt(n)."""
    for x, g, a in (
        (torch.zeros(4), torch.tensor([3.0, 4, 0, 0]), 5 / 2),
        (torch.zeros(2, 2), torch.diag(torch.tensor([3.0, 2])), 3),
    ):
        judge = default(x.double())
        for _ in range(2):
            judge.step([g.double()])
        assert math.sqrt(judge.parts[0].a2) == pytest.approx(a, rel=1e-6), x.shape


def test_the_median_of_matrices_and_of_vectors_by_hand() -> None:
    """In the spectral norm and in the Euclidean one; the larger of the two lower medians counts."""
    eye, ones = torch.eye(2).double(), torch.ones(3).double()
    for largest, a in ((0.2, 0.3), (50.0, 4.0)):
        weights = [eye, eye, eye, ones, ones]
        grads = [0.1 * eye, 0.3 * eye, 0.4 * eye, min(largest, 4) * ones, largest * ones]
        judge = Default(weights, sgd())
        judge.step(grads)
        assert math.sqrt(judge.parts[0].a2) == pytest.approx(a, rel=1e-9)


@pytest.mark.parametrize("key", ["initial_lr", "max_lr"])
def test_the_highest_lr_is_the_highest_in_force(key: str) -> None:
    """What a scheduler announces does not count: a warm-up set by hand announces nothing."""
    announced, plain = default(vector(3.0, 4.0), 0.5), default(vector(3.0, 4.0), 0.5)
    announced.base.param_groups[0][key] = 8.0
    for step in range(30):
        for judge in (announced, plain):
            judge.base.param_groups[0]["lr"] = 0.5 + min(step, 10) / 10
            judge.step([vector(0.1, 0.2)])
    assert torch.equal(announced.x[0], plain.x[0])
    assert announced.parts[0].highest_lr == 1.5


def test_a_penalty_by_hand() -> None:
    # x = 4, decay 0.5, g = 1: u = -3, a = 3/4. S = 0.02 * 0.1 / a. Then D = -3 S, and z = 3 S * (1 + x / 2).
    judge = default(vector(4.0), weight_decay=0.5)
    for _ in range(3):
        judge.step([vector(1.0)])
    S = 0.002 / (3 / 4)
    assert judge.parts[0].h == pytest.approx(-3 * (1 + (4 - 3 * S) / 2), rel=1e-12)
    assert judge.parts[0].v == pytest.approx(0.15 * (3 * S * (1 + (4 - 3 * S) / 2)) ** 2, rel=1e-12)


def test_decoupled_weight_decay_is_no_penalty() -> None:
    judge = Default([vector(3.0)], lambda copies: torch.optim.AdamW(copies, lr=1.0, weight_decay=0.5))
    assert judge.penalty_of(0) == 0


def test_a_false_start_by_hand() -> None:
    """A first gradient of 101 is forgotten with all its effects, and one of 99 is not."""
    for first, gradients in ((101.0, 1), (99.0, 2)):
        judge = default(vector(1.0))
        for g in (first, 1.0):
            judge.step([vector(g)])
        assert (judge.parts[0].t, judge.calls) == (gradients, gradients)


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_an_lr_of_zero_holds_everything(moment: int) -> None:
    held, plain = default(vector(1.0, -2.0)), default(vector(1.0, -2.0))
    for step, g in enumerate(torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))):
        if step == moment:
            held.base.param_groups[0]["lr"] = 0.0
            held.step([-g])
            held.base.param_groups[0]["lr"] = 1.0
        held.step([g])
        plain.step([g])
    assert torch.equal(held.x[0], plain.x[0])


@pytest.mark.parametrize("factor", [1e-4, 1e100])
def test_neither_the_loss_scale_nor_the_lr_matters(factor: float) -> None:
    """The reference computes updates from rounded weights, so smaller factors are tested on the package only."""
    one, other = default(vector(1.0, -2.0)), default(vector(1.0, -2.0), 1e-3)
    for g in torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        one.step([g])
        other.step([factor * g])
        assert other.x[0].tolist() == pytest.approx(one.x[0].tolist(), rel=1e-8)
