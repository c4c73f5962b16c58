"""The sums and moves of the GPU kernels, run by Triton's interpreter on CPU tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EPS

from mechanic_plugins.core.param_state import IndexRange, ParamState, needs_reference
from mechanic_plugins.core.tuner_state import SUMS
from mechanic_plugins.kernels.foreach import ForeachBatch
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.kernels.triton_support import kind_of

SHAPES = [(3, 5), (4097,), (0,), (), (17, 33), (2, 3, 4, 5)]


def make_slots(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, *, in_bf16: bool = False
) -> list[ParamState]:
    generator = torch.Generator().manual_seed(seed)
    param_states = []
    for index, shape in enumerate(shapes):
        x, g, d = (torch.randn(shape, generator=generator) for _ in range(3))
        ref = x.to(dtype) if needs_reference(dtype) else None
        delta = d.bfloat16() if in_bf16 else d if needs_reference(dtype) else d.to(dtype)
        param_states.append(ParamState(x.to(dtype), None if index == 1 else g.to(dtype), delta, ref))
    return param_states


def xs_of(param_states: list[ParamState]) -> list[torch.Tensor]:
    return [param_state.x for param_state in param_states]


def grads_of(param_states: list[ParamState]) -> list[torch.Tensor | None]:
    return [param_state.grad for param_state in param_states]


def pointed(rows: TritonBatch, param_states: list[ParamState]) -> TritonBatch:
    assert rows.refresh_pointers(xs_of(param_states), grads_of(param_states))
    return rows


def summed(rows: TritonBatch | ForeachBatch, param_states: list[ParamState], *, maximize: bool = False) -> torch.Tensor:
    out = torch.zeros(2 * len(SUMS) + 1, dtype=torch.float64)
    tensors = xs_of(param_states), grads_of(param_states)
    rows.add_sums(*tensors, out, tuner_index=1, weight=0.5, maximize=maximize, penalty=0.3, with_dx=True)
    assert not out[: len(SUMS)].any()
    assert out[-2].item() == pytest.approx(0.3 * out[-4].item(), rel=1e-15)
    return out[len(SUMS) :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_sums_equal_torchs(dtype: torch.dtype, maximize: bool) -> None:
    param_states = make_slots(SHAPES, dtype, 0)
    plain = summed(ForeachBatch(param_states), param_states, maximize=maximize)
    kernel = summed(pointed(TritonBatch(param_states), param_states), param_states, maximize=maximize)
    eps = EPS[torch.float64 if dtype == torch.float64 else torch.float32]
    assert ((plain - kernel).abs() <= 30 * eps * plain.abs().max()).all()
    assert plain[-1] == kernel[-1] == len(SHAPES) - 1


@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_sums_over_random_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    param_states = make_slots(shapes, torch.float32, seed)
    plain, kernel = (
        summed(ForeachBatch(param_states), param_states),
        summed(pointed(TritonBatch(param_states), param_states), param_states),
    )
    assert ((plain - kernel).abs() <= 30 * EPS[torch.float32] * plain.abs().max().clamp(min=1e-30)).all()


def moved(param_states: list[ParamState], kept: float) -> tuple[list[ParamState], list[ParamState], TritonBatch]:
    """By torch and by the kernels, in two parts, each with its own snapshot."""
    twins = copy.deepcopy(param_states)
    scales = torch.tensor([0.1, 0.13, 1.0, kept, 1.0, 7.0], dtype=torch.float64)
    plain, kernel = ForeachBatch(param_states), pointed(TritonBatch(twins), twins)
    parts = [IndexRange(0, 2), IndexRange(2, len(SHAPES))]
    kernel.begin_moves(parts)
    for rows, each in ((plain, param_states), (kernel, twins)):
        for part in parts:
            xs = xs_of(each)[part.first : part.last]
            snapshot = rows.snapshot(part, xs)
            for x in xs:
                x.add_(0.5)
            rows.move(part, xs, snapshot, scales)
        rows.finish_moves(xs_of(each))
    return param_states, twins, kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_delta_in_bfloat16_is_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """By the same hash of place and step: but for single ones, which lie next to where it rounds the other way."""
    plain, kernel, _ = moved(make_slots(SHAPES, dtype, 1, in_bf16=True), kept=0.7)
    ours, theirs = (torch.cat([state.delta.flatten() for state in each]) for each in (kernel, plain))  # type: ignore[union-attr]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours != theirs).float().mean() < 1e-3
    for a, b in zip(plain, kernel, strict=True):
        torch.testing.assert_close(a.x, b.x, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])


def test_16_bit_weights_are_the_rounding_of_a_delta_in_bfloat16() -> None:
    _, kernel, _ = moved(make_slots(SHAPES, torch.bfloat16, 1, in_bf16=True), kept=1.0)
    for state in kernel:
        assert state.delta is not None
        assert state.ref is not None
        exact = torch.addcmul(state.ref.float(), state.delta.float(), torch.tensor(0.13))
        # the interpreter cuts bf16 off where GPUs round
        assert ((exact - state.x.float()).abs() <= 2 * EPS[torch.bfloat16] * (1e-3 + state.x.float().abs())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_move_equals_torchs(dtype: torch.dtype, kept: float) -> None:
    """What the sums then take from the move is what they would read."""
    param_states, twins, kernel = moved(make_slots(SHAPES, dtype, 1), kept)
    for param_state, twin in zip(param_states, twins, strict=True):
        # one rounding apart: the kernel multiplies and adds at once, and the interpreter cuts bf16 off where GPUs round
        tolerance = 4 * EPS[dtype] * (1 + param_state.x.double().abs())
        assert ((param_state.x.double() - twin.x.double()).abs() <= tolerance).all()
        assert param_state.delta is not None
        assert twin.delta is not None
        if kept == 1.0:
            assert torch.equal(param_state.delta, twin.delta)
        else:  # of low-precision weights, delta holds what ref was rounded by
            slack = (
                4 * EPS[dtype] * (1 + param_state.x.double().abs()) / 0.13 if param_state.ref is not None else tolerance
            )
            assert ((param_state.delta - twin.delta).abs() <= slack).all()
    left, read = summed(pointed(kernel, twins), twins), summed(pointed(TritonBatch(twins), twins), twins)
    assert ((left - read).abs() <= 30 * EPS[torch.float32] * read.abs().max()).all()


def test_the_snapshot_brings_the_weights_back() -> None:
    param_states = make_slots(SHAPES, torch.float32, 2)
    before = copy.deepcopy(xs_of(param_states))
    rows, part = pointed(TritonBatch(param_states), param_states), IndexRange(1, 5)
    snapshot = rows.snapshot(part, xs_of(param_states)[1:5])
    for x in xs_of(param_states):
        x.add_(1)
    rows.restore(part, xs_of(param_states)[1:5], snapshot)
    assert all(map(torch.equal, before[1:5], xs_of(param_states)[1:5]))
    assert torch.equal(before[0] + 1, param_states[0].x)


def test_norms_are_read_again_where_somebody_wrote_into_the_weights() -> None:
    param_states = make_slots([(4, 4)], torch.float32, 3)
    rows, part = pointed(TritonBatch(param_states), param_states), IndexRange(0, 1)
    rows.begin_moves([part])
    snapshot = rows.snapshot(part, xs_of(param_states))
    rows.move(part, xs_of(param_states), snapshot, torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0]).double())
    rows.finish_moves(xs_of(param_states))
    param_states[0].x.mul_(2)
    assert summed(pointed(rows, param_states), param_states)[2].item() == pytest.approx(
        0.5 * param_states[0].x.double().square().sum().item()
    )


def test_tensors_of_odd_length_are_kept_apart() -> None:
    """One of them in a list would have the kernels read all of it element by element."""
    odd, even = make_slots([(3, 5), (4, 4)], torch.float32, 0)
    assert kind_of(odd) != kind_of(even)
