"""The sums of the GPU kernels, run by Triton's interpreter on CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EPS
from torch import Tensor

from mechanic_plugins.core.param_state import is_16_bit
from mechanic_plugins.core.tuner import SUMS
from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.kernels.triton_support import kind_of

SHAPES = [(3, 5), (4097,), (0,), (), (17, 33), (2, 3, 4, 5)]


class Tensors(NamedTuple):
    xs: list[Tensor]
    grads: list[Tensor | None]
    kept: list[Kept]


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, *, rtype: torch.dtype | None = None) -> Tensors:
    """Makes tensors: the second has no gradient, and some 16-bit weights differ from their masters."""
    generator = torch.Generator().manual_seed(seed)
    found = Tensors([], [], [])
    for index, shape in enumerate(shapes):
        x, g, ref = (torch.randn(shape, generator=generator) for _ in range(3))
        master = x.clone() if is_16_bit(dtype) else None
        if master is not None and index % 2:
            master += 1
        found.xs.append(x.to(dtype))
        found.grads.append(None if index == 1 else g.to(dtype))
        found.kept.append(Kept(ref.to(rtype or dtype), master))
    return found


def expected(tensors: Tensors, *, maximize: bool = False) -> Tensor:
    out = torch.zeros(len(SUMS) + 1, dtype=torch.float64)
    for x, grad, (ref, master, *_) in zip(*tensors, strict=True):
        wide = x.double() if master is None else torch.where(x == master.to(x.dtype), master, x.float()).double()
        d = wide - ref.double()
        g = torch.zeros_like(d) if grad is None else grad.double()
        products = {"dg": d * g * (-1 if maximize else 1), "gg": g * g, "dd": d * d, "dp": 0.3 * d * wide}
        for name, product in products.items():
            out[SUMS.index(name)] += 0.5 * product.sum()
        out[-1] += grad is not None
    return out


def summed(tensors: Tensors, *, maximize: bool = False) -> Tensor:
    batch = TritonBatch(*tensors)
    assert batch.addresses.refresh(tensors.xs, tensors.grads)
    out = torch.zeros(2 * len(SUMS) + 1, dtype=torch.float64)
    batch.add_sums(out, tuner_index=1, weight=0.5, maximize=maximize, penalty=0.3)
    assert not out[: len(SUMS)].any()
    return out[len(SUMS) :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_sums_equal_torchs(dtype: torch.dtype, maximize: bool) -> None:
    tensors = made(SHAPES, dtype, 0)
    plain, kernel = expected(tensors, maximize=maximize), summed(tensors, maximize=maximize)
    # the interpreter truncates bf16 where GPUs round, so half of the masters seem to belong to other weights
    eps = {torch.float64: EPS[torch.float64], torch.bfloat16: EPS[torch.bfloat16]}.get(dtype, EPS[torch.float32])
    assert ((plain - kernel).abs() <= 30 * eps * plain.abs().max()).all()
    assert plain[-1] == kernel[-1] == len(SHAPES) - 1


def test_a_reference_in_bfloat16() -> None:
    tensors = made(SHAPES, torch.float32, 1, rtype=torch.bfloat16)
    plain, kernel = expected(tensors), summed(tensors)
    assert ((plain - kernel).abs() <= 30 * EPS[torch.float32] * plain.abs().max()).all()


@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_sums_over_random_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    tensors = made(shapes, torch.float32, seed)
    plain, kernel = expected(tensors), summed(tensors)
    assert ((plain - kernel).abs() <= 30 * EPS[torch.float32] * plain.abs().max().clamp(min=1e-30)).all()


def test_tensors_of_odd_length_are_kept_apart() -> None:
    """A single one in a list would make the kernels read the whole list element by element."""
    assert kind_of(torch.zeros(3, 5), None) != kind_of(torch.zeros(4, 4), None)
