"""Closures, hooks, the profiler and zero_grad()."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from problems import backward, differences, everything, filled, perceptron, train
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mechanic_plugins import mechanize
from mechanic_plugins.weights.slots import REF

ADAMW = torch.optim.AdamW


@pytest.mark.parametrize("returns", ["loss", "nothing"])
def test_a_closure_is_called_once_and_gives_the_same_training(returns: str) -> None:
    models = perceptron(), perceptron()
    train(models[0], mechanize(ADAMW(models[0].parameters())), 10)
    opt = mechanize(ADAMW(models[1].parameters()))
    calls: list[Tensor] = []

    def closure() -> Tensor | None:
        assert torch.is_grad_enabled()
        calls.append(backward(models[1], len(calls)))
        return calls[-1] if returns == "loss" else None

    for step in range(10):
        result = opt.step(closure=closure)
        assert len(calls) == step + 1
        assert result is (calls[-1] if returns == "loss" else None)
    assert not differences(models[0].state_dict(), models[1].state_dict())


def test_a_base_that_calls_the_closure_again_gets_a_new_loss() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            losses.extend([closure(), closure()])
            super().step()
            return losses[-2]

    losses: list[Tensor] = []
    model = perceptron()
    opt = mechanize(Twice(model.parameters(), lr=1.0))
    calls = []
    first = opt.step(lambda: calls.append(0) or backward(model, len(calls)))  # type: ignore[func-returns-value]
    assert len(calls) == 2
    assert first is losses[0]
    assert losses[0] is not losses[1]


def test_an_error_in_the_closure_changes_nothing() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 5)
    before = everything(opt)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert not differences(before, everything(opt))


def test_step_hooks_fire_once_on_the_object_they_were_put_on() -> None:
    model = perceptron()
    base = ADAMW(model.parameters())
    fired: list[str] = []
    base.register_step_pre_hook(lambda *_: fired.append("base pre"))
    base.register_step_post_hook(lambda *_: fired.append("base post"))
    opt = mechanize(base)
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    train(model, opt, 1)
    assert fired == ["pre", "base pre", "base post", "post"]


def test_a_pre_hook_may_change_gradients_and_arguments() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=1.0))
    opt.register_step_pre_hook(lambda *_: filled(model.parameters(), 0.5))
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: torch.tensor(7.0)), {}))
    assert opt.step().item() == 7.0
    for p in model.parameters():
        torch.testing.assert_close(opt.state[p][REF], torch.full_like(p, -0.5))  # an update that is not applied yet


def test_global_step_hooks_see_each_optimizer_once() -> None:
    """Wrapper and base each count as an optimizer that steps, and a hook can tell them apart."""
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    try:
        train(model, opt, 1)
    finally:
        handle.remove()
    assert seen == [opt.base, opt]


def test_state_dict_hooks_fire_once_and_may_change_it() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    fired: list[str] = []
    opt.register_state_dict_pre_hook(lambda *_: fired.append("state pre"))
    opt.register_state_dict_post_hook(lambda o, sd: fired.append("state post") or {**sd, "more": 1})  # type: ignore[func-returns-value]
    opt.register_load_state_dict_pre_hook(lambda o, sd: fired.append(f"load pre {sd.pop('more')}"))  # type: ignore[func-returns-value]
    opt.register_load_state_dict_post_hook(lambda *_: fired.append("load post"))
    opt.load_state_dict(opt.state_dict())
    assert fired == ["state pre", "state post", "load pre 1", "load post"]


def test_the_profiler_sees_the_step_and_zero_grad() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    backward(model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
        opt.zero_grad()
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#MechanicAdamW.step" in names
    assert "Optimizer.step#AdamW.step" in names
    assert any(name.startswith("Optimizer.zero_grad#") for name in names)


def test_a_step_is_marked_for_profilers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark takes longer than launching a step on a GPU."""
    marks: list[str] = []

    class Mark(torch.autograd.profiler.record_function):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            marks.append(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Mark)
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    assert marks == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        opt.step()
    assert set(marks) == {"Optimizer.step#MechanicAdamW.step", "Optimizer.step#AdamW.step"}


def test_hooks_on_the_base_fire_as_long_as_they_are_there() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    fired: list[str] = []
    hook = opt.base.register_step_post_hook(lambda *_: fired.append("post"))
    train(model, opt, 2)
    hook.remove()
    train(model, opt, 1)
    assert fired == ["post"] * 2


def test_a_step_that_was_replaced_on_the_bases_class_is_called() -> None:
    """Test suites replace it by a mock, which has every attribute but `__wrapped__`."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    with mock.patch.object(ADAMW, "step") as step:
        train(model, opt, 2)
    assert step.call_count == 2


def test_zero_grad_forgets_or_zeroes() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    backward(model, 0)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.step()
    assert opt.scale.item() == 0
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
