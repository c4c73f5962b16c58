"""`max_grad_norm`: a clipping step equals a step after `torch.nn.utils.clip_grad_norm_` up to rounding."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import backward, differences, everything, perceptron, train
from reference_default import Default
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_

from mechanic_plugins import MechanicOptimizer, Settings, demechanize, mechanize

NORM = 0.35
"""`perceptron`'s gradients are longer than this, except for the quarter that `Both.train` shortens."""
ADAMW = OPTIMIZERS[[row.name for row in OPTIMIZERS].index("AdamW")]
Build = Callable[[Any], torch.optim.Optimizer]


class Both:
    """The same training twice: with `max_grad_norm`, and with a clip before each step."""

    def __init__(
        self,
        build: Build,
        *,
        dtype: torch.dtype = torch.float64,
        norm: float = NORM,
        model: Callable[[torch.dtype], nn.Module] = perceptron,
        **options: Any,
    ) -> None:
        self.norm = norm
        self.models = model(dtype), model(dtype)
        mine, theirs = (build(model.parameters()) for model in self.models)
        self.opts = mechanize(mine, max_grad_norm=norm, **options), mechanize(theirs, **options)
        self.norms: list[float] = []

    def train(self, steps: int, *, change: Callable[[nn.Module, int], None] | None = None, first: int = 0) -> None:
        """Trains both. `change` modifies model and gradients between backward and step."""
        for step in range(first, first + steps):
            for model in self.models:
                backward(model, step)
                for p in (p for p in model.parameters() if p.grad is not None):
                    p.grad *= 0.4 if step % 4 == 3 else 1.0
                if change is not None:
                    change(model, step)
            norm = clip_grad_norm_(self.models[1].parameters(), self.norm)
            for opt in self.opts:
                opt.step()
            self.norms.append(norm.item())
            seen, rtol = self.opts[0].grad_norm, 1e-12 if self._is_wide else 1e-2
            torch.testing.assert_close(seen, norm.double(), rtol=rtol, atol=0)

    @property
    def _is_wide(self) -> bool:
        return next(self.models[0].parameters()).dtype is torch.float64

    def assert_same(self, *, tolerance: float = 1e-12, steps: int | None = None) -> None:
        """Checks equality, and that it means something: the scale is above 0 and only some gradients were clipped."""
        mine, theirs = self.opts
        assert theirs.scale > 0
        assert min(self.norms) < self.norm < max(self.norms)
        weights = [_flat(model.parameters()) for model in self.models]
        assert _distance(*weights) <= tolerance
        for name in "srmv":
            assert _distance(getattr(mine.tuner, name), getattr(theirs.tuner, name)) <= 20 * tolerance, name
        assert mine.tuner.steps == theirs.tuner.steps == (len(self.norms) if steps is None else steps)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item()


def matrices(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).to(dtype)


VARIANTS = [(row, variant) for row in OPTIMIZERS for variant in ("for-loop", *row.variants)]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "variant"), VARIANTS, ids=str)
def test_every_base_sees_clipped_gradients(row: Row, variant: str) -> None:
    if row.matrices_only:
        torch.manual_seed(0)
        template = matrices(torch.float64)
        both = Both(row.build, model=lambda dtype: copy.deepcopy(template))
    else:
        both = Both(lambda params: row.build(params, variant))
    both.train(20)
    both.assert_same()


@pytest.mark.parametrize(
    "options",
    [
        {"settings": Settings(rule="paper", s_init=1e-3, s_decay=0.1)},
        {"rule": "theory"},
        {"backend": "foreach"},
    ],
    ids=str,
)
def test_rules_and_backends(options: dict[str, Any]) -> None:
    both = Both(ADAMW.cls, **options)
    both.train(40)
    both.assert_same()


