"""Training with the wrapper: what it computes and what the user sees."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import backward, differences, everything, perceptron, train

from mechanic_plugins import MechanicOptimizer, Settings, mechanize
from mechanic_plugins.weights.slots import DELTA, REF

ADAMW = torch.optim.AdamW


def test_a_class_gives_what_an_instance_gives() -> None:
    models = perceptron(), perceptron()
    train(models[0], mechanize(ADAMW(models[0].parameters(), lr=0.1), max_scale=10.0), 20)
    train(models[1], mechanize(ADAMW, max_scale=10.0)(models[1].parameters(), lr=0.1), 20)
    assert not differences(models[0].state_dict(), models[1].state_dict())


def test_the_first_step_moves_nothing_and_later_ones_do() -> None:
    model = perceptron()
    start = copy.deepcopy(model.state_dict())
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 1)
    assert not differences(start, model.state_dict())
    assert opt.scale.item() == 0
    train(model, opt, 2, first=1)
    assert differences(start, model.state_dict())
    assert opt.scale.shape == ()
    assert opt.scale.item() > 0


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float64, 1e-14), (torch.float32, 1e-5)], ids=str)
def test_by_a_published_rule_weights_are_the_start_plus_scale_times_delta(dtype: torch.dtype, lost: float) -> None:
    model = perceptron(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    opt = mechanize(ADAMW(model.parameters(), lr=1.0), settings=Settings(rule="paper", s_init=1e-2))
    train(model, opt, 60)
    for x0, p in zip(start, model.parameters(), strict=True):
        assert (p - x0).abs().max() > 100 * lost
        expected = x0 + opt.scale.to(dtype) * opt.state[p][DELTA]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=lost)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_default_rule_keeps_the_start(dtype: torch.dtype) -> None:
    model = perceptron(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    opt = mechanize(ADAMW(model.parameters(), lr=1.0))
    train(model, opt, 20)
    assert not differences(start, [opt.state[p][REF] for p in model.parameters()])


def test_a_step_is_the_bases_own_at_scale_times_lr() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.3))
    train(model, opt, 20)
    plain_model = copy.deepcopy(model)
    plain = ADAMW(plain_model.parameters(), lr=0.3, fused=True)
    plain.load_state_dict(copy.deepcopy(opt.base.state_dict()))
    train(model, opt, 1, first=20)
    plain.param_groups[0]["lr"] = opt.effective_lrs[0]
    plain.param_groups[0]["fused"] = True
    train(plain_model, plain, 1, first=20)
    assert not differences(model.state_dict(), plain_model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_from_outside_stay_as_they_were_put(dtype: torch.dtype) -> None:
    """After averaging, clamping or loading, recomputing x from a reference would pull the weights back."""
    model = perceptron(dtype)
    opt = mechanize(ADAMW(model.parameters(), lr=1.0))
    train(model, opt, 60)
    with torch.no_grad():
        pulls = [(2.0 - p).abs().max().item() for p in model.parameters()]
        for p in model.parameters():
            p.fill_(2.0)
    assert 0 < moves_in_a_step(model, opt) < 0.05 * max(pulls)


def moves_in_a_step(model: torch.nn.Module, opt: torch.optim.Optimizer) -> float:
    """The largest move of any weight in a step."""
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, 1, first=60)
    return max((p - q).abs().max().item() for p, q in zip(model.parameters(), before, strict=True))


def test_pickle_and_deepcopy_train_on_alike_and_apart() -> None:
    """A scheduler sets a `step` on the instance, and a copy that kept it would step the original."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5), max_scale=10.0)
    torch.optim.lr_scheduler.StepLR(opt, step_size=10)
    train(model, opt, 20)
    twins = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    at_20 = everything(opt)
    for twin_model, twin in twins:
        assert not differences(everything(twin), at_20)
        assert twin.settings == opt.settings
        train(twin_model, twin, 20, first=20)
        assert not differences(everything(opt), at_20)
    train(model, opt, 20, first=20)
    assert not differences(everything(twins[0][1]), everything(opt))
    assert not differences(everything(twins[1][1]), everything(opt))


def test_a_copy_of_a_frozen_one_is_frozen() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 5)
    opt.freeze()
    twin_model, twin = copy.deepcopy((model, opt))
    scale = opt.scale.item()
    train(twin_model, twin, 5, first=5)
    assert twin.scale.item() == scale


