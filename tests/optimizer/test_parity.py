"""Compares the package with the references: s, r, m, v and the weights at every step, up to rounding in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from optimizers import OPTIMIZERS, Lion, Row
from reference import RULES as PUBLISHED
from reference import Around, Reference
from reference_default import Default
from torch import Tensor

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion as PackagesLion
from mechanic_plugins.rule.settings import Settings

RULES = ("relative", *PUBLISHED)
STEPS = 300  # for one base; longer than any window or memory of a rule
BASES = {row.name: row for row in OPTIMIZERS}
FOLLOWED_LONG = "AdamW"
USUAL = 30  # enough to show the differences between bases or rules

# Measured: at most 2e-14 (median 2e-15) over 300 steps in which each side computes its gradients at its own weights;
# ten times that is allowed. This needs problems on which rounding errors do not grow: with a tenth of the noise on the
# quadratic, two runs of the reference, started one rounding apart, end 0.3 of their size apart (RAdam), because the
# scale reaches the edge of stability. With this much noise, two such runs stay within 2e-14.
TOLERANCE = 2e-13
TOLERANCE_OF_V = 1e-12
"""v holds the squares of z = <x_ref - x, g>, and the difference has few digits while x has hardly moved. The first
steps of a run are short, the more so after an outlier: measured are 5e-13."""

Gradient = Callable[[Sequence[Tensor], int], list[Tensor | None]]
Schedule = Callable[[torch.optim.Optimizer, int], None]
BaseFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Problem:
    """The initial weights, and the gradient at given weights in a given step, including noise."""

    start: list[Tensor]
    gradient: Gradient


def quadratic() -> Problem:
    """A matrix of 20 weights with curvatures from 1e-3 to 1 in a rotated basis, and additive noise."""
    generator = torch.Generator().manual_seed(1)
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    basis, _ = torch.linalg.qr(randn(20, 20))
    hessian = basis @ torch.diag(torch.logspace(-3, 0, 20, dtype=torch.float64)) @ basis.T
    minimum, noise = 3 * randn(20), randn(STEPS, 20)

    def gradient(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
        return [(hessian @ (x[0].flatten() - minimum) + noise[step]).reshape(4, 5)]

    return Problem([randn(4, 5)], gradient)


def mlp(matrices_only: bool = False) -> Problem:
    """A network of 92 weights with one hidden tanh layer, squared loss, and batches of 8 out of 64 samples."""
    generator = torch.Generator().manual_seed(2)
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    inputs, targets = randn(64, 6), randn(64, 4)
    batches = torch.randint(64, (STEPS, 8), generator=generator)
    start = [randn(6, 8) / 6**0.5, randn(8, 4) / 8**0.5, 0.1 * randn(8), 0.1 * randn(4)]

    def gradient(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
        first, second, *biases = x
        first_bias, second_bias = biases or start[2:]
        sample = inputs[batches[step]]
        hidden = torch.tanh(sample @ first + first_bias)
        error = (hidden @ second + second_bias - targets[batches[step]]) / 8
        inner_error = error @ second.T * (1 - hidden**2)
        g: list[Tensor | None] = [sample.T @ inner_error, hidden.T @ error, inner_error.sum(0), error.sum(0)]
        return g[: len(x)]

    return Problem(start[:2] if matrices_only else start, gradient)


PROBLEMS = {"quadratic": quadratic(), "mlp": mlp(), "mlp-matrices": mlp(matrices_only=True)}


class Package:
    """The package with the reference's interface."""

    def __init__(self, params: Sequence[Tensor], base_factory: Callable[[list[Tensor]], Any], **settings: Any) -> None:
        self.x = [p.clone().requires_grad_() for p in params]
        self.base: Any = mechanize(base_factory(self.x), settings=Settings(**settings))

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for p, grad in zip(self.x, grads, strict=True):
            p.grad = grad
        self.base.step()
        self.tuner = self.base.tuner

    def vectors(self, name: str) -> NDArray[np.float64]:
        vectors: NDArray[np.float64] = getattr(self.tuner, name).detach().numpy().copy()
        return vectors


@dataclass(frozen=True)
class Trace:
    """After each step, the weights and the tuner's vectors, each with one row of all betas (and groups) per step."""

    s: NDArray[np.float64]
    r: NDArray[np.float64]
    m: NDArray[np.float64]
    v: NDArray[np.float64]
    x: NDArray[np.float64]


