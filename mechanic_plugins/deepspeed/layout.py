"""Which parts of the model's parameters lie in the float32 tensors that DeepSpeed steps.

ZeRO, and the optimizer around FusedAdam, lay parameters end to end in flat tensors. ZeRO gives each rank a range of
them, padded to the same size everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from mechanic_plugins.distributed.layout import Block, Layout, as_matrix, blocks_of_range

__all__ = ["layout_of_engine"]


class _Part(NamedTuple):
    """A range of a flattened parameter, in one of the tensors that DeepSpeed steps."""

    param: Any
    first: int
    length: int
    """Zero or less if nothing of it lies on this rank."""
    at: int
    """Where it begins in the tensor."""


def layout_of_engine(holder: Any) -> Layout:
    """The layout of what `engine.optimizer` steps: a tensor for each param group or, at stage 3, for each sub-group.

    Without ZeRO and FusedAdam, it is a tensor for each parameter.
    """
    if type(holder) is DeepSpeedZeroOptimizer:
        sizes, ranks = holder.partition_size, map(dist.get_rank, holder.real_dp_process_group)
        flat = zip(holder.round_robin_bit16_groups, holder.round_robin_bit16_offsets, strict=True)
        return _layout(
            _parts_in_range(*each, rank * size, size) for each, rank, size in zip(flat, ranks, sizes, strict=True)
        )
    if type(holder) is DeepSpeedZeroOptimizer_Stage3:
        return _layout(map(_parts_of_sub_group, holder.fp16_groups))
    if type(holder) is BF16_Optimizer:
        sizes = [partition.numel() for partition in holder.fp32_groups_flat_partition]
        ranks = map(dist.get_rank, holder.real_dp_process_group)
        return _layout(
            _parts_in_range(params, _end_to_end(params), rank * size, size)
            for params, rank, size in zip(holder.bf16_groups, ranks, sizes, strict=True)
        )
    if isinstance(holder, FP16_Optimizer):
        sizes = [flat.numel() for flat in holder.fp32_groups_flat]
        return _layout(
            _parts_in_range(params, _end_to_end(params), 0, size)
            for params, size in zip(holder.fp16_groups, sizes, strict=True)
        )
    if isinstance(holder, FP16_UnfusedOptimizer):
        lists = holder.fp16_groups
    else:
        lists = [group["params"] for group in holder.param_groups]
    return _layout([_Part(p, 0, p.numel(), 0)] for params in lists for p in params)


def _end_to_end(params: Sequence[Any]) -> list[int]:
    """Where each parameter begins in a flat tensor without padding between them."""
    return list(accumulate((p.numel() for p in params), initial=0))[:-1]


def _parts_in_range(params: Sequence[Any], starts: Sequence[int], begin: int, size: int) -> list[_Part]:
    """What a range of a flat tensor holds of the parameters that begin in it at `starts`."""
    parts = []
    for p, start in zip(params, starts, strict=True):
        first, end = max(begin, start), min(begin + size, start + p.numel())
        parts.append(_Part(p, first - start, end - first, first - begin))
    return parts


def _parts_of_sub_group(params: Sequence[Any]) -> list[_Part]:
    """Stage 3 divides each parameter by itself and pads it for itself."""
    parts, at = [], 0
    for p in params:
        size = p.partition_numel()
        first = dist.get_rank(p.ds_process_group) * size
        parts.append(_Part(p, first, min(size, p.ds_numel - first), at))
        at += size
    return parts


def _layout(tensors: Iterable[Sequence[_Part]]) -> Layout:
    """Numbers the parameters in the order of the tensors, which is the same on every rank."""
    layout = Layout([], [], [])
    for index, parts in enumerate(tensors):
        blocks = list[Block]()
        for p, first, length, at in parts:
            many, mine = _experts(p)
            shape = as_matrix(getattr(p, "ds_shape", p.shape))
            blocks += blocks_of_range(len(layout.shapes) + mine, shape[1], first, length, at)
            layout.shapes.extend([shape] * many)
            layout.owners.extend([index] * many)
        layout.blocks.append(blocks)
    return layout


def _experts(p: Any) -> tuple[int, int]:
    """How many parameters stand at this one's place, and which of them is here: expert-parallel ranks hold others."""
    if not is_moe_param(p):
        return 1, 0
    return groups._get_expert_parallel_world_size(p.group_name), groups._get_expert_parallel_rank(p.group_name)