# Between two measurements, Rprop's updates grow by 1.2 in each step.
@pytest.mark.filterwarnings("ignore:an update of Rprop was more than 10 times as long")
@pytest.mark.parametrize("lr", [1e-3, 1.0])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD", "AdamW", "Rprop")], ids=str)
def test_the_cap_holds_whatever_the_lr(lr: float, row: Row) -> None:
    """max_scale is a factor on the lr, even if delta is in other units."""
    model = perceptron()
    free = mechanize(row.build(model.parameters(), lr=lr))
    train(model, free, 40)
    cap = free.scale.item() / 30
    model = perceptron()
    opt = mechanize(row.build(model.parameters(), lr=lr), max_scale=cap)
    scales = []
    for step in range(40):
        train(model, opt, 1, first=step)
        scales.append(opt.scale.item())
    assert max(scales) == pytest.approx(cap, rel=1e-12)


@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.maximize], ids=str)
def test_maximize_mirrors_minimizing_the_negative(row: Row) -> None:
    models = perceptron(torch.float64), perceptron(torch.float64)
    opts = [mechanize(row.build(m.parameters(), maximize=m is models[1])) for m in models]
    for step in range(20):
        backward(models[0], step)
        backward(models[1], step)
        for p in models[1].parameters():
            p.grad.neg_()
        for opt in opts:
            opt.step()
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert opts[0].scale.item() == opts[1].scale.item() > 0


@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD", "AdamW", "RMSprop")], ids=str)
def test_a_tensor_lr_trains_as_a_float_does_and_stays_the_same_object(row: Row) -> None:
    """Compiled steps keep the lr tensor, so dividing it by the unit must not replace it."""
    models = perceptron(torch.float64), perceptron(torch.float64)
    lr = torch.tensor(0.25, dtype=torch.float64)
    opts = [mechanize(row.build(m.parameters(), lr=each)) for m, each in zip(models, (0.25, lr), strict=True)]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 30)
    assert opts[1].param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert opts[1].scale.item() == pytest.approx(opts[0].scale.item(), rel=1e-9)
    assert opts[1].effective_lrs == [pytest.approx(opts[1].scale.item() * 0.25)]


def test_a_warm_up_that_starts_at_zero_only_waits() -> None:
    """As in transformers. Nothing may divide by zero, get stuck or learn from it."""
    model = perceptron()
    start = copy.deepcopy(model.state_dict())
    opt = mechanize(ADAMW(model.parameters(), lr=0.0))
    train(model, opt, 3)
    assert not differences(start, model.state_dict())
    assert opt.scale.item() == 0
    opt.param_groups[0]["lr"] = 0.1
    losses = train(model, opt, 60, first=3)
    assert opt.scale.item() > 0
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        *((scale, torch.float64) for scale in (1e-6, 1e6, 1e-30, 1e100)),
        *((scale, torch.float32) for scale in (2.0**-40, 2.0**40)),
    ],
)
def test_the_scale_of_the_loss_does_not_matter_to_sgd(scale: float, dtype: torch.dtype) -> None:
    """The first update of a tiny loss used to be computed from the weights, and to be lost in their rounding."""
    ends = []
    for factor in (1.0, scale):
        model = perceptron(dtype)
        opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(60):
            backward(model, step)
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= factor
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(ends[0], torch.cat([p.detach().flatten() for p in perceptron(dtype).parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6 if dtype == torch.float64 else 1e-3, atol=1e-9)


def test_a_published_rule_reads_every_update_off_the_weights() -> None:
    """Ranks would stretch the first one differently, and their copies of a parameter would diverge."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 1e-6)
    opt = mechanize(torch.optim.SGD([p], lr=0.1), rule="paper")
    opt.step()
    stretched = 8 * torch.tensor(0.1)  # the power of two that brings lr next to 1
    assert torch.equal(opt.state[p]["mechanic_delta"], ((1 - stretched * p.grad) - 1) / 8)


def test_repr_shows_the_base_and_the_settings_but_no_vectors() -> None:
    text = repr(mechanize(ADAMW(perceptron().parameters(), lr=0.5), max_scale=0.25))
    assert text.startswith("Mechanic around AdamW (")
    assert "lr: 0.5" in text
    assert "max_scale=0.25" in text
    assert "mechanic_" not in text
    assert "s_init" not in text, "the default rule has none"


def test_what_only_the_base_has_is_found_through_the_wrapper() -> None:
    opt = mechanize(torch.optim.Adagrad(perceptron().parameters()))
    assert opt.share_memory.__self__ is opt.base
    assert isinstance(opt, MechanicOptimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        opt.no_such_thing  # noqa: B018