@torch.no_grad()
def follow(
    runner: Around | Package, gradient: Gradient, *, steps: int = STEPS, schedule: Schedule | None = None
) -> Trace:
    """Makes the steps, each with the gradient at the runner's own weights."""
    rows: dict[str, list[NDArray[np.float64]]] = {name: [] for name in "srmvx"}
    for step in range(steps):
        if schedule is not None:
            schedule(runner.base, step)
        runner.step(gradient(runner.x, step))
        for name in "srmv":
            rows[name].append(runner.vectors(name).ravel())
        rows["x"].append(torch.cat([p.flatten() for p in runner.x]).numpy().copy())
    return Trace(**{name: np.stack(values) for name, values in rows.items()})


def judge_of(rule: str) -> Any:
    return Default if rule == "relative" else Reference


def options(rule: str) -> dict[str, Any]:
    """Settings for a rule. Published ones start at about 1e-8 by default, too low for so few steps."""
    start = {} if rule == "relative" else {"s_init": 1e-3, "s_decay": 0.0, "eps": 1e-8}
    return {"rule": rule, **start}


def steps_of(row: Row, rule: str = RULES[0]) -> int:
    return STEPS if rule == RULES[0] and row.name == FOLLOWED_LONG else USUAL


@functools.cache
def reference_trace(row: Row, rule: str, problem: str, variant: str = "for-loop") -> Trace:
    judge = judge_of(rule)(PROBLEMS[problem].start, lambda x: row.build(x, variant), **options(rule))
    return follow(judge, PROBLEMS[problem].gradient, steps=steps_of(row, rule))


def deviation(seen: Trace, wanted: Trace) -> dict[str, float]:
    """The largest difference in any step, relative to the largest value of that kind in the step."""
    size = {name: np.abs(getattr(wanted, name)).max(axis=1) for name in "srmvx"}
    size["r"] = np.maximum.accumulate(size["r"])  # it may be nearly 0, as a difference of large numbers
    difference = {name: np.abs(getattr(seen, name) - getattr(wanted, name)).max(axis=1) for name in "srmvx"}
    return {name: float((difference[name] / np.where(size[name] > 0, size[name], 1.0)).max()) for name in "srmvx"}


def assert_same(seen: Trace, wanted: Trace, *, grown: float = 1.2, tolerance: float = TOLERANCE) -> None:
    """Checks equality up to rounding in every step of `seen`, and that the scale has grown."""
    wanted = Trace(**{name: getattr(wanted, name)[: len(seen.s)] for name in "srmvx"})
    scale = wanted.s.sum(axis=1)
    assert scale.max() >= grown * scale[scale > 0].min()
    apart = deviation(seen, wanted)
    assert apart.pop("v") <= max(tolerance, TOLERANCE_OF_V)
    assert max(apart.values()) <= tolerance, apart


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread, since more only slow down such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_turn(first: int) -> list[tuple[Row, str]]:
    """Pairs each base with one of the other rules."""
    return [(row, RULES[1 + (first + index) % len(RULES[1:])]) for index, row in enumerate(OPTIMIZERS)]


# Bases and rules are independent. So each base runs with the default rule and two or three others (here, on the network
# and in "as the paper has it"), and SGD and AdamW with all.
PAIRS = [*((row, RULES[0]) for row in OPTIMIZERS), *in_turn(1)]
PAIRS += [(row, rule) for row in (BASES["SGD"], BASES["AdamW"]) for rule in RULES if (row, rule) not in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "rule"), PAIRS, ids=str)
def test_every_base_and_rule_on_an_ill_conditioned_quadratic(row: Row, rule: str) -> None:
    problem = PROBLEMS["quadratic"]
    seen = follow(Package(problem.start, row.build, **options(rule)), problem.gradient, steps=steps_of(row, rule))
    assert_same(seen, reference_trace(row, rule, "quadratic"))


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_every_base_on_a_network(row: Row) -> None:
    name = "mlp-matrices" if row.matrices_only else "mlp"
    problem = PROBLEMS[name]
    seen = follow(Package(problem.start, row.build), problem.gradient, steps=steps_of(row))
    assert_same(seen, reference_trace(row, "relative", name))


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_every_base_as_the_paper_has_it(row: Row) -> None:
    """Algorithm 1 itself, including lambda; the default settings differ from it."""
    problem = PROBLEMS["mlp-matrices" if row.matrices_only else "mlp"]
    paper: dict[str, Any] = {**options("paper"), "s_decay": 0.01}
    runners = (cls(problem.start, row.build, **paper) for cls in (Package, Reference))
    seen, wanted = (follow(runner, problem.gradient, steps=USUAL) for runner in runners)
    assert_same(seen, wanted, grown=5.0)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "rule"), in_turn(0), ids=str)
