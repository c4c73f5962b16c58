"""The sums of the GPU kernels, run by Triton's interpreter on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tensors import DEVICE, EPS, SHAPES, Tensors, made
from torch import Tensor

from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.kernels.triton_support import kind_of
from mechanic_plugins.rule.sums import WIDTH, Sums


def expected(tensors: Tensors, *, summed: bool = False, maximize: bool = False, decay: bool = False) -> Tensor:
    out = torch.zeros(WIDTH + 1, dtype=torch.float64, device=DEVICE)
    for x, grad, (kept, master, *_) in zip(*tensors, strict=True):
        is_exact = master is None or summed
        wide = x.double() if is_exact else torch.where(x == master.to(x.dtype), master, x.float()).double()
        d = kept.double() if summed else wide - kept.double()
        g = torch.zeros_like(d) if grad is None else grad.double()
        sums = Sums(
            dg=d * g * (-1 if maximize else 1), gg=g * g, xx=wide * wide, dx=d * wide, dd=d * d, dp=0.3 * d * wide
        )
        found = torch.stack([product.sum() for product in sums])
        wanted = [name not in ("xx", "dx") or decay for name in Sums._fields]
        out[:-1] += 0.5 * found * torch.tensor(wanted, device=DEVICE)
        out[-1] += grad is not None
    return out


def summed_up(tensors: Tensors, *, summed: bool = False, **options: Any) -> Tensor:
    batch = TritonBatch(*tensors, summed=summed)
    assert batch.addresses.refresh(tensors.xs, tensors.grads)
    out = torch.zeros(2 * WIDTH + 1, dtype=torch.float64, device=DEVICE)
    batch.add_sums(out, tuner_index=1, weight=0.5, **{"maximize": False, "penalty": 0.3, **options})
    assert not out[:WIDTH].any()
    return out[WIDTH:]


def assert_alike(plain: Tensor, kernel: Tensor, eps: float) -> None:
    assert ((plain - kernel).abs() <= 30 * eps * plain.abs().max().clamp(min=1e-30)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_sums_equal_torchs(dtype: torch.dtype, maximize: bool) -> None:
    tensors = made(SHAPES, dtype, 0)
    plain, kernel = expected(tensors, maximize=maximize), summed_up(tensors, maximize=maximize)
    # the interpreter truncates bf16 where GPUs round, so half of the masters seem to belong to other weights
    assert_alike(plain, kernel, EPS[torch.float32] if dtype == torch.float16 else EPS[dtype])
    assert plain[-1] == kernel[-1] == len(SHAPES) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [False, True])
def test_sums_with_delta_equal_torchs(dtype: torch.dtype, decay: bool) -> None:
    tensors = made(SHAPES, dtype, 2, summed=True)
    plain, kernel = expected(tensors, summed=True, decay=decay), summed_up(tensors, summed=True, decay=decay)
    assert_alike(plain, kernel, EPS[torch.float64 if dtype == torch.float64 else torch.float32])
    assert (plain[Sums._fields.index("xx")] > 0) == decay


def test_without_decay_or_penalty_delta_is_summed_without_the_weights() -> None:
    tensors = made([(64,)], torch.float32, 0, summed=True)
    plain = expected(tensors, summed=True)[: Sums._fields.index("dp")]
    tensors.xs[0].fill_(torch.nan)
    kernel = summed_up(tensors, summed=True, penalty=0.0)
    assert_alike(plain, kernel[: len(plain)], EPS[torch.float32])


@pytest.mark.parametrize("summed", [False, True])
def test_what_is_kept_may_be_in_bfloat16(summed: bool) -> None:
    tensors = made(SHAPES, torch.float32, 1, ktype=torch.bfloat16, summed=summed)
    assert_alike(expected(tensors, summed=summed), summed_up(tensors, summed=summed), EPS[torch.float32])


@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_sums_over_random_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    tensors = made(shapes, torch.float32, seed)
    assert_alike(expected(tensors), summed_up(tensors), EPS[torch.float32])


def test_tensors_of_odd_length_are_kept_apart() -> None:
    """A single one in a list would make the kernels read the whole list element by element."""
    assert kind_of(torch.zeros(3, 5), None) != kind_of(torch.zeros(4, 4), None)
