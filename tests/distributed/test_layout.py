"""However they are sharded, the blocks make up the whole parameters, and the relative changes are theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from setups import SETUPS, Run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mechanic_plugins.distributed.layout import Layout, as_matrix, blocks_of_range, layout_of
from mechanic_plugins.distributed.reduction import WHOLE
from mechanic_plugins.distributed.sharding import local, shares_of
from mechanic_plugins.weights.changes import Changes

# name, ranks, even sizes
CASES = [
    ("ddp", 2, False),
    ("fsdp2", 2, False),
    ("fsdp2", 4, False),  # the head's 3 rows leave the last rank empty
    ("fsdp2_ignored", 2, False),
    ("hsdp", 4, False),
    ("mixed_meshes", 4, False),
    ("tp", 2, True),
    ("sequence_parallel", 2, True),
    ("fsdp2_tp", 4, True),
    ("ddp_tp", 4, True),
    ("fsdp1_full_shard_original", 2, False),
    ("fsdp1_full_shard_flat", 2, False),
    ("fsdp1_full_shard_original", 4, False),
    ("fsdp1_full_shard_flat", 4, False),
    ("fsdp1_shard_grad_op_original", 2, False),
    ("fsdp1_hybrid_shard_flat", 4, False),
    ("fsdp1_no_shard_original", 2, False),
    ("fsdp1_no_shard_flat", 2, False),
]


def locals_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [local(p.detach()).clone() for p in params]


def put_together(params: list[nn.Parameter], layout: Layout) -> list[Tensor]:
    """The whole parameters as matrices, summed over the ranks from nothing but the blocks."""
    shares = shares_of(params)
    wholes = [torch.zeros(shape, dtype=torch.float64) for shape in layout.shapes]
    for p, blocks in zip(params, layout.blocks, strict=True):
        flat = local(p.detach()).reshape(-1).double() * shares.weights.get(id(p), 1.0)
        for whole, at, row, column, height, width in blocks:
            values = flat[at : at + height * width].view(height, width)
            wholes[whole][row : row + height, column : column + width] += values
    return [shares.reduction(whole) for whole in wholes]


def changes_of(params: list[nn.Parameter], olds: list[Tensor], starts: list[Tensor]) -> list[tuple[float, bool]]:
    shares = shares_of(params)
    weights = [shares.weights.get(id(p), 1.0) for p in params]
    updates = [new - old for new, old in zip(locals_of(params), olds, strict=True)]
    return Changes.before(olds, updates, starts, layout_of(params), weights, shares.reduction).after(updates)


def as_tensors(weights: dict[str, list[Any]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(values, dtype=dtype) for values in weights.values()]


def measure(rank: int, name: str, even: bool, dtype: str) -> dict[str, Any]:
    run = Run.start(name, even=even, dtype=dtype, counted=False)
    params = list(run.setup.model.parameters())
    starts, whole_starts = locals_of(params), as_tensors(run.weights(), run.dtype)
    run.train(0, 2)
    olds, whole_olds = locals_of(params), as_tensors(run.weights(), run.dtype)
    run.train(2, 3)
    wholes = as_tensors(run.weights(), run.dtype)
    matrices = put_together(params, layout_of(params))
    if name.endswith("flat"):  # the root's parameters come before those of the blocks
        matrices.sort(key=lambda t: t.sum().item())
        wholes_in_order = sorted(wholes, key=lambda t: t.double().sum().item())
    else:
        wholes_in_order = wholes
    ones, updates = [1.0] * len(wholes), [new - old for new, old in zip(wholes, whole_olds, strict=True)]
    alone = Changes.before(whole_olds, updates, whole_starts, layout_of(wholes), ones, WHOLE.reduction)
    return {
        "blocks": all(
            torch.equal(matrix, whole.double().reshape(as_matrix(whole.shape)))
            for matrix, whole in zip(matrices, wholes_in_order, strict=True)
        ),
        "changes": changes_of(params, olds, starts),
        "alone": alone.after(updates),
        "exact": [exact(*tensors) for tensors in zip(whole_olds, wholes, whole_starts, strict=True)],
    }


def exact(old: Tensor, new: Tensor, start: Tensor) -> float:
    if old.ndim == 2:
        return (torch.linalg.matrix_norm(new - old, 2) / torch.linalg.matrix_norm(old, 2)).item()
    least = 0.0 if start.any() else math.sqrt(old.numel())
    return (new - old).norm().item() / max(old.norm().item(), least)


@pytest.mark.parametrize(("name", "world", "even"), CASES, ids=str)
def test_sharded_changes_are_the_wholes(ranks: Callable[[int], Ranks], name: str, world: int, even: bool) -> None:
    double = CASES.index((name, world, even)) % 2 == 0
    results = ranks(world)(measure, name, even, "float64" if double else "float32")
    assert all(result["blocks"] for result in results)
    changes, alone = results[0]["changes"], results[0]["alone"]
    assert all(result["changes"] == changes for result in results)
    if name.endswith("flat"):
        changes, alone = sorted(changes), sorted(alone)
    assert [is_matrix for _, is_matrix in changes] == [is_matrix for _, is_matrix in alone]
    assert sum(is_matrix for _, is_matrix in changes) == 6
    tolerance = 1e-10 if double else 1e-5
    assert [change for change, _ in changes] == pytest.approx([change for change, _ in alone], rel=tolerance)
    assert all(change > 0 for change, _ in changes)
    assert [change for change, _ in results[0]["alone"]] == pytest.approx(results[0]["exact"], rel=0.15)


def check_placements(rank: int) -> list[list[int]]:
    """Uneven and empty shards, in every dimension and in two."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    placed = [
        (flat, (6, 5), [Shard(0)]),
        (flat, (6, 5), [Shard(1)]),
        (flat, (3,), [Shard(0)]),
        (flat, (1, 1), [Shard(1)]),
        (flat, (5, 3, 2, 7), [Shard(1)]),
        (flat, (5, 3, 2, 7), [Shard(2)]),
        (flat, (5, 3, 2, 7), [Shard(3)]),
        (square, (5, 3, 2, 7), [Shard(3), Shard(1)]),
        (square, (7, 5), [Shard(0), Shard(0)]),
        (square, (7, 5), [Shard(1), Shard(0)]),
        (square, (7, 5), [Shard(1), Replicate()]),
        (square, (7, 3, 5), [Replicate(), Shard(2)]),
    ]
    wrong = []
    for mesh, shape, placements in placed:
        p = distribute_tensor(torch.randn(shape), mesh, placements)
        (matrix,) = put_together([p], layout_of([p]))  # type: ignore[list-item]
        if not torch.allclose(matrix, p.full_tensor().double().reshape(as_matrix(shape))):
            wrong.append(list(shape))
    return wrong


