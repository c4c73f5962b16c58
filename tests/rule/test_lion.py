from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.lion import Lion


def by_hand(p: Tensor, grads: list[Tensor], *, lr: float, betas: tuple[float, float], weight_decay: float) -> Tensor:
    """The paper's Algorithm 2, line by line."""
    theta, m = p.clone(), torch.zeros_like(p)
    for g in grads:
        c = betas[0] * m + (1 - betas[0]) * g
        theta = theta - lr * (torch.sign(c) + weight_decay * theta)
        m = betas[1] * m + (1 - betas[1]) * g
    return theta


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_the_papers(weight_decay: float, maximize: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64), torch.randn(2)]
    params = [p.clone().requires_grad_() for p in start]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    optimizer = Lion(params, maximize=maximize, **settings)
    history: list[list[Tensor]] = [[torch.randn_like(p) for p in start] for _ in range(10)]
    for grads in history:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        optimizer.zero_grad()
    sign = -1 if maximize else 1
    for index, (p, first) in enumerate(zip(params, start, strict=True)):
        expected = by_hand(first, [sign * grads[index] for grads in history], **settings)
        torch.testing.assert_close(p.detach(), expected)
        assert set(optimizer.state[p]) == {"exp_avg"}


def test_lion_goes_on_from_its_state_dict_and_leaves_alone_what_has_no_gradient() -> None:
    torch.manual_seed(0)
    params = [torch.randn(4).requires_grad_(), torch.randn(4).requires_grad_()]
    optimizer = Lion(params, lr=torch.tensor(0.1))
    untouched = params[1].detach().clone()
    params[0].grad = torch.randn(4)
    assert optimizer.step(lambda: 3.0) == 3.0
    twins = copy.deepcopy(params)
    other = Lion(twins, lr=torch.tensor(0.1))
    other.load_state_dict(optimizer.state_dict())
    for group, owner in ((params, optimizer), (twins, other)):
        group[0].grad = torch.ones(4)
        owner.step()
    assert torch.equal(params[0], twins[0])
    assert torch.equal(params[1], untouched)
    assert params[1] not in optimizer.state


def test_lion_refuses_what_cannot_be() -> None:
    p = torch.zeros(1, requires_grad=True)
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        Lion([p], lr=-1.0)
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"):
        Lion([p], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="weight_decay must be >= 0, got -1"):
        Lion([p], weight_decay=-1)
