"""Non-finite gradients (scaled, clipped or accumulated) and errors inside a step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import backward, differences, everything, filled, perceptron, train
from torch import nn

from mechanic_plugins import mechanize

ADAMW = torch.optim.AdamW
SKIPPED = "mechanic/skipped_steps"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD-momentum", "AdamW", "Adagrad")], ids=str)
@pytest.mark.parametrize("variant", ["for-loop", "fused"])
def test_one_gradient_that_is_not_finite_skips_the_step_whole(
    bad: float, dtype: torch.dtype, row: Row, variant: str
) -> None:
    """In similar packages the scale becomes NaN for good. Here only a count changes, and training continues."""
    model = perceptron(dtype)
    opt = mechanize(row.build(model.parameters(), variant))
    train(model, opt, 10)
    before, metrics = everything(opt, without=("skipped",)), opt.metrics()
    for step in (10, 11):
        backward(model, step)
        model[2].weight.grad[1, 3] = bad
        if step == 10:
            with pytest.warns(UserWarning, match="was not finite: the step was skipped"):
                opt.step()
        else:
            opt.step()  # warns only once: a second warning would be an error here
    assert not differences(before, everything(opt, without=("skipped",)))
    after = opt.metrics()
    assert not math.isfinite(after.pop("mechanic/grad_norm"))
    assert after.pop("mechanic/moved") > 0  # the skipped step saw the move of the one before
    del metrics["mechanic/grad_norm"], metrics["mechanic/moved"]
    assert after == {**metrics, SKIPPED: metrics[SKIPPED] + 2}
    train(model, opt, 5, first=12)
    assert opt.metrics()["mechanic/steps"] == 15
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_first_step_that_is_not_finite_leaves_no_state() -> None:
    """SGD would keep a NaN momentum for good."""
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    filled(model.parameters(), float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert not opt.state
    assert opt.metrics()[SKIPPED] == 1


def test_the_count_of_skipped_steps_survives_a_checkpoint() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    filled(model.parameters(), float("inf"))
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    twin = mechanize(ADAMW(model.parameters()))
    twin.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="not finite"):
        metrics = twin.metrics()
    assert (metrics["mechanic/steps"], metrics[SKIPPED]) == (3, 1)


def test_a_grad_scaler_skips_an_overflow_and_unscales_the_rest() -> None:
    """With fp16 autocast on the CPU, the overflow halves the loss scale and changes nothing else."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    losses = []
    for step in range(60):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        before, loss_scale = everything(opt), scaler.get_scale()
        if step == 20:
            model[0].bias.grad[0] = float("inf")
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step == 20:
            assert not differences(before, everything(opt))
            assert scaler.get_scale() == loss_scale / 2
        losses.append(loss.item())
    assert opt.metrics()["mechanic/steps"] == 59
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_grad_scaler_unscales_for_a_fused_base_too(name: str) -> None:
    """A fused base declares that it unscales gradients itself, which would leave scaled ones for Mechanic's sums."""
    row = next(r for r in OPTIMIZERS if r.name == name)
    models = perceptron(), perceptron()
    opts = [mechanize(row.build(m.parameters(), "fused")) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    train(models[0], opts[0], 20)
    for step in range(20):
        backward(models[1], step)
        scaler.scale(torch.ones(()))
        for p in models[1].parameters():
            p.grad.mul_(2.0**7)
        scaler.step(opts[1])
        scaler.update()
    assert not differences(everything(opts[0]), everything(opts[1]))


def test_clipped_and_accumulated_gradients_are_what_is_seen() -> None:
    models = [perceptron(torch.float64) for _ in range(2)]
    opts = [mechanize(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
    for step in range(10):
        grads = []
        for part in (0, 1):
            backward(models[0], 2 * step + part)
            grads.append([p.grad for p in models[0].parameters()])
        for p, q, a, b in zip(models[0].parameters(), models[1].parameters(), *grads, strict=True):
            p.grad = a + b
            q.grad = a.clone()
            q.grad += b
        for model, opt in zip(models, opts, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    assert not differences(everything(opts[0]), everything(opts[1]))
    total = sum(p.grad.square().sum() for p in models[0].parameters()).sqrt()
    assert total.item() == pytest.approx(0.1, rel=1e-3)


class Breaks(torch.optim.SGD):
    """Moves some weights and then raises `failing`, if set."""

    failing: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if self.failing is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise self.failing
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_error_inside_the_base_leaves_weights_and_tuner_alone(error: BaseException, dtype: torch.dtype) -> None:
    """The tuner used to advance while the weights were restored: the next step moved them by the wrong difference."""
    model = perceptron(dtype)
    base = Breaks(model.parameters(), lr=1.0)
    opt = mechanize(base)
    train(model, opt, 10)
    before = everything(opt)
    backward(model, 10)
    base.failing = error
    with pytest.raises(type(error)):
        opt.step()
    base.failing = None
    assert not differences(before, everything(opt))
    assert opt.param_groups[0]["lr"] == 1.0


def test_a_step_repeated_after_an_error_is_the_step_that_was_meant() -> None:
    models = perceptron(), perceptron()
    bases = [Breaks(m.parameters(), lr=0.5) for m in models]
    opts = [mechanize(base) for base in bases]
    for step in range(20):
        train(models[0], opts[0], 1, first=step)
        backward(models[1], step)
        bases[1].failing = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            opts[1].step()
        bases[1].failing = None
        opts[1].step()
    assert not differences(everything(opts[0]), everything(opts[1]))


@pytest.mark.parametrize("rule", [None, "paper"])
@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_no_step_is_made_at_a_learning_rate_that_is_none(lr: float, rule: Any) -> None:
    """A schedule that fell below 0 stopped the default rule with a math domain error, and NaN destroyed the weights."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.1), rule=rule)
    train(model, opt, 5)
    before = everything(opt)
    opt.param_groups[0]["lr"] = lr
    with pytest.warns(UserWarning, match="lr of param group 0 is .*: the step was not made"):
        train(model, opt, 1, first=5)
    train(model, opt, 1, first=6)  # warns only once
    opt.param_groups[0]["lr"] = 0.1
    assert not differences(before, everything(opt))
    train(model, opt, 1, first=7)
    assert opt.metrics()["mechanic/steps"] == 6


@pytest.mark.parametrize("rule", [None, "paper"])
def test_a_run_goes_on_after_a_schedule_that_falls_below_zero(rule: Any) -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), rule=rule)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(80):
            train(model, opt, 1, first=step)
            schedule.step()
    assert ["need a floor" in str(warning.message) for warning in caught] == [True]
    assert opt.metrics()["mechanic/steps"] == 31


@pytest.mark.parametrize("rule", [None, "paper"])
def test_an_engines_step_that_is_skipped_moves_nothing(rule: Any) -> None:
    """Engines decide for all ranks, then step part by part: a skipped step moved the weights by the scale in force."""
    p = torch.nn.Parameter(torch.ones(4))
    opt = mechanize(torch.optim.SGD([p], lr=0.1), rule=rule)
    slot = "mechanic_delta" if rule else "mechanic_ref"
    for grad in (1.0, 1.0, 1.0, 1.0, 1.0, math.nan):
        p.grad = torch.full((4,), grad)
        before = p.detach().clone()
        part = opt.param_groups[0], p.detach(), p.grad, opt.state.get(p, {}).get(slot)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decision = opt.decide(opt.local_sums([part]))
        with opt.applying(decision):
            opt.step()
    assert torch.equal(before, p)
    assert opt.metrics()["mechanic/skipped_steps"] == 1
