"""Whole parameters, put together from what a layout says of the tensors of several ranks.

A rank returns the three lists of its layout, and its flattened tensors as "tensors".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def put_together(ranks: Sequence[dict[str, Any]]) -> tuple[list[Tensor], list[float]]:
    """The whole parameters as matrices, and how many times each lies on these ranks."""
    shapes = ranks[0]["shapes"]
    assert all((each["shapes"], each["owners"]) == (shapes, ranks[0]["owners"]) for each in ranks)
    wholes, counts = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    for each in ranks:
        for index, (blocks, flat) in enumerate(zip(each["blocks"], each["tensors"], strict=True)):
            taken = torch.zeros(len(flat))
            for whole, at, row, column, height, width in blocks:
                assert each["owners"][whole] == index
                here = slice(row, row + height), slice(column, column + width)
                wholes[whole][here] = torch.tensor(flat[at : at + height * width]).view(height, width)
                counts[whole][here] += 1
                taken[at : at + height * width] += 1
            assert (taken <= 1).all()
    assert all(count.min() == count.max() for count in counts)
    return wholes, [count.max().item() for count in counts]


def assert_same(wholes: list[Tensor], named: list[Any]) -> None:
    """Compares without regard to the order, which is the engine's own."""
    expected = [torch.tensor(value) for value in named]
    matrices = [value.reshape(value.shape[0], -1) for value in expected]
    assert sorted(map(Tensor.tolist, wholes)) == sorted(map(Tensor.tolist, matrices))
