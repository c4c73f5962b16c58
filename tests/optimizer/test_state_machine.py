"""Random training loops against the reference: what users do between steps, in any order that hypothesis tries.

A sequence of steps, skipped steps, missing gradients, late groups, frozen layers, learning rates, checkpoints and
copies, around every base of tests/helpers/optimizers.py. After each step in float64, the weights and scales must equal
the reference's. In every dtype, the counters must match too, checkpoints and copies must be bit-equal, and what should
not move must stay.

CI runs the same sequences every time. `make test-long`, or MECHANIC_EXAMPLES=33 pytest FILE, runs 33
times as many, different ones each time.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from judge import Judge
from optimizers import OPTIMIZERS, Row
from problems import differences, everything
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, Settings, mechanize

TIMES = float(os.environ.get("MECHANIC_EXAMPLES", "1"))
TOLERANCE = 1e-8
"""Relative to the largest weight and to the scale. Both sides get the same gradients, so errors hardly grow."""
ROUNDED = {"NAdam": ["mu_product"], "ASGD": ["eta", "mu"]}
"""State that torch keeps in float32 but loads in the weights' dtype, so even a base alone does not resume exactly."""
TOLERANCE_OF_ROUNDED = 1e-5
WALKING_MEMORY = ("fused",)
"""torch's fused kernels read moments, weights and gradients as flat memory in the same order."""
HUGE = 1e6
"""The weight at which a run with a far too high learning rate is no longer compared."""

SHAPES = [(), (3,), (0,), (17,), (2, 3), (4, 1, 2), (2, 3, 2, 2)]
MATRICES = [(2, 3), (4, 2), (3, 3)]
LRS = [1.0, 0.1, 3.0, 1e-3, 1e-6]
DTYPES = [torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16]
FACTORS = [0.0, 0.5, 0.1, 2.0, 100.0]

seeds = st.integers(0, 2**16)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the settings."""
    chosen: dict[str, Any] = {
        "rule": draw(st.sampled_from(["relative"] * 4 + ["paper", "experiments", "optax", "theory"])),
        "scope": draw(st.sampled_from(["all", "group"])),
        "max_scale": draw(st.sampled_from([None, None, 0.05])),
    }
    if chosen["rule"] == "relative":
        return chosen
    published = {
        "s_decay": draw(st.sampled_from([0.0, 0.01, 1.0])),
        "s_init": draw(st.sampled_from([1e-2, 1e-6])),
        "eps": 1e-8,
        "normalize_lr": draw(st.sampled_from([True, True, False])),
        "betas": draw(st.sampled_from([(0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999), (0.5,), (1.0, 0.9)])),
    }
    return {**chosen, **published}


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a param group; the shapes are chosen later, when the base is known."""
    return {
        "shapes": draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)),
        "lr": draw(st.sampled_from(LRS)),
        "maximize": draw(st.sampled_from([False, False, False, True])),
    }