@pytest.mark.parametrize("row", [row for row in OPTIMIZERS if row.name in ("SGD-momentum", "AdamW")], ids=str)
@pytest.mark.parametrize("scope", ["all", "group"])
def test_the_reference_agrees(row: Row, scope: Any) -> None:
    """Covers groups that maximize or minimize, parameters without a gradient, and outliers."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (5,), (2,))]
    noise = torch.randn(60, 19, dtype=torch.float64, generator=generator)

    def build(x: Sequence[Tensor]) -> torch.optim.Optimizer:
        return row.build([{"params": x[:1]}, {"params": x[1:], "lr": 0.1, "maximize": True}])

    x = [p.clone().requires_grad_() for p in start]
    opt = mechanize(build(x), scope=scope, max_grad_norm=5.0)
    reference = Default(start, build, scope=scope, max_grad_norm=5.0)
    norms = []
    for step in range(60):
        for mine, theirs, sign in zip(x, reference.x, (1, -1, -1), strict=True):
            size, at = (1e3 if step % 20 == 5 else 1.0), noise[step, : mine.numel()].view_as(mine)
            mine.grad, theirs.grad = (sign * size * (p.detach() - 1 + at) for p in (mine, theirs))
        if step % 3 == 0:
            x[2].grad = reference.x[2].grad = None
        opt.step()
        reference.step([p.grad for p in reference.x])
        norms.append(reference.grad_norm)
        assert opt.grad_norm.item() == pytest.approx(reference.grad_norm, rel=1e-12)
        assert _distance(_flat(x), _flat(reference.x)) <= 1e-12
        for name in "srmv":
            wanted = torch.from_numpy(reference.vectors(name))
            assert _distance(getattr(opt.tuner, name), wanted) <= 1e-11, (step, name)
    assert opt.scale > 0
    assert min(norms) < 5.0 < max(norms)
    assert reference.skipped == opt.metrics()["mechanic/skipped_steps"] == 0


@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("norm", [NORM, 100.0])
def test_outliers_are_judged_after_clipping(size: float, norm: float) -> None:
    """As with a clip before the step, both for the first gradient, which may be forgotten later, and in mid-run."""

    def change(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= {0: size, 20: 1e6}.get(step, 1.0)

    both = Both(ADAMW.cls, norm=norm)
    both.train(40, change=change)
    both.assert_same(steps=int(both.opts[1].tuner.steps))
    assert [opt.metrics()["mechanic/skipped_steps"] for opt in both.opts] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", [row for row in OPTIMIZERS if row.name in ("SGD", "AdamW", "NAdam")], ids=str)
def test_narrow_gradients(row: Row, dtype: torch.dtype) -> None:
    """torch computes the norm of 16-bit gradients in 16 bits, so its factor has that rounding error."""
    both = Both(row.build, dtype=dtype)
    both.train(10)  # later gradients are shorter, where bf16 weights diverge
    both.assert_same(tolerance={torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype])


def test_a_complex_parameter_and_two_dtypes() -> None:
    def build() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        kinds = (torch.complex128, torch.float64, torch.float32)
        return [nn.Parameter(torch.randn(3, generator=generator, dtype=kind)) for kind in kinds]

    lists = build(), build()
    norms = (1.0, None)
    opts = [mechanize(torch.optim.AdamW(x, lr=0.1), max_grad_norm=norm) for x, norm in zip(lists, norms, strict=True)]
    for step in range(30):
        for params in lists:
            for p in params:
                p.grad = p.detach() - 0.3 * step * torch.ones_like(p)
        norm = math.sqrt(sum(p.grad.abs().double().square().sum().item() for p in lists[1]))  # type: ignore[union-attr]
        for p in lists[1]:
            p.grad *= min(1.0, 1.0 / (norm + 1e-6))
        for opt in opts:
            opt.step()
    for p, q in zip(*lists, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if p.dtype is torch.float32 else 1e-7, atol=0)


def test_frozen_scale_and_lr_zero() -> None:
    both = Both(lambda params: torch.optim.Adam(params, lr=0.1))
    both.train(15)
    for opt in both.opts:
        opt.freeze()
    both.train(5, first=15)
    for opt in both.opts:
        opt.unfreeze()
        opt.param_groups[0]["lr"] = 0.0
    both.train(5, first=20)
    for opt in both.opts:
        opt.param_groups[0]["lr"] = 0.05
    both.train(10, first=25)
    both.assert_same()


def test_a_parameter_joins_and_another_is_frozen() -> None:
    """A frozen parameter has no gradient, and clip_grad_norm_ leaves it out too."""

    def change(model: Any, step: int) -> None:
        model[0].bias.requires_grad_(step < 10)
        if step < 5 or not model[0].bias.requires_grad:
            model[0].bias.grad = None

    both = Both(ADAMW.cls)
    both.train(25, change=change)
    both.assert_same()


def test_a_group_without_any_gradient() -> None:
    def change(model: Any, step: int) -> None:
        if step % 3 == 0:
            model[2].zero_grad()

    def build(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return torch.optim.AdamW([{"params": [first, others[0]]}, {"params": others[1:]}])

    both = Both(build, scope="group")
    both.train(25, change=change)
    both.assert_same()


def test_a_grad_scaler_unscales_first() -> None:
    models = perceptron(), perceptron()
    opts = [mechanize(torch.optim.AdamW(models[0].parameters()), max_grad_norm=NORM)]
    opts.append(mechanize(torch.optim.AdamW(models[1].parameters())))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in opts]
    for step in range(20):
        for model, opt, scaler in zip(models, opts, scalers, strict=True):
            backward(model, step)
            scaler.scale(torch.ones(()))
            for p in model.parameters():
                p.grad *= 2.0**10  # type: ignore[operator]
            if opt is opts[1]:
                scaler.unscale_(opt)
                clip_grad_norm_(model.parameters(), NORM)
            scaler.step(opt)
            scaler.update()
    assert opts[0].tuner.steps == 20
    assert _distance(*(_flat(model.parameters()) for model in models)) <= 2e-5


# ------------------------------------------------------------------------------------------------ what it leaves alone


@pytest.mark.parametrize("variant", ["for-loop", "fused"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips_the_step_and_leaves_the_gradients(bad: float, variant: str) -> None:
    model = perceptron()
    opt = mechanize(ADAMW.build(model.parameters(), variant), max_grad_norm=NORM)
    train(model, opt, 10)
    backward(model, 10)
    model[2].weight.grad[1, 1] = bad
    before = everything(opt, without=("skipped",))
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="was not finite: the step was skipped"):
        opt.step()
    assert not differences(before, everything(opt, without=("skipped",)))
    assert not differences(gradients, [p.grad for p in model.parameters()])
    assert not math.isfinite(opt.grad_norm)
    train(model, opt, 5, first=11)
    assert all(p.isfinite().all() for p in model.parameters())


def test_infinity_clips_nothing() -> None:
    models = perceptron(), perceptron()
    opts = [mechanize(torch.optim.AdamW(models[0].parameters()), max_grad_norm=math.inf)]
    opts.append(mechanize(torch.optim.AdamW(models[1].parameters())))
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 20)
    assert not differences(everything(opts[0]), everything(opts[1]))


def test_short_gradients_are_not_touched() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), max_grad_norm=1e3)
    backward(model, 0)
    gradients = [p.grad.clone() for p in model.parameters()]
    opt.step()
    assert not differences(gradients, [p.grad for p in model.parameters()])


def test_who_clips_as_well_gets_no_surprise() -> None:
    """Clipping twice equals clipping once, except for the 1e-6 that clip_grad_norm_ adds to the norm."""
    models = perceptron(torch.float64), perceptron(torch.float64)
    opts = [mechanize(torch.optim.SGD(models[0].parameters()), max_grad_norm=NORM)]
    opts.append(mechanize(torch.optim.SGD(models[1].parameters())))
    for step in range(20):
        for model, opt in zip(models, opts, strict=True):
            backward(model, step)
            clip_grad_norm_(model.parameters(), NORM)
            opt.step()
    assert _distance(*(_flat(model.parameters()) for model in models)) <= 2e-5
    assert opts[0].grad_norm <= NORM * (1 + 1e-9)


def test_a_sparse_gradient_is_refused_before_anything_is_clipped() -> None:
    dense, table = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    opt = mechanize(torch.optim.SGD([dense, *table.parameters()]), max_grad_norm=1.0)
    (table(torch.tensor([1])).sum() + 5 * dense.sum()).backward()
    with pytest.raises(ValueError, match="is sparse"):
        opt.step()
    assert dense.grad is not None
    assert dense.grad.tolist() == [5.0, 5.0, 5.0]


# ------------------------------------------------------------------------------------------------ closures


def test_a_closure() -> None:
    both = Both(ADAMW.cls)
    both.train(3)
    for model, opt in zip(both.models, both.opts, strict=True):

        def closure(model: nn.Module = model, opt: MechanicOptimizer = opt) -> Tensor:
            loss = backward(model, 3)
            if opt is both.opts[1]:
                clip_grad_norm_(model.parameters(), NORM)
            return loss

        opt.step(closure)
    both.train(10, first=4)
    both.assert_same(steps=14)


def test_a_base_that_evaluates_the_closure_again_is_refused() -> None:
    """Its second gradients would not be clipped."""

    class Again(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            return super().step()

    model = perceptron()
    opt = mechanize(Again(model.parameters(), lr=0.1), max_grad_norm=NORM)
    weights = _flat(model.parameters())
    with pytest.raises(RuntimeError, match=r"Again evaluates the closure again.*clip_grad_norm_ in the closure"):
        opt.step(lambda: backward(model, 0))
    assert torch.equal(weights, _flat(model.parameters()))
    assert opt.metrics()["mechanic/steps"] == 0


# ------------------------------------------------------------------------------------------------ grad_norm


def test_the_norm_is_known_without_clipping_too() -> None:
    model = perceptron(torch.float64)
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    assert (opt.grad_norm.item(), opt.metrics()["mechanic/grad_norm"]) == (0.0, 0.0)
    for step in range(3):
        backward(model, step)
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        opt.step()
        assert opt.grad_norm.shape == ()
        torch.testing.assert_close(opt.grad_norm, expected, rtol=1e-12, atol=0)
        assert opt.metrics()["mechanic/grad_norm"] == opt.grad_norm.item()
    opt.load_state_dict(opt.state_dict())
    assert opt.grad_norm == 0  # no step since the load


def test_a_norm_read_earlier_stays() -> None:
    """Loggers collect tensors and read them later."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), max_grad_norm=NORM)
    train(model, opt, 1)
    norm = opt.grad_norm
    known = norm.item()
    train(model, opt, 3, first=1)
    assert norm.item() == known != opt.grad_norm.item()


