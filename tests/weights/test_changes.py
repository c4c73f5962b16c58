"""The relative change of each layer in one step: spectral for matrices, Euclidean for vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mechanic_plugins.distributed.layout import layout_of
from mechanic_plugins.distributed.reduction import WHOLE, Reduction
from mechanic_plugins.weights.changes import Changes


def changes(
    olds: Sequence[Tensor], news: Sequence[Tensor], starts: Sequence[Tensor | None] | None = None
) -> list[tuple[float, bool]]:
    starts = olds if starts is None else starts
    updates = [wide(new) - wide(old) for old, new in zip(olds, news, strict=True)]
    firsts = [torch.ones_like(old) if start is None else start for start, old in zip(starts, olds, strict=True)]
    gradients = [torch.ones_like(old) for old in olds]
    before = Changes.before(olds, gradients, firsts, layout_of(olds), [1.0] * len(olds), WHOLE.reduction)
    return before.after(updates)


def wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def change(old: Tensor, new: Tensor, start: Tensor | None = None) -> float:
    ((value, _),) = changes([old], [new], [start])
    return value


def with_gap(height: int, width: int, *, norm: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A matrix with this spectral norm, where the next singular value is 0.4 of it."""
    generator = torch.Generator().manual_seed(seed)
    left, values, right = torch.linalg.svd(
        torch.randn(height, width, generator=generator, dtype=torch.float64), full_matrices=False
    )
    values = 0.4 * values / values[0]
    values[0] = 1
    return (norm * (left * values) @ right).to(dtype)


def spectral(t: Tensor) -> float:
    return torch.linalg.matrix_norm(t.reshape(len(t), -1).double(), 2).item()


@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 50), (50, 3), (40, 40), (1000, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_in_the_spectral_norm(height: int, width: int, dtype: torch.dtype) -> None:
    old = with_gap(height, width, norm=3.0, dtype=dtype)
    new = old + with_gap(height, width, norm=0.006, dtype=dtype, seed=1)
    ((found, is_matrix),) = changes([old], [new])
    assert is_matrix
    assert found == pytest.approx(spectral(new - old) / spectral(old), rel=1e-5)


def test_without_a_gap_it_is_a_tenth_off_at_most() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        old = torch.randn(30, 60)
        new = old + 1e-3 * torch.randn(30, 60)
        assert change(old, new) == pytest.approx(spectral(new - old) / spectral(old), rel=0.1)


def test_vectors_and_scalars_in_the_euclidean_norm() -> None:
    shapes: list[tuple[int, ...]] = [(7,), (7, 1), (1, 7), (1, 1, 3), ()]
    torch.manual_seed(0)
    olds = [torch.randn(shape) for shape in shapes]
    news = [old + 0.01 * torch.randn(old.shape) for old in olds]
    found = changes(olds, news)
    assert not any(is_matrix for _, is_matrix in found)
    expected = [((new - old).norm() / old.norm()).item() for old, new in zip(olds, news, strict=True)]
    assert [value for value, _ in found] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 4, 5), (6, 1, 3, 3), (2, 3, 2, 2, 2)])
def test_convolutions_are_matrices_of_their_output_channels(shape: tuple[int, ...]) -> None:
    height, width = shape[0], math.prod(shape[1:])
    old = with_gap(height, width, norm=2.0).view(shape)
    new = old + with_gap(height, width, norm=0.02, seed=1).view(shape)
    assert change(old, new) == pytest.approx(0.01, rel=1e-4)
    if len(shape) == 4:
        formats = {"memory_format": torch.channels_last}
        assert change(old.to(**formats), new.to(**formats)) == pytest.approx(change(old, new), rel=1e-6)