def test_every_placement_of_a_dtensor(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4)(check_placements) == [[]] * 4


def check_fsdp2_of_tensor_parallel(rank: int) -> list[bool]:
    """Uneven rows and columns, sharded by both in the same dimension; FSDP2 shards the second layer's columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    wholes = [p.detach().clone() for p in net.parameters()]
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    params = list(net.parameters())
    matrices = put_together(params, layout_of(params))
    return [torch.allclose(m, w.double().reshape(m.shape)) for m, w in zip(matrices, wholes, strict=True)]


def test_uneven_fsdp2_of_tensor_parallel(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4)(check_fsdp2_of_tensor_parallel) == [[True] * 4] * 4


def check_columns(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 3, 3), nn.Linear(6, 5))
    wholes = [p.detach().clone() for p in net.parameters()]
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Shard(0))
    params = list(net.parameters())
    matrices = put_together(params, layout_of(params))
    return [torch.equal(m, w.double().reshape(m.shape)) for m, w in zip(matrices, wholes, strict=True)]


def test_fsdp2_by_columns(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(check_columns) == [[True] * 4] * 2


def check_orders(rank: int, original: bool) -> list[bool]:
    """Compares singular values: FSDP1 flattens a parameter in the order of its memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(5, 3, 3), nn.Linear(6, 5)).to(memory_format=torch.channels_last)
    net[1].weight = nn.Parameter(torch.randn(7, 5).t())
    wholes = [p.detach().clone() for p in net.parameters()]
    model = FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"))
    params = list(model.parameters())
    matrices = put_together(params, layout_of(params))
    pairs = [(m, w.double().reshape(as_matrix(w.shape))) for m, w in zip(matrices, wholes, strict=True)]
    return [torch.allclose(torch.linalg.svdvals(m), torch.linalg.svdvals(w)) for m, w in pairs]


@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_of_other_memory_formats(ranks: Callable[[int], Ranks], original: bool) -> None:
    assert ranks(2)(check_orders, original) == [[True] * 4] * 2


def check_what_is_refused(rank: int) -> str:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    p = DTensor.from_local(torch.zeros(2, 3), mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False)
    try:
        layout_of([p])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_strided_shard_of_something_else_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(4)(check_what_is_refused):
        assert "is not what FSDP2 makes" in message


def test_ranges_of_a_flattened_matrix() -> None:
    for width in (1, 4, 7):
        matrix = torch.arange(5 * width).view(5, width)
        for first in range(5 * width):
            for count in range(5 * width - first + 1):
                kept, found = matrix.flatten()[first : first + count], torch.full((5, width), -1)
                blocks = blocks_of_range(0, width, first, count, 0)
                assert len(blocks) <= 3
                for _, at, row, column, height, here in blocks:
                    found[row : row + height, column : column + here] = kept[at : at + height * here].view(height, here)
                assert torch.equal(found[found >= 0], kept)
                assert torch.equal(matrix[found >= 0], kept)


def test_the_cases_are_setups() -> None:
    assert {name for name, *_ in CASES} <= set(SETUPS)