# ------------------------------------------------------------------------------------------------ the option


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "1", True, [1.0], torch.ones(())], ids=repr)
def test_bad_values_are_refused(value: Any) -> None:
    p = nn.Parameter(torch.ones(1))
    for optimizer in (torch.optim.SGD, torch.optim.SGD([p])):
        with pytest.raises(ValueError, match=r"max_grad_norm must be None or a number > 0, got .*1\.0 is a common"):
            mechanize(optimizer, max_grad_norm=value)
    opt = mechanize(torch.optim.SGD([p]), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm must be None or a number > 0"):
        opt.max_grad_norm = value
    assert opt.max_grad_norm == 1.0


def test_copies_and_classes_keep_it() -> None:
    kind = mechanize(torch.optim.AdamW, max_grad_norm=NORM)
    model = perceptron(torch.float64)
    opt = kind(model.parameters())
    train(model, opt, 5)
    copied, pickled = copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))
    train(model, opt, 10, first=5)
    for twin, twins in (copied, pickled):
        assert twins.max_grad_norm == opt.max_grad_norm == NORM
        train(twin, twins, 10, first=5)
        assert not differences(everything(opt), everything(twins))
    assert pickle.loads(pickle.dumps(kind)).options == {"max_grad_norm": NORM}
    assert mechanize(torch.optim.AdamW)(perceptron(torch.float64).parameters()).max_grad_norm is None


