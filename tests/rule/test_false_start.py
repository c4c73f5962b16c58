"""A first gradient that is far off is forgotten, unless Mechanic may not drop the base's state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize

pytestmark = pytest.mark.slow


class FillsItsStateWhenBuilt(torch.optim.Optimizer):
    """AdaGrad in the style of old code, with a counter beside the parameters' state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state["calls"] = 0  # type: ignore[index, assignment]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["calls"] += 1  # type: ignore[index, operator]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"].add_(p.grad**2)
                p.sub_(group["lr"] * p.grad / self.state[p]["sum"].sqrt())


def weights() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=torch.float64))


def train(opt: MechanicOptimizer, *gradients: float) -> float:
    """Steps with constant gradients. Returns how many of them are remembered."""
    p: Tensor = opt.param_groups[0]["params"][0]
    for value in gradients:
        p.grad = torch.full_like(p, value)
        opt.step()
    return opt.metrics()["mechanic/steps"]


@pytest.mark.parametrize("first", [(1e4,), (1e-12,), (1e-4,), (2.0, 1e4)], ids=str)
def test_a_first_gradient_that_is_far_off_is_forgotten(first: tuple[float, ...]) -> None:
    """It may be too long or too short; if the second one was the outlier, the third reveals it."""
    disturbed, clean = weights(), weights()
    assert train(mechanize(torch.optim.AdamW([disturbed], lr=0.1)), *first, 1, 1, 1) == 3
    train(mechanize(torch.optim.AdamW([clean], lr=0.1)), 1, 1, 1)
    assert torch.equal(disturbed, clean)


@pytest.mark.parametrize("again", [lambda opt: opt, copy.deepcopy], ids=["itself", "copied"])
def test_a_base_that_fills_its_state_when_built_keeps_it(again: Any) -> None:
    """Its state used to be cleared at the second step, and the base raised a KeyError."""
    opt = mechanize(FillsItsStateWhenBuilt([weights()]))
    train(opt, 1e4)
    assert train(again(opt), 1, 1, 1) == 4


def test_moments_loaded_from_a_plain_run_are_kept() -> None:
    """The moments of a long run used to be dropped with the first gradient after it."""
    p = weights()
    plain = torch.optim.AdamW([p], lr=0.1)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        plain.step()
    opt = mechanize(torch.optim.AdamW([p], lr=0.1))
    with pytest.warns(UserWarning, match="the base's moments are kept"):
        opt.load_state_dict(plain.state_dict())
    assert train(opt, 1e4, 1) == 2
    assert opt.state[p]["step"] == 7


# ------------------------------------------------------------------------------------------------ updates that jump


class StartsWithNothing(torch.optim.Optimizer):
    """SGD on the gradient's sign, with a tiny first update."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(group["lr"] * p.grad.sign() * (1e-4 if steps == 1 else 1.0))


def fit(build: Any, *, loss_scale: float = 1.0, dtype: torch.dtype = torch.float32, **options: Any) -> float:
    """The final loss of a regression that Adam at 1e-2 brings to 0.03."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(dtype)
    x = torch.randn(512, 8, dtype=dtype)
    y = x[:, :1] * x[:, 1:2]
    opt = mechanize(build(model), **options)
    falling = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, 300)  # at a constant rate the last steps decide
    for _ in range(300):
        rows = torch.randint(512, (64,))
        opt.zero_grad()
        ((model(x[rows]) - y[rows]).float().square().mean() * loss_scale).backward()
        opt.step()
        falling.step()
    with torch.no_grad():
        return float((model(x) - y).float().square().mean())


@pytest.mark.parametrize(
    ("loss_scale", "dtype"),
    [(3e-3, torch.float32), (1e-3, torch.float32), (1e-6, torch.float32), (1e-3, torch.bfloat16)],
    ids=str,
)
def test_radam_survives_its_sixth_update(loss_scale: float, dtype: torch.dtype) -> None:
    """Its first five are as long as the gradients and the sixth is Adam's. Lost weights end at a loss of 9 and more."""
    with pytest.warns(UserWarning, match="an update of RAdam was more than 10 times as long"):
        assert fit(lambda model: torch.optim.RAdam(model.parameters()), loss_scale=loss_scale, dtype=dtype) < 0.1


def test_a_first_update_that_is_next_to_nothing() -> None:
    with pytest.warns(UserWarning, match="an update of StartsWithNothing was more than 10 times as long"):
        assert fit(lambda model: StartsWithNothing(model.parameters())) < 0.2


class Jumps(torch.optim.Optimizer):
    """SGD on the gradient's sign, a hundred times longer in the steps that the groups name."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "long": ()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(group["lr"] * p.grad.sign() * (100.0 if steps in group["long"] else 1.0))


TAKEN_BACK = "an update of Jumps was more than 10 times as long as those before it and was taken back"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_jumps_is_taken_back_and_the_next_ones_have_its_length(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    opt = mechanize(Jumps([{"params": [p], "long": range(5, 100)}]))
    train(opt, 1, 1, 1, 1)
    before, scale = p.detach().clone(), opt.scale.item()
    with pytest.warns(UserWarning, match=TAKEN_BACK):
        train(opt, 1)
    torch.testing.assert_close(p.detach(), before, rtol=1e-6, atol=0)  # what was added is subtracted
    for _ in range(20):
        train(opt, 1)  # another warning would be an error
    assert 0.005 < opt.scale.item() / scale < 0.1
    assert 0.6 < p.min()  # twenty steps of at most 2%, all in one direction


def test_only_the_group_that_jumped_goes_back() -> None:
    jumps, steady = weights(), weights()
    opt = mechanize(Jumps([{"params": [jumps], "long": [5]}, {"params": [steady]}]), scope="group")
    for step in range(5):
        before = jumps.detach().clone(), steady.detach().clone()
        jumps.grad, steady.grad = torch.ones_like(jumps), torch.ones_like(steady)
        if step < 4:
            opt.step()
    with pytest.warns(UserWarning, match=TAKEN_BACK):
        opt.step()
    assert torch.equal(jumps, before[0])
    assert (steady < before[1]).all()


def test_the_learned_rate_is_that_of_the_steps_after_a_jump() -> None:
    """RAdam's first updates may be a thousandth of the later ones, at a scale a thousand times theirs."""
    p = weights()
    opt = mechanize(Jumps([{"params": [p], "long": range(5, 100)}]))
    with pytest.warns(UserWarning, match=TAKEN_BACK):
        train(opt, *[1] * 6)
    rates = [opt.effective_lrs[0]]
    for _ in range(20):
        train(opt, 1)
        rates.append(opt.effective_lrs[0])
    assert opt.learned_lr == pytest.approx(sum(rates) / len(rates))


def test_a_step_is_judged_where_it_starts_however_far_the_user_moved_the_weights() -> None:
    """They are as far from the start as after a jump, but no step moved them there."""
    p = weights()
    opt = mechanize(torch.optim.RAdam([p], lr=0.1), max_scale=1e-6)
    train(opt, 1, 1, 1)
    with torch.no_grad():
        p.fill_(7.0)
    train(opt, 1, 1)
    assert 6.9 < p.min()
