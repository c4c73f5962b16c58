"""torch's fused CPU kernels: when they are used, and that they are correct."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import backward, differences, perceptron, train
from torch import Tensor, nn

from mechanic_plugins import mechanize
from mechanic_plugins.weights import facts as known_bases

ADAMW = torch.optim.AdamW


FUSED_ON_CPU = [row for row in OPTIMIZERS if row.name in ("Adam", "AdamW", "SGD")]


@pytest.mark.parametrize("row", FUSED_ON_CPU, ids=str)
@pytest.mark.parametrize(("backend", "same_as"), [("auto", "fused"), ("foreach", "for-loop")])
def test_a_cpu_steps_by_torchs_fused_kernel_unless_told_otherwise(row: Row, backend: Any, same_as: str) -> None:
    models = perceptron(), perceptron()
    opt = mechanize(row.cls(models[0].parameters(), **row.kwargs), backend=backend)
    train(models[0], opt, 20)
    train(models[1], mechanize(row.build(models[1].parameters(), same_as)), 20)
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert [group["fused"] for group in opt.param_groups] == [None]


def test_weights_that_lie_in_another_order_than_their_gradients_are_not_walked_together() -> None:
    x = torch.arange(6.0).view(2, 3)
    weights = [nn.Parameter(x.clone().t()), nn.Parameter(x.t().contiguous())]
    for weight in weights:
        opt = mechanize(ADAMW([weight], lr=1.0))
        for step in range(10):
            weight.grad = (weight.detach() - step).contiguous()
            opt.step()
    torch.testing.assert_close(weights[0], weights[1])
    assert not torch.equal(weights[0], x.t())


def test_an_error_in_the_fused_kernel_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    before = copy.deepcopy(model.state_dict())
    backward(model, 3)
    monkeypatch.setattr(torch, "_fused_adamw_", fails)
    with pytest.raises(MemoryError):
        opt.step()
    assert not differences(before, model.state_dict())
    assert [group["fused"] for group in opt.param_groups] == [None]


def combinations(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


ADAMS = list(combinations(weight_decay=[0, 0.1], amsgrad=[False, True], maximize=[False, True]))


SGDS = [
    options
    for options in combinations(
        momentum=[0, 0.9], dampening=[0, 0.5], nesterov=[False, True], weight_decay=[0, 0.1], maximize=[False, True]
    )
    if not options["nesterov"] or (options["momentum"] and not options["dampening"])
]


FUSED = [
    (cls, options)
    for cls, choices in [(torch.optim.Adam, ADAMS), (torch.optim.AdamW, ADAMS), (torch.optim.SGD, SGDS)]
    for options in choices
]


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


ROUNDINGS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def walk(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    """The weights and moments after five steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    moments = [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape]
    return [t.detach().double() for t in (p, *moments)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("cls", "options"), FUSED, ids=str)
def test_every_fused_cpu_kernel_that_is_taken_is_right(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """torch's fused SGD leaves whole SIMD blocks of 16-bit weights unchanged, and was used nevertheless."""
    for n in (1, 7, 16, 33):
        start = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
        ends = []
        for fused in (True, False):
            p = nn.Parameter(start.clone())
            p.grad = torch.zeros_like(p)
            if fused and not known_bases.can_fuse_on_cpu(cls([p], **options)):
                assert needs_the_plain_way(dtype)
                return
            ends.append(walk(cls([p], lr=0.1, **options, **({"fused": True} if fused else {"foreach": False})), p))
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b, rtol=ROUNDINGS[dtype], atol=ROUNDINGS[dtype] * b.abs().max().item())


def needs_the_plain_way(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=str)
def test_sgd_moves_16_bit_weights_on_a_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.linspace(1, 2, 64).to(dtype))
    opt = mechanize(torch.optim.SGD([p], lr=0.1, **options))
    for _ in range(100):
        p.grad = p.detach().clone()
        opt.step()
    assert (p.detach().abs() < torch.linspace(1, 2, 64)).all()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5, "foreach": True}], ids=str)
def test_a_first_gradient_may_come_late(options: dict[str, Any]) -> None:
    """torch's fused SGD needs the momentum buffers of all parameters or none, and used to raise a TypeError."""
    ends = []
    for backend in ("auto", "foreach"):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        opt = mechanize(torch.optim.SGD(params, lr=0.1, **options), backend=backend)
        for step in range(10):
            for p in params[: 1 if step < 5 else 2]:
                p.grad = p.detach().clone()
            opt.step()
        ends.append([p.detach() for p in params])
        assert (params[1] < 1).all()
    torch.testing.assert_close(*ends)