@pytest.mark.parametrize("later", [None, 0.1, NORM])
def test_a_run_resumes_with_the_norm_it_is_given(later: float | None) -> None:
    """Like clipping in the loop, the norm is each run's choice: no checkpoint stores it, and nothing warns."""
    model = perceptron(torch.float64)
    opt = mechanize(torch.optim.AdamW(model.parameters()), max_grad_norm=NORM)
    train(model, opt, 5)
    assert "grad_norm" not in repr(opt.state_dict()["param_groups"])
    twin = copy.deepcopy(model)
    twins = mechanize(torch.optim.AdamW(twin.parameters()), max_grad_norm=later)
    twins.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.max_grad_norm = later  # can be changed at any time
    for each, optimizer in ((model, opt), (twin, twins)):
        train(each, optimizer, 10, first=5)
    assert not differences(everything(opt), everything(twins))


def test_mechanizing_again_takes_the_new_one() -> None:
    model = perceptron()
    base = torch.optim.AdamW(model.parameters())
    train(model, mechanize(base, max_grad_norm=NORM), 3)
    assert mechanize(base).max_grad_norm is None


def test_demechanize_leaves_no_clipping_behind() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), max_grad_norm=1e-3)
    train(model, opt, 10)
    plain = demechanize(opt)
    backward(model, 10)
    gradients = [p.grad.clone() for p in model.parameters()]
    plain.step()
    assert not differences(gradients, [p.grad for p in model.parameters()])


def test_the_dry_run_of_distributed_checkpoints_leaves_no_trace() -> None:
    models = perceptron(), perceptron()
    opts = [mechanize(torch.optim.AdamW(model.parameters()), max_grad_norm=NORM) for model in models]
    get_optimizer_state_dict(models[0], opts[0])
    assert opts[0].grad_norm == 0
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 10)
    assert not differences(everything(opts[0]), everything(opts[1]))