class TrainingLoop(RuleBasedStateMachine):
    """The package on `params`, the reference beside it, and events that may happen to them."""

    rows = OPTIMIZERS

    @initialize(
        data=st.data(),
        options=options(),
        first=st.lists(groups(), min_size=1, max_size=2),
        dtype=st.sampled_from(DTYPES),
    )
    def begin(self, data: st.DataObject, options: dict[str, Any], first: list[dict[str, Any]], dtype: Any) -> None:
        self.row: Row = data.draw(st.sampled_from(self.rows), label="base")
        self.variant = data.draw(st.sampled_from(self.variants()), label="variant")
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(data.draw(seeds))
        self.options = options
        drawn = [self.group_of(g) for g in first]
        self.params = [p for group in drawn for p in group["params"]]
        self.targets = [self.randn(p.shape) for p in self.params]
        self.opt = self.built(drawn)
        self.judge = Judge(
            self.params,
            lambda xs: self.row.build(self.regrouped(drawn, xs)),
            counted_from_the_start=self.row.name == "Adagrad",
            ignores_lr=self.row.cls is torch.optim.Rprop,
            **self.options,
        )
        self.scheduler: Any = None
        self.is_over = False
        for _ in range(data.draw(st.integers(0, 6), label="steps before anything happens")):
            self.make_step(self.gradients())

    def variants(self) -> list[str]:
        """The variants to test. torch's fused SGD fails on a momentum that comes late, with or without Mechanic."""
        if not self.row.variants_agree:
            return ["for-loop"]
        every = ["auto", "for-loop", *self.row.variants]
        return [v for v in every if v not in WALKING_MEMORY or not self.row.kwargs.get("momentum")]

    def group_of(self, drawn: dict[str, Any]) -> dict[str, Any]:
        shapes = MATRICES if self.row.matrices_only or self.row.name == "Adafactor" else SHAPES
        params = [nn.Parameter(self.randn(shapes[i % len(shapes)]).to(self.dtype)) for i in drawn["shapes"]]
        group = {"params": params, "lr": drawn["lr"] * self.row.kwargs["lr"]}
        return {**group, "maximize": True} if drawn["maximize"] and self.row.maximize else group

    def randn(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    @staticmethod
    def regrouped(groups: list[dict[str, Any]], xs: list[Tensor]) -> list[dict[str, Any]]:
        rest = iter(xs)
        return [{**group, "params": [next(rest) for _ in group["params"]]} for group in groups]

    def built(self, groups: list[dict[str, Any]]) -> MechanicOptimizer:
        if self.variant == "auto":
            base = self.row.cls(groups, **self.row.kwargs)
        else:
            base = self.row.build(groups, self.variant)
        return mechanize(base, settings=Settings(**self.options))

    # ---------------------------------------------------------------- steps

    @rule(seed=seeds, missing=st.sets(st.integers(0, 5), max_size=3), with_closure=st.booleans())
    def step(self, seed: int, missing: set[int], with_closure: bool) -> None:
        self.generator.manual_seed(seed)
        self.make_step([None if i in missing else g for i, g in enumerate(self.gradients())], with_closure=with_closure)

    @rule(seed=seeds, count=st.integers(2, 8))
    def some_steps(self, seed: int, count: int) -> None:
        self.generator.manual_seed(seed)
        for _ in range(count):
            self.make_step(self.gradients())

    @rule(seed=seeds, bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]), where=st.integers(0, 20))
    def step_that_is_not_finite(self, seed: int, bad: float, where: int) -> None:
        self.generator.manual_seed(seed)
        gradients = self.gradients()
        present = [g for g in gradients if g is not None and g.numel()]
        if present:
            chosen = present[where % len(present)]
            chosen[(0,) * chosen.dim()] = bad
        self.make_step(gradients)

    @rule(with_closure=st.booleans())
    def step_without_gradients(self, with_closure: bool) -> None:
        self.make_step([None] * len(self.params), with_closure=with_closure)

    @rule()
    def step_of_zeros(self) -> None:
        self.make_step([torch.zeros_like(p) if p.requires_grad else None for p in self.params])

    def gradients(self) -> list[Tensor | None]:
        """Noisy gradients of a quadratic, at the reference's weights if those are comparable."""
        weights = self.judge.x if self.dtype is torch.float64 else [p.detach().double() for p in self.params]
        noisy = [x - t + 0.3 * self.randn(x.shape) for x, t in zip(weights, self.targets, strict=True)]
        return [g.to(self.dtype) if p.requires_grad else None for p, g in zip(self.params, noisy, strict=True)]

    def make_step(self, gradients: list[Tensor | None], *, with_closure: bool = False) -> None:
        if self.is_over:
            return
        for mine, group in zip(self.judge.base.param_groups, self.opt.param_groups, strict=True):
            mine.update({key: group[key] for key in ("lr", "initial_lr") if key in group})
        made = self.judge.steps
        self.judge.step([None if g is None else g.double() for g in gradients])

        def closure() -> float:
            for p, g in zip(self.params, gradients, strict=True):
                p.grad = None if g is None else g.clone()
            return 7.0

        is_made, before = self.judge.steps != made, everything(self.opt, without=("skipped",))
        still = [p.detach().clone() for p in self.params if not p.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if with_closure:
                assert self.opt.step(closure) == 7.0
            else:
                closure()
                self.opt.step()
            metrics = self.opt.metrics()
        assert (metrics["mechanic/steps"], metrics["mechanic/skipped_steps"]) == (self.judge.steps, self.judge.skipped)
        if not is_made:
            assert not differences(before, everything(self.opt, without=("skipped",)))
        assert all(map(torch.equal, still, [p for p in self.params if not p.requires_grad]))
        if self.dtype is torch.float64:
            self.compare()
        if self.scheduler is not None:
            self.scheduler.step()

    def compare(self) -> None:
        largest = max((x.abs().max().item() for x in self.judge.x if x.numel()), default=0.0)
        self.is_over = not largest < HUGE
        if self.is_over:
            return
        tolerance = TOLERANCE_OF_ROUNDED if self.row.name in ROUNDED else TOLERANCE
        for index, (p, x) in enumerate(zip(self.params, self.judge.x, strict=True)):
            off = (p.detach().double() - x).abs().max().item() if p.numel() else 0.0
            assert off <= tolerance * (1 + largest), (index, off, self.opt.scales.tolist(), self.judge.played)
        for mine, theirs in zip(self.opt.scales.tolist(), self.judge.played, strict=True):
            assert abs(mine - theirs) <= tolerance * abs(theirs) + 1e-300, (self.opt.scales.tolist(), self.judge.played)

    # ---------------------------------------------------------------- between steps

    @precondition(lambda self: len(self.params) < 8)
    @rule(group=groups())
    def add_group(self, group: dict[str, Any]) -> None:
        new = self.group_of(group)
        extra = {key: value for key, value in new.items() if key != "params"}
        self.judge.add_group([p.detach() for p in new["params"]], **extra)
        self.params += new["params"]
        self.targets += [self.randn(p.shape) for p in new["params"]]
        self.opt.add_param_group(new)
        self.scheduler = None  # torch's schedulers know only the groups they were built with

    @rule(index=st.integers(0, 7), trains=st.booleans())
    def freeze_parameter(self, index: int, trains: bool) -> None:
        index %= len(self.params)
        self.params[index].requires_grad_(trains)
        self.judge.trains[index] = trains

    @rule(holds=st.booleans())
    def freeze_scale(self, holds: bool) -> None:
        if max(self.judge.played) > 0:
            (self.opt.freeze if holds else self.opt.unfreeze)()
            self.judge.frozen = holds

    @rule(factor=st.sampled_from(FACTORS), only=st.sampled_from([None, None, 0, 1]))
    def set_lr(self, factor: float, only: int | None) -> None:
        for index, group in enumerate(self.opt.param_groups):
            if only is None or only == index:
                group["lr"] = min(self.row.kwargs["lr"] * factor, 10.0)

    @rule(kind=st.sampled_from(["warm-up", "decay", "cosine"]))
    def schedule(self, kind: str) -> None:
        schedulers = torch.optim.lr_scheduler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one was built before the first step, another stepped before it
            self.scheduler = {
                "warm-up": lambda: schedulers.LambdaLR(self.opt, lambda step: min(step / 4, 1.0)),
                "decay": lambda: schedulers.ExponentialLR(self.opt, 0.8),
                "cosine": lambda: schedulers.CosineAnnealingLR(self.opt, 5),
            }[kind]()

    @rule(is_used=st.booleans())
    def reload(self, is_used: bool) -> None:
        """Reloads from a file into an optimizer over other tensors, which has made steps of its own if `is_used`."""
        file = io.BytesIO()
        torch.save(self.opt.state_dict(), file)
        file.seek(0)
        saved, before = torch.load(file, weights_only=True), everything(self.opt)
        self.params = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in self.params]
        names = self.row.kwargs.keys() | {"lr", "maximize", "initial_lr"}
        kept = [{k: v for k, v in g.items() if k in names or k == "params"} for g in self.opt.param_groups]
        self.opt = self.built(self.regrouped(kept, self.params))
        if is_used:
            self.use(self.opt)
        self.opt.load_state_dict(saved)
        after = everything(self.opt)
        for name in ROUNDED.get(self.row.name, ()):
            for entries in (*before["state"].values(), *after["state"].values()):
                entries.pop(name, None)
        assert not differences(before, after)
        self.scheduler = None

    def use(self, opt: MechanicOptimizer) -> None:
        weights = [p.detach().clone() for p in self.params]
        for _ in range(2):
            for p in self.params:
                p.grad = torch.ones_like(p)
            opt.step()
        with torch.no_grad():
            for p, x in zip(self.params, weights, strict=True):
                p.copy_(x)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copy(self, how: str) -> None:
        before, pair = everything(self.opt), (self.params, self.opt)
        self.params, self.opt = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        assert not differences(before, everything(self.opt))
        self.scheduler = None

    @precondition(lambda self: self.variant not in WALKING_MEMORY)
    @rule(is_channels_last=st.booleans())
    def change_memory_format(self, is_channels_last: bool) -> None:
        for p in self.params:
            if p.dim() == 4:
                kind = torch.channels_last if is_channels_last else torch.contiguous_format
                p.data = p.data.contiguous(memory_format=kind)

    @rule()
    def change_weights(self) -> None:
        """Changes weights from outside, which must keep their values."""
        with torch.no_grad():
            for i, p in enumerate(self.params):
                p.mul_(0.5)
                shift = p.detach().double() - self.judge.x[i]
                self.judge.x[i] = self.judge.x[i] + shift
                if self.judge.takes_along(i):
                    self.judge.x_ref[i] = self.judge.x_ref[i] + shift


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_training_loops(row: Row) -> None:
    machine = type(f"Loop{row.name}", (TrainingLoop,), {"rows": [row]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(5 * TIMES),
            stateful_step_count=25,
            derandomize=TIMES == 1,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate] if TIMES == 1 else list(Phase),
        ),
    )