def test_what_started_at_zero_is_taken_for_of_size_one() -> None:
    small = with_gap(5, 9, norm=0.01)
    zero, zeros = torch.zeros(5, 9), torch.zeros(9)
    assert change(zero, small, zero) == pytest.approx(0.01, rel=1e-5)
    assert change(small, 2 * small, zero) == pytest.approx(0.01, rel=1e-5)
    assert change(500 * small, 505 * small, zero) == pytest.approx(0.01, rel=1e-4)  # now larger than 1
    assert change(small, 2 * small, small) == pytest.approx(1, rel=1e-5)
    assert change(zeros, zeros + 0.3, zeros) == pytest.approx(0.3)
    assert change(zeros + 0.3, zeros + 0.6, zeros) == pytest.approx(0.3)
    assert change(zeros + 2, zeros + 3, zeros) == pytest.approx(0.5)
    assert change(torch.tensor(0.0), torch.tensor(0.2), torch.tensor(0.0)) == pytest.approx(0.2)


def test_no_change_and_weights_that_became_zero_are_0() -> None:
    torch.manual_seed(0)
    for shape in [(5, 9), (9,)]:
        t, zero = torch.randn(shape), torch.zeros(shape)
        assert change(t, t.clone(), t) == 0
        assert change(zero, zero, zero) == 0
        assert change(zero, t, t) == 0  # it did not start at zero
        assert change(zero, t) == 0


def test_empty_parameters_and_none_at_all() -> None:
    assert changes([], []) == []
    for shape in [(0,), (0, 3), (3, 0)]:
        assert changes([torch.zeros(shape)], [torch.zeros(shape)]) == [(0, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_measured_in_32(dtype: torch.dtype) -> None:
    old = with_gap(20, 30, norm=2.0, dtype=dtype)
    new = old + with_gap(20, 30, norm=0.2, dtype=dtype, seed=1)
    vector = torch.full((300,), 300.0, dtype=dtype)  # whose squares overflow
    (matrix, _), (found, _) = changes([old, vector], [new, vector + 2])
    assert matrix == change(old.float(), new.float())
    assert found == pytest.approx(2 / 300)


def test_complex_weights_count_as_pairs_of_real_ones() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.randn(6, 5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)
    olds, news = [matrix, vector], [matrix + 0.01 * torch.randn_like(matrix), vector + 0.01 * torch.randn_like(vector)]
    shapes = [(6, 10), (10,)]
    as_reals = [[torch.view_as_real(t).reshape(shapes[i]) for i, t in enumerate(ts)] for ts in (olds, news)]
    assert changes(olds, news) == changes(*as_reals)


@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12, 1e25])
def test_neither_overflows_nor_underflows(factor: float) -> None:
    old, step = with_gap(5, 9, norm=2.0), with_gap(5, 9, norm=1.0, seed=1)
    assert change(factor * old, factor * (old + step)) == pytest.approx(change(old, old + step), rel=1e-4)
    vector = torch.ones(5)
    assert change(factor * vector, factor * 3 * vector) == pytest.approx(2)


def test_one_layer_that_is_not_finite_leaves_the_others() -> None:
    torch.manual_seed(0)
    olds = [torch.randn(5, 9), torch.randn(4, 3), torch.randn(9)]
    news = [1.5 * old for old in olds]
    expected = changes(olds, news)
    for bad in (math.nan, math.inf):
        for index in range(3):
            broken = [new.clone() for new in news]
            broken[index].view(-1)[1] = bad
            found = changes(olds, broken)
            assert not math.isfinite(found[index][0])
            assert [found[i] for i in range(3) if i != index] == [expected[i] for i in range(3) if i != index]


def test_gradients_are_not_recorded() -> None:
    p = torch.nn.Parameter(torch.ones(3, 4))
    assert changes([p], [p + 1], [p]) == [(pytest.approx(1), True)]


def test_a_rank_without_an_update_takes_part_alike() -> None:
    """What is reduced must have the same dtype on every rank, also where nothing was updated."""
    dtypes = []

    class Noted(Reduction):
        def __call__(self, sums: Tensor) -> Tensor:
            dtypes.append((sums.dtype, len(sums)))
            return sums

    olds = [torch.ones(3, 4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    before = Changes.before(olds, olds, olds, layout_of(olds), [1.0, 1.0], Noted(spans_ranks=False))
    lists = []
    for updates in ([0.1 * old for old in olds], [None, None]):
        dtypes.clear()
        found = before.after(updates)
        lists.append(list(dtypes))
    assert found == [(0, True), (0, False)]
    assert lists[0] == lists[1]