def test_every_other_rule_on_a_network(row: Row, rule: str) -> None:
    name = "mlp-matrices" if row.matrices_only else "mlp"
    problem = PROBLEMS[name]
    seen = follow(Package(problem.start, row.build, **options(rule)), problem.gradient, steps=steps_of(row, rule))
    assert_same(seen, reference_trace(row, rule, name))


@pytest.mark.slow
@pytest.mark.parametrize(("row", "variant"), [(row, v) for row in OPTIMIZERS for v in row.variants], ids=str)
def test_foreach_and_fused_bases(row: Row, variant: str) -> None:
    problem = PROBLEMS["mlp"]
    seen = follow(Package(problem.start, lambda x: row.build(x, variant)), problem.gradient, steps=USUAL)
    same = "for-loop" if row.variants_agree else variant
    assert_same(seen, reference_trace(row, "relative", "mlp", same))


class DeclaredLion(Lion):
    linear_in_lr = True


LINEAR = [row for row in OPTIMIZERS if row.linear]
LINEAR.append(replace(BASES["Lion"], name="Lion-declared", cls=DeclaredLion))


def test_the_packages_lion_is_the_textbooks() -> None:
    problem, row = PROBLEMS["mlp"], BASES["Lion"]
    seen = follow(Package(problem.start, lambda x: PackagesLion(x, **row.kwargs)), problem.gradient, steps=USUAL)
    assert_same(seen, reference_trace(row, "relative", "mlp"))


@pytest.mark.parametrize("lr", [1e-6, 10.0])
@pytest.mark.parametrize("row", LINEAR, ids=str)
def test_the_base_lr_does_not_matter(row: Row, lr: float) -> None:
    """The weights move as with the row's own lr; s is in units of 1 / lr, and the evidence in those of the loss.

    A class not known to be linear steps at its own lr, and its update is its change of the weights: with lr 1e-6 that
    has the weights' rounding error, 4e-16, in units of 1e-6, and more with each step.
    """
    problem = PROBLEMS["quadratic"]
    steps = 30 if row.cls is Lion else USUAL
    seen = follow(Package(problem.start, lambda x: row.build(x, lr=lr)), problem.gradient, steps=steps)
    c = lr / row.kwargs["lr"]
    scaled = replace(seen, s=seen.s * c)
    tolerance = 4e-16 / lr if row.cls is Lion else 0.0
    assert_same(scaled, reference_trace(row, "relative", "quadratic"), tolerance=max(TOLERANCE, tolerance))


@dataclass(frozen=True)
class Option:
    """A way to use Mechanic that the tests above do not cover."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    build: BaseFactory = BASES["AdamW"].build
    schedule: Schedule | None = None
    gradient: Gradient = PROBLEMS["mlp"].gradient
    start: Sequence[Tensor] = tuple(PROBLEMS["mlp"].start)
    grown: float = 5.0
    rules: Sequence[str] = RULES
    steps: int = 40  # needed to grow by that factor

    def __str__(self) -> str:
        return self.name


ZEROS = [torch.zeros_like(p) for p in PROBLEMS["mlp"].start]
NEXT_TO_NOTHING = [1e-4 * p for p in PROBLEMS["quadratic"].start]


def two_groups(params: list[Tensor]) -> torch.optim.Optimizer:
    return BASES["AdamW"].build([{"params": params[:2], "lr": 0.3}, {"params": params[2:], "lr": 0.01}])


def with_gaps(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
    """The second bias gets its first gradient in step 10, and the second matrix none in every third step."""
    first, second, first_bias, second_bias = PROBLEMS["mlp"].gradient(x, step)
    return [first, None if step % 3 == 1 else second, first_bias, second_bias if step >= 10 else None]


def ascent(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
    return [None if g is None else -g for g in PROBLEMS["mlp"].gradient(x, step)]


def turned(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
    """Descent that turns into ascent halfway, so that the bets are lost."""
    return PROBLEMS["mlp"].gradient(x, step) if step < USUAL // 2 else ascent(x, step)


def with_outliers(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
    """Two outliers, of which the second is repeated. They are shortened, the repeated one less each time."""
    factor = {10: 1e3, 20: 1e5, 21: 1e5, 22: 1e5, 23: 1e5}.get(step, 1.0)
    return [None if g is None else factor * g for g in PROBLEMS["mlp"].gradient(x, step)]


def far_off_at_first(x: Sequence[Tensor], step: int) -> list[Tensor | None]:
    return [None if g is None else (1e5 if step == 0 else 1.0) * g for g in PROBLEMS["mlp"].gradient(x, step)]


def warm_up(base: torch.optim.Optimizer, step: int) -> None:
    for group in base.param_groups:
        group["lr"] = 0.5 * min(1.0, step / 20)


def scheduled_warm_up(base: torch.optim.Optimizer, step: int) -> None:
    """Sets `initial_lr` to the peak, as torch's schedulers do."""
    for group in base.param_groups:
        group["initial_lr"] = 0.5
    warm_up(base, step)


