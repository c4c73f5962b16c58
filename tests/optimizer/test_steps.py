"""Steps that should do little or nothing: frozen layers, lr 0, non-finite or huge numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from problems import backward, differences, everything, perceptron, train
from torch import Tensor, nn

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.weights.slots import REF

ADAMW = torch.optim.AdamW
STEPS, SKIPPED = "mechanic/steps", "mechanic/skipped_steps"


def pair(weight: float) -> list[Tensor]:
    return [nn.Parameter(torch.tensor([1.0, weight])), nn.Parameter(torch.ones(3))]


def step_pair(opt: Any, params: Sequence[Tensor], steps: int) -> None:
    """Steps with a gradient of 0 for the first parameter's second weight."""
    for _ in range(steps):
        params[0].grad = torch.tensor([0.1, 0.0])
        params[1].grad = params[1].detach().clone()
        opt.step()


# ------------------------------------------------------------------------------------------------ huge, not finite


def test_a_huge_weight_does_not_stop_the_others() -> None:
    """Its square overflows float32. Every step used to be skipped, with a warning about a gradient."""
    params = pair(2e19)
    opt = mechanize(ADAMW(params, weight_decay=0.0), settings=Settings(rule="paper", s_init=1e-3, s_decay=0.0))
    step_pair(opt, params, 100)
    assert opt.metrics()[SKIPPED] == 0
    assert opt.metrics()[STEPS] == 100
    assert params[0][1].item() == pytest.approx(2e19)
    assert params[1].max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_gradient_whose_square_overflows_is_no_nan(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(2, dtype=dtype))
    opt = mechanize(torch.optim.SGD([p], lr=1.0), rule="paper")  # which knows no outliers
    for size in (1.0, 2e19, 1.0):
        p.grad = torch.full_like(p, size)
        opt.step()
    assert opt.metrics()[SKIPPED] == 0
    assert opt.metrics()[STEPS] == 3
    assert torch.isfinite(p.detach().abs()).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_named(bad: float) -> None:
    """A single warning used to blame a gradient, and all later steps were skipped silently."""
    params = pair(bad)
    opt = mechanize(ADAMW([{"params": [params[1]]}, {"params": [params[0]]}]))
    with pytest.warns(UserWarning, match=r"weights of parameter 0 of group 1, of shape \(2,\), are not finite.*buffer"):
        step_pair(opt, params, 3)


def test_a_gradient_that_is_not_finite_is_named_where_names_are_known() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    opt.param_groups[0]["param_names"] = [name for name, _ in model.named_parameters()]  # as torch 2.6 does
    backward(model, 0)
    model[2].bias.grad[0] = float("nan")
    with pytest.warns(UserWarning, match=r"gradient of parameter 3 \(2.bias\) of group 0, of shape \(3,\), was"):
        opt.step()


def test_a_run_that_skips_every_step_says_so_again_and_again() -> None:
    """It warns at 1, 10, 100, ... skips in a row, as a single warning gets lost in an hour of logs."""
    params = pair(float("inf"))
    opt = mechanize(ADAMW(params))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_pair(opt, params, 250)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 3
    assert "10 steps in a row were skipped: nothing is trained" in texts[1]
    assert "100 steps in a row" in texts[2]


def test_single_skips_among_made_steps_are_told_once() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(60):
            backward(model, step)
            if step % 3 == 0:
                model[0].bias.grad[0] = float("inf")
            opt.step()
            opt.metrics()
    assert opt.metrics()[SKIPPED] == 20
    assert len(caught) == 1


# ------------------------------------------------------------------------------------------------ frozen layers


