"""What the host looks at before every step on a GPU: whether weights and gradients are like before, and where."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.core.param_state import ParamState
from mechanic_plugins.kernels import addresses
from mechanic_plugins.kernels.addresses import Addresses
from mechanic_plugins.kernels.table import Mailbox, Table
from mechanic_plugins.optimizer.recording import LearningRates
from mechanic_plugins.passes.kept import KeptState

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


@pytest.mark.parametrize("shift", range(5))
def test_a_gradient_between_two_multiples_of_16_bytes_is_noticed(shift: int) -> None:
    x = torch.zeros(16)
    table = Table(torch.device("cpu"), (16,))
    found = Addresses([ParamState(x, x.clone(), torch.zeros(16), None)], None, [0, 16], table)
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


CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a moment is another": lambda state: state.update(exp_avg=state["exp_avg"].clone()),
    "the step is another of the same value": lambda state: state.update(step=state["step"].clone()),
    "delta is gone": lambda state: state.pop("delta"),
    "delta has another shape": lambda state: state.update(delta=torch.zeros(7)),
    "all are elsewhere": lambda state: [setattr(t, "data", t.data.clone()) for t in state.values()],
}


@pytest.mark.parametrize("foreign", [False, True], ids=["theirs alone", "with somebody's own"])
@pytest.mark.parametrize("shape", [(3, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_is_no_longer_there_is_noticed(change: str, shape: tuple[int, ...], foreign: bool) -> None:
    names = ("exp_avg", "exp_avg_sq", "step", "delta")
    states = [{name: torch.ones(() if name == "step" else shape) for name in names} for _ in range(3)]
    if foreign:
        states[0]["foreign"] = torch.zeros(2)
    kept = KeptState(states, {name: [state[name] for state in states] for name in names})
    assert kept.is_complete
    assert kept.is_there()
    if foreign:
        states[0]["foreign"] = torch.zeros(3)  # which nobody has asked for
    states[2]["exp_avg"].add_(1)
    assert kept.is_there()
    CHANGES[change](states[2])
    assert not kept.is_there()


def test_state_that_was_not_there_is_never_the_same() -> None:
    kept = KeptState([None], {"delta": [None]})
    assert not kept.is_complete
    assert not kept.is_there()