def with_pauses(base: torch.optim.Optimizer, step: int) -> None:
    for group in base.param_groups:
        group["lr"] = 0.0 if step in (1, 2, 10) else 1.0


adamw = BASES["AdamW"].build
OURS = ["relative", "paper"]
OPTIONS = [
    Option("turned", {}, gradient=turned, grown=2.0),
    Option("max_scale", {"max_scale": 1e-2}, rules=PUBLISHED, grown=2.0),
    Option("max_scale-default", {"max_scale": 1e-2}, rules=OURS[:1], grown=1.0),
    Option("constants", {"betas": (0.5, 0.97, 1.0), "eps": 1e-3, "s_decay": 0.3, "s_init": 1e-4}, rules=PUBLISHED),
    Option("literal-constants", {"normalize_lr": False}, functools.partial(adamw, lr=0.01), rules=PUBLISHED),
    Option("scope-group", {"scope": "group"}, two_groups, grown=3.0),
    Option("warm-up", {}, functools.partial(adamw, lr=0.0), warm_up, steps=60),
    Option("warm-up-scheduled", {}, functools.partial(adamw, lr=0.0), scheduled_warm_up, steps=60),
    Option("pauses", {}, schedule=with_pauses, rules=OURS[:1]),
    Option("warm-up-group", {"scope": "group"}, two_groups, warm_up, rules=OURS, steps=60),
    Option("lambda", {"s_decay": 0.01}, rules=["paper"]),
    Option("group-lrs", {}, two_groups, rules=OURS),
    Option("scope-group-max_scale", {"scope": "group", "max_scale": 0.02}, two_groups, rules=OURS, grown=1.0),
    Option("maximize", {}, functools.partial(adamw, maximize=True), gradient=ascent, rules=OURS),
    Option("gaps", {}, gradient=with_gaps, rules=OURS),
    Option("gaps-scope-group", {"scope": "group"}, two_groups, gradient=with_gaps, rules=["relative", "theory"]),
    Option("zeros", {}, BASES["SGD-momentum"].build, start=ZEROS, rules=[*OURS, "optax"]),
    Option(
        "next-to-nothing", {}, gradient=PROBLEMS["quadratic"].gradient, start=NEXT_TO_NOTHING, rules=OURS[:1], steps=100
    ),
    Option("outliers", {}, gradient=with_outliers, rules=OURS[:1]),
    Option("false-start", {}, gradient=far_off_at_first, rules=OURS[:1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "rule"), [(option, rule) for option in OPTIONS for rule in option.rules], ids=str)
def test_options(option: Option, rule: str) -> None:
    seen, wanted = (
        follow(
            cls(option.start, option.build, **{**options(rule), **option.settings}),
            option.gradient,
            steps=option.steps,
            schedule=option.schedule,
        )
        for cls in (Package, judge_of(rule))
    )
    assert_same(seen, wanted, grown=min(option.grown, 2.0) if rule == RULES[0] else option.grown)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_shown_is_what_was_used(rule: str) -> None:
    """Tests the scale, the step count and the last step's h as shown by the optimizer."""
    problem = PROBLEMS["mlp"]
    package = Package(problem.start, BASES["AdamW"].build, **options(rule))
    reference = judge_of(rule)(problem.start, BASES["AdamW"].build, **options(rule))
    for steps in (1, 2, 3, 50):
        follow(package, problem.gradient, steps=steps)
        follow(reference, problem.gradient, steps=steps)
        assert package.base.scale.item() == pytest.approx(reference.parts[0].S, rel=1e-12)
        assert package.base.metrics()["mechanic/h"] == pytest.approx(reference.parts[0].h, rel=1e-11)
    assert int(package.base.tuner.steps) == 56
