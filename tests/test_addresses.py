"""What the host looks at before every step on a GPU: whether weights and gradients are like before, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.core.param_state import ParamState
from mechanic_plugins.kernels import addresses
from mechanic_plugins.kernels.addresses import Addresses
from mechanic_plugins.kernels.table import Table

SHAPES = [(4, 6), (16,), (2, 3)]


@pytest.fixture(params=[True, False], ids=["compared by torch", "looked at closely"], autouse=True)
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the comparison must give the same answers."""
    if not request.param:
        monkeypatch.setattr(addresses, "_comparison", lambda tensors: lambda *others: False)


def made() -> tuple[Addresses, Table, list[Tensor], list[Tensor | None]]:
    xs = [torch.randn(shape) for shape in SHAPES]
    grads: list[Tensor | None] = [torch.randn(shape) for shape in SHAPES]
    table = Table(torch.device("cpu"), tuple(x.numel() for x in xs))
    states = [ParamState(x, grad, torch.zeros_like(x), None) for x, grad in zip(xs, grads, strict=True)]
    found = Addresses(states, None, [0, 32, 48, 64], table)
    assert found.refresh(xs, grads)
    assert found.refresh(xs, grads)
    return found, table, xs, grads


def held(pointers: Tensor | None) -> list[Any]:
    assert pointers is not None
    return pointers.tolist()


def test_the_table_follows_the_gradients() -> None:
    found, table, xs, grads = made()
    version = found.version
    grads = [torch.randn(shape) for shape in SHAPES]
    assert found.refresh(xs, grads)
    assert held(table.gradients) == [grad.data_ptr() for grad in grads if grad is not None]
    assert found.version == version
    assert found.refresh(xs, [grads[0], None, grads[2]])
    assert (found.gradients, held(table.gradients)[1]) == (2, 0)
    assert found.refresh(xs, grads)
    assert found.gradients == 3


@pytest.mark.parametrize(
    "other", [torch.zeros(6, 4).t(), torch.zeros(4, 6).bfloat16(), torch.eye(4, 6).to_sparse()], ids=str
)
def test_a_gradient_that_lies_otherwise_is_noticed(other: Tensor) -> None:
    found, _, xs, grads = made()
    assert not found.refresh(xs, [other, *grads[1:]])
    assert found.refresh(xs, grads)


@pytest.mark.parametrize("other", [torch.zeros(6, 4).t(), torch.zeros(4, 6).double(), torch.zeros(3, 6)], ids=str)
def test_weights_that_lie_otherwise_are_noticed(other: Tensor) -> None:
    found, _, xs, grads = made()
    assert not found.refresh([other, *xs[1:]], grads)


def test_writing_into_the_weights_and_swapping_them_are_noticed() -> None:
    found, table, xs, grads = made()
    seen = [found.version]
    xs[1].add_(1)
    found.refresh(xs, grads)
    seen.append(found.version)
    torch.autograd.graph.increment_version(xs)
    expected = found.version_after_writing()
    found.refresh(xs, grads)
    seen.append(found.version)
    assert found.version == expected
    xs[0] = xs[0].clone()
    found.refresh(xs, grads)
    seen.append(found.version)
    assert len(set(seen)) == 4
    assert held(table.pointers)[0][0] == xs[0].data_ptr()