@pytest.mark.parametrize("base", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_frozen_while_training_stays_where_it_is(base: str, dtype: torch.dtype) -> None:
    """Its past updates used to be rescaled with each new scale: 12% of its norm in 1200 steps."""
    model = perceptron(dtype)
    opt = mechanize(getattr(torch.optim, base)(model.parameters(), lr=0.1), backend="foreach")
    train(model, opt, 29)
    before = model[0].weight.detach().clone()
    train(model, opt, 1, first=29)
    usual = (model[0].weight - before).abs().max().item() / opt.scale.item()
    model[0].requires_grad_(False)
    opt.zero_grad()
    frozen, ref = copy.deepcopy(model[0].state_dict()), opt.state[model[0].weight][REF].clone()
    scale = opt.scale.item()
    train(model, opt, 30, first=30)
    assert not differences(frozen, model[0].state_dict())
    assert torch.equal(opt.state[model[0].weight][REF], ref)
    assert opt.scale.item() != scale
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    train(model, opt, 1, first=60)
    moved = (model[0].weight - before).abs().max().item() / opt.scale.item()
    assert 0 < moved < 3 * usual  # from its current value, without a leap to where it would have been


def test_a_layer_frozen_and_freed_between_two_gradients_follows_again() -> None:
    model = perceptron(torch.float64)
    twin = copy.deepcopy(model)
    opts = [mechanize(ADAMW(m.parameters(), lr=0.1)) for m in (model, twin)]
    for m, opt in zip((model, twin), opts, strict=True):
        train(m, opt, 20)
    model[0].requires_grad_(False)
    model[0].requires_grad_(True)
    for m, opt in zip((model, twin), opts, strict=True):
        backward(m, 20)
        m[0].weight.grad = None
        opt.step()
    assert not differences(model.state_dict(), twin.state_dict())
    assert not differences(everything(opts[0]), everything(opts[1]))


# ------------------------------------------------------------------------------------------------ lr 0


@pytest.mark.parametrize("options", [{}, {"rule": "paper"}, {"scope": "group"}, {"rule": "theory"}], ids=str)
@pytest.mark.parametrize("base", ["AdamW", "SGD", "Adafactor"])
def test_nothing_moves_at_an_lr_of_zero(base: str, options: dict[str, Any]) -> None:
    """Past updates used to be rescaled with each new scale, whatever the lr."""
    model = perceptron()
    opt = mechanize(getattr(torch.optim, base)(model.parameters(), lr=0.1), **options)
    train(model, opt, 30)
    opt.param_groups[0]["lr"] = 0.0
    weights, scale = copy.deepcopy(model.state_dict()), opt.scale.item()
    train(model, opt, 5, first=30)
    assert not differences(weights, model.state_dict())
    assert opt.scale.item() == scale
    assert opt.metrics()[STEPS] == 35
    opt.param_groups[0]["lr"] = 0.1
    train(model, opt, 5, first=35)
    assert opt.scale.item() != scale
    assert differences(weights, model.state_dict())


def test_rprop_moves_at_an_lr_of_zero_as_it_does_alone() -> None:
    """Its lr is only its first step size, so changing it later has no effect."""
    model = perceptron()
    opt = mechanize(torch.optim.Rprop(model.parameters(), lr=0.01))
    train(model, opt, 10)
    opt.param_groups[0]["lr"] = 0.0
    weights = copy.deepcopy(model.state_dict())
    train(model, opt, 1, first=10)
    assert differences(weights, model.state_dict())


# ------------------------------------------------------------------------------------------------ the first step


def test_a_first_step_at_lr_zero_with_zero_gradients_is_a_step() -> None:
    """It used to be taken for torch.distributed.checkpoint's dry run: not counted, and the closure's loss dropped."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.0))

    def closure() -> Tensor:
        backward(model, 0)
        for p in model.parameters():
            p.grad.zero_()
        return torch.tensor(7.0)

    assert opt.step(closure).item() == 7.0
    assert opt.metrics()[STEPS] == 1
    opt.zero_grad(set_to_none=False)
    opt.step()
    assert opt.metrics()[STEPS] == 2
    assert opt.state[model[0].weight]["step"].item() == 2


def test_a_first_step_of_empty_tensors_only_is_a_step() -> None:
    p = nn.Parameter(torch.zeros(0, 3))
    opt = mechanize(ADAMW([p], lr=0.0))
    p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.metrics()[STEPS] == 1


@pytest.mark.parametrize("kind", ["not finite", "no gradient"])
def test_a_first_step_that_is_not_made_does_not_fix_the_unit(kind: str) -> None:
    ends = []
    for has_one in (False, True):
        p = nn.Parameter(torch.ones(4))
        opt = mechanize(torch.optim.SGD([p], lr=0.01), settings=Settings(rule="paper", s_init=1e-3))
        if has_one:
            p.grad = torch.full((4,), float("nan")) if kind == "not finite" else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opt.step()
                opt = copy.deepcopy(opt)
            p = opt.param_groups[0]["params"][0]
        opt.param_groups[0]["lr"] = 1.0
        for _ in range(5):
            p.grad = p.detach().clone()
            opt.step()
        ends.append((opt.scale.item(), p.tolist()))
    assert ends[0] == ends[1]


# ------------------------------------------------------------------------------------------------ meta


def test_an_optimizer_of_meta_parameters_saves_and_goes_on_elsewhere() -> None:
    """Models are built on the meta device and get their memory later."""
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    opt = mechanize(ADAMW(model.parameters()))
    assert opt.state_dict()["param_groups"][0].keys() > opt.base.defaults.keys()
    assert opt.metrics()[STEPS] == 0
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    opt = mechanize(ADAMW(model.parameters()))
    opt.load_state_dict(opt.state_dict())
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert opt.metrics()[STEPS] == 1
