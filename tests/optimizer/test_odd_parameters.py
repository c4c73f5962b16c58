"""Parameters without gradients, or with odd shapes, dtypes and layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import backward, differences, everything, filled, perceptron, train
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.weights.slots import DELTA, REF

ADAMW = torch.optim.AdamW
Build = Callable[[Any], torch.optim.Optimizer]


def test_no_gradients_at_all_is_no_step() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    opt.step()
    assert not opt.state
    assert opt.metrics()["mechanic/steps"] == 0
    train(model, opt, 5)
    opt.zero_grad()
    before = everything(opt)
    opt.step()
    assert not differences(before, everything(opt))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rule", [None, "paper"])
def test_a_parameter_without_a_gradient_gets_no_update(rule: Any) -> None:
    """The default rule leaves it where it is; with a published one, x = start + scale * delta holds for it too."""
    model = perceptron(torch.float64)
    last = model[2].weight
    x0 = last.detach().clone()
    opt = mechanize(ADAMW(model.parameters(), lr=1.0), rule=rule)
    train(model, opt, 20)
    moments, weights, scale = opt.state[last]["exp_avg"].clone(), last.detach().clone(), opt.scale.item()
    for step in range(20, 25):
        backward(model, step)
        last.grad = None
        opt.step()
    assert opt.scale.item() != scale
    assert torch.equal(opt.state[last]["exp_avg"], moments)
    assert torch.allclose(last, weights, rtol=1e-12, atol=1e-14) == (rule is None)
    if rule is not None:
        torch.testing.assert_close(last, x0 + opt.scale * opt.state[last][DELTA], rtol=1e-12, atol=1e-14)


DROPPED: dict[str, Callable[[Any, Tensor], object]] = {
    "emptied": lambda state, p: state[p].clear(),
    "replaced": lambda state, p: state.update({p: {}}),
    "deleted": lambda state, p: state.pop(p),
}


@pytest.mark.parametrize("base", [ADAMW, torch.optim.SGD, torch.optim.RMSprop, Lion])
def test_a_parameter_whose_state_was_dropped_begins_anew(base: Build) -> None:
    """Users reset part of a network like this. It used to continue with the old delta, which checkpoints lacked."""
    ends = []
    for drop in DROPPED.values():
        model = perceptron()
        opt = mechanize(base(model.parameters()))
        train(model, opt, 8)
        drop(opt.state, model[0].weight)
        train(model, opt, 3)
        ends.append(everything(opt))
        assert REF in opt.state[model[0].weight]
        opt.load_state_dict(opt.state_dict())
    assert not differences(ends[0], ends[1])
    assert not differences(ends[0], ends[2])


def test_frozen_parameters_cost_nothing() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    frozen = [p.clone() for p in model[0].parameters()]
    opt = mechanize(ADAMW(model.parameters(), weight_decay=0.1))
    train(model, opt, 20)
    assert set(opt.state) == set(model[2].parameters())
    assert all(map(torch.equal, frozen, model[0].parameters()))
    assert opt.scale.item() > 0


def strided() -> Tensor:
    return torch.arange(12.0).view(3, 4).t().requires_grad_()


def gapped() -> Tensor:
    return torch.arange(24.0).view(6, 4)[::2, ::2].requires_grad_()


def channels_last() -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )


ODD: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 4),
    "transposed": strided,
    "gapped": gapped,
    "channels-last": channels_last,
    "complex64": lambda: torch.tensor([1 + 2j, -3 + 0.5j]),
    "complex128": lambda: torch.tensor([[1 + 2j, -3 + 0.5j]], dtype=torch.complex128),
    "complex matrix": lambda: torch.tensor([[1 + 2j, -3 + 0.5j], [0.5j, 2]]),
}


def real(t: Tensor) -> Tensor:
    """The same numbers: a vector, or a matrix with two columns for each complex one."""
    return torch.view_as_real(t).flatten(-2) if t.is_complex() else t


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_parameters_train_like_plain_ones(make: Callable[[], Tensor], foreach: bool) -> None:
    """With a plain companion, they move like the same numbers in a plain, contiguous, real tensor."""
    odd = make().detach().requires_grad_()
    plain = odd.detach().clone(memory_format=torch.contiguous_format)
    plain = real(plain).clone().requires_grad_()
    ends = []
    for p in (odd, plain):
        companion = torch.tensor([5.0, -3.0], requires_grad=True)
        opt = mechanize(ADAMW([p, companion], lr=1.0, foreach=foreach))
        for _ in range(50):
            opt.zero_grad()
            (p.abs().square().sum() + companion.square().sum()).backward()
            opt.step()
        assert opt.scale.item() > 0
        ends.append(real(p.detach()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    if odd.numel():
        start = make().detach()
        assert odd.abs().square().sum() < start.abs().square().sum()


def test_gradients_laid_out_unlike_their_parameter() -> None:
    p = torch.arange(12.0).view(3, 4).requires_grad_()
    opt = mechanize(torch.optim.SGD([p], lr=1.0))
    for _ in range(5):
        p.grad = p.detach().t().contiguous().t()
        opt.step()
    assert not p.grad.is_contiguous()
    assert opt.scale.item() > 0


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    dense = torch.ones(2, requires_grad=True)
    opt = mechanize(torch.optim.SGD([dense, *embedding.parameters()], lr=1.0))
    before = everything(opt)
    embedding(torch.tensor([1])).sum().backward()
    filled([dense])
    with pytest.raises(ValueError, match=r"sparse .* Use sparse=False in the embedding, or p.grad.to_dense\(\)"):
        opt.step()
    assert not differences(before, everything(opt))


def test_a_parameter_of_another_shape_is_refused_before_anything_is_changed() -> None:
    p = torch.ones(6, requires_grad=True)
    opt = mechanize(torch.optim.SGD([p], lr=1.0))
    filled([p])
    opt.step()
    p.data, p.grad = torch.ones(9), torch.ones(9)
    before = everything(opt)
    with pytest.raises(ValueError, match=r"shape \(6,\) where the parameter has shape \(9,\).* Build a new optimizer"):
        opt.step()
    assert not differences(before, everything(opt))


def convolution(memory_format: torch.memory_format) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]


def fit(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randn(8, 4, 4, 4, generator=generator)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        opt.zero_grad()
        (model(x.to(dtype)) - y).square().mean().backward()
        opt.step()


FORMATS = torch.contiguous_format, torch.channels_last


CONVOLVED: dict[str, Build] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Lion": Lion,
}


@pytest.mark.parametrize("how", ["in place", "checkpoint"])
@pytest.mark.parametrize(("first", "then"), [FORMATS, FORMATS[::-1]], ids=["to channels last", "to contiguous"])
@pytest.mark.parametrize("base", CONVOLVED)
def test_weights_may_change_their_memory_format(base: str, first: Any, then: Any, how: str) -> None:
    """Moments and delta used to keep the old order and were read as flat memory beside weights in the new one."""
    ends = []
    for later in (first, then):
        model = convolution(first)
        opt = mechanize(CONVOLVED[base](model.parameters()))
        fit(model, opt, 15)
        if how == "in place":
            model.to(memory_format=later)  # type: ignore[call-overload]
        else:
            saved, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
            model = convolution(later)
            model.load_state_dict(weights)
            opt = mechanize(CONVOLVED[base](model.parameters()))
            opt.load_state_dict(saved)
        fit(model, opt, 16)
        assert model.weight.is_contiguous(memory_format=later)
        assert opt.state[model.weight][REF].stride() == model.weight.stride()
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_weights_may_change_their_dtype_where_the_base_lets_them(momentum: float, to: torch.dtype) -> None:
    """delta used to stay in float32 beside float64 weights, so the next step raised where plain SGD continues."""
    model = convolution(torch.contiguous_format)
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    fit(model, opt, 9)
    before = model.weight.detach().clone()
    fit(model, opt, 1)
    usual = (model.weight - before).abs().max()
    model.to(to)
    if to == torch.bfloat16 and momentum:
        for p in model.parameters():
            opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"].to(to)
    before = model.weight.detach().clone()
    fit(model, opt, 1)
    moved = (model.weight - before).abs().max()
    assert 0 < moved < 2 * usual, "a jump: delta and weights do not belong together"
    assert opt.state[model.weight][REF].dtype == to
    fit(model, opt, 10)
    assert model.weight.isfinite().all()


SHARED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "the same": lambda x: [x, x],
    "overlapping": lambda x: [x[:6], x[4:]],
    "a column of it": lambda x: [x.view(2, 5), x.view(2, 5)[:, 1]],
}


@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_parameters_over_the_same_memory_are_refused(views: Callable[[Tensor], list[Tensor]]) -> None:
    """Each used to take the other's update for its own too, which made the weights wrong."""
    memory = torch.arange(10.0)
    params = [nn.Parameter(view) for view in views(memory)]
    opt = mechanize(torch.optim.SGD(params, lr=0.1))
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"shares memory with another one .* use one Parameter in both places"):
        opt.step()
    assert torch.equal(memory, torch.arange(10.0))


def test_parameters_that_share_a_storage_but_no_element_train_as_apart() -> None:
    ends = []
    for clone in (False, True):
        memory = torch.arange(12.0).view(3, 4)
        views = [memory[:, ::2], memory[:, 1::2]]
        params = [nn.Parameter(view.clone() if clone else view) for view in views]
        opt = mechanize(torch.optim.SGD(params, lr=0.1))
        for _ in range(10):
            for p in params:
                p.grad = p.detach().clone()
            opt.step()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(ends[0], ends[1])
    assert (ends[0][1] < torch.arange(12.0).view(3, 4)[:, 1::2]).all()


def test_memory_can_be_estimated_with_fake_tensors() -> None:
    """A tuner without data cannot be written to the param groups, so mechanize() used to raise."""
    with FakeTensorMode():
        model = nn.Linear(4, 3)
        opt = mechanize(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            opt.step()
            kept = [set(opt.state[p]) for p in model.parameters()]
            assert kept == [{"step", "exp_avg", "exp_avg_sq", REF}] * 2
