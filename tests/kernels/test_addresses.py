"""The host's check before every step on a GPU: whether weights and gradients are as before, and where they are."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.kernels import addresses
from mechanic_plugins.kernels.addresses import Addresses, Kept
from mechanic_plugins.kernels.table import Mailbox, Table
from mechanic_plugins.optimizer.recording import LearningRates

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
def test_a_mailbox_brings_the_last_numbers_it_was_given(count: int) -> None:
    target = torch.zeros(count, dtype=torch.int64)
    mailbox = Mailbox(target)
    for start in range(3):
        numbers = [start, *range(2**62, 2**62 + count - 2), 0]
        mailbox.send(struct.pack(f"{count}q", *numbers))
        assert target.tolist() == numbers


@pytest.mark.parametrize("tuners", [1, 2, 3])
def test_learning_rates_travel_together_and_lie_where_a_tensor_would(tuners: int) -> None:
    lrs = LearningRates(tuners, 2, torch.device("cpu"))
    for step in range(3):
        numbers = [0.1 * (step + place) for place in range(tuners + 2)]
        lrs.write(numbers)
        assert [*lrs.of_tuners.tolist(), *(lr.item() for lr in lrs.of_batches)] == numbers
    assert lrs.of_tuners.is_contiguous()
    assert all(lr.data_ptr() % 16 == 0 for lr in lrs.of_batches)
