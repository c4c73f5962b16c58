"""The host's check before every step on a GPU: whether weights and gradients are as before, and where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.kernels import addresses
from mechanic_plugins.kernels.addresses import Addresses, Kept
from mechanic_plugins.kernels.table import Table, places_of

SHAPES = [(4, 6), (16,), (2, 3)]


@pytest.fixture(params=[True, False], ids=["compared by torch", "looked at closely"], autouse=True)
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the comparison function must give the same answers."""
    if not request.param:
        monkeypatch.setattr(addresses, "_comparison", lambda tensors: lambda *others: False)


def made() -> tuple[Addresses, Table, list[Tensor], list[Tensor | None]]:
    xs = [torch.randn(shape) for shape in SHAPES]
    grads: list[Tensor | None] = [torch.randn(shape) for shape in SHAPES]
    table = Table(torch.device("cpu"), tuple(x.numel() for x in xs))
    found = Addresses(xs, grads, [Kept(torch.zeros_like(x)) for x in xs], table)
    assert found.refresh(xs, grads)
    assert found.refresh(xs, grads)
    return found, table, xs, grads


def held(pointers: Tensor | None) -> list[Any]:
    assert pointers is not None
    return pointers.tolist()


def test_the_table_follows_the_gradients() -> None:
    found, table, xs, grads = made()
    grads = [torch.randn(shape) for shape in SHAPES]
    assert found.refresh(xs, grads)
    assert held(table.gradients) == [grad.data_ptr() for grad in grads if grad is not None]
    assert found.refresh(xs, [grads[0], None, grads[2]])
    assert (found.gradients, held(table.gradients)[1]) == (2, 0)
    assert found.refresh(xs, grads)
    assert found.gradients == 3


@pytest.mark.parametrize("numel", [16, 10])
def test_one_of_odd_length_keeps_all_from_being_read_16_bytes_at_once(numel: int) -> None:
    """The kernel would read past its end, and used to if the first one in the list was even."""
    xs = [torch.zeros(16), torch.zeros(numel)]
    found = Addresses(xs, xs, [Kept(x) for x in xs], Table(torch.device("cpu"), (16, numel)))
    assert found.refresh(xs, xs)
    assert found.are_aligned == (numel == 16)


@pytest.mark.parametrize("shift", range(5))
def test_a_gradient_between_two_multiples_of_16_bytes_is_noticed(shift: int) -> None:
    x = torch.zeros(16)
    table = Table(torch.device("cpu"), (16,))
    found = Addresses([x], [x.clone()], [Kept(torch.zeros(16))], table)
    assert found.refresh([x], [torch.zeros(32)[shift : shift + 16]])
    assert found.are_aligned == (shift % 4 == 0)


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


def test_swapped_weights_are_noticed() -> None:
    found, table, xs, grads = made()
    xs[0] = xs[0].clone()
    assert found.refresh(xs, grads)
    assert held(table.pointers)[0][0] == xs[0].data_ptr()


@pytest.mark.parametrize("count", [3, 8192, 20_000], ids=["few", "as many as are sent at once", "more"])
def test_the_table_has_the_last_addresses_it_was_given(count: int) -> None:
    table = Table(torch.device("cpu"), (1,) * count)
    for start in range(3):
        numbers = torch.tensor([start, *range(2**62, 2**62 + count - 2), 0])
        table.point_to(torch.full((count, 9), start), numbers.numpy().tobytes(), rows_are_new=True)
        assert torch.equal(table.gradients, numbers)
        assert table.pointers.eq(start).all()


def test_places_in_a_copy_can_be_read_16_bytes_at_once() -> None:
    assert places_of([16, 1, 0, 17, 3]) == [0, 16, 32, 32, 64, 80]
