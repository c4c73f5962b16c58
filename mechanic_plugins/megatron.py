"""Megatron-Core: one scale for everything that its optimizer steps, on all ranks.

    optimizer = mechanize(get_megatron_optimizer(config, [model]))  # this module's mechanize
    mechanic_of(optimizer).scale

Dense weights and experts have one optimizer each, which step one after the other over this rank's shards. Before the
first of them does, all of them sum over their shards, with the counting rule and the process groups of Megatron's
gradient norm. Each then decides from the total, so all decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NoReturn

try:
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.transformer.module import param_is_not_shared
except ImportError as error:
    raise ImportError(f"mechanic_plugins.megatron needs Megatron-Core ({error}): pip install megatron-core") from error
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from mechanic_plugins import api
from mechanic_plugins.distributed.layout import Block, Layout, as_matrix, blocks_of_range
from mechanic_plugins.distributed.reduction import Reduction
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import Options
from mechanic_plugins.rule.sums import empty
from mechanic_plugins.weights.changes import Changes
from mechanic_plugins.weights.slots import REF, main_slot

__all__ = ["mechanic_of", "mechanize"]

_KINDS = {DistributedOptimizer, FP32Optimizer, Float16OptimizerWithFloat16Params}


def mechanize(optimizer: Any, **options: Unpack[Options]) -> Any:
    """Mechanizes, in place, the torch optimizers inside what `get_megatron_optimizer` returned.

    Raises:
        ValueError: An option or a set-up that Mechanic does not support here.
    """
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    _refuse_unsupported(optimizer, members, options)
    for member in (one for one in members if not one.is_stub_optimizer):
        member.optimizer = api.mechanize(member.optimizer, **options)
        member.optimizer.shares_by_engine = _refuse_to_share
        _keep_in_checkpoints(member)
    optimizer.step_with_ready_grads = functools.partial(_step, members, [], optimizer.step_with_ready_grads)
    return optimizer


def mechanic_of(optimizer: Any) -> MechanicOptimizer | None:
    """The first mechanized optimizer; all have the same scale. None on a rank without weights to train."""
    inner = [member.optimizer for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    return next((one for one in inner if isinstance(one, MechanicOptimizer)), None)


@torch.no_grad()
def _step(members: Sequence[Any], layouts: list[tuple[list[Tensor], Layout]], step: Callable[[], bool]) -> bool:
    """Decides before Megatron's step: all gradients are complete, unscaled and clipped; no weight has moved yet."""
    live = [member.optimizer for member in members if not member.is_stub_optimizer]
    sums = torch.zeros(len(empty(1, torch.device("cpu"))) + 1, dtype=torch.float64)
    for member in members:  # every rank takes part in each reduction, with or without shards
        mine = torch.zeros_like(sums)
        if not member.is_stub_optimizer:
            mine[:-1] = member.optimizer.local_sums(list(_parts(member)))
            mine[-1] = member.optimizer.is_step_measured
        sums += Reduction(member.get_grad_stats_parallel_group())(mine).cpu()
    is_measured = bool(sums[-1] > 0)
    if is_measured and not layouts:
        layouts += map(layout_of_member, members)
    before = [_before(*each) for each in zip(members, layouts, strict=True)] if is_measured else []
    decisions = [mechanic.decide(sums[:-1]) for mechanic in live]
    with ExitStack() as stack:
        for mechanic, decision in zip(live, decisions, strict=True):
            stack.enter_context(mechanic.applying(decision))
        is_done = step()
    if is_measured:
        changes = [change for each in zip(members, layouts, before, strict=True) for change in _changes(*each)]
        for mechanic, decision in zip(live, decisions, strict=True):
            if decision.is_made:
                mechanic.note_changes(changes, [0] * len(changes), decision)
    return is_done


def _before(member: Any, layout: tuple[list[Tensor], Layout]) -> tuple[Changes, list[Tensor]]:
    """What a measured step needs to know of the member's parameters, and a copy of them."""
    tensors = layout[0]
    state = {} if member.is_stub_optimizer else member.optimizer.state
    has_moved = not member.is_stub_optimizer and float(member.optimizer.scale) > 0
    starts = [state.get(x, {}).get(REF, x) if has_moved else x for x in tensors]
    grads = [x.grad for x in tensors]
    reduction = Reduction(member.get_grad_stats_parallel_group())
    before = Changes.before(tensors, grads, starts, layout[1], [1.0] * len(tensors), reduction)
    return before, [x.detach().clone() for x in tensors]


def _changes(
    member: Any, layout: tuple[list[Tensor], Layout], before: tuple[Changes, list[Tensor]]
) -> list[tuple[float, bool]]:
    """How the step has changed the member's whole parameters."""
    mechanic, updates = None if member.is_stub_optimizer else member.optimizer, []
    has_moved = mechanic is not None and float(mechanic.scale) > 0
    for x, old in zip(layout[0], before[1], strict=True):
        kept = mechanic.state.get(x, {}).get(REF) if mechanic is not None else None
        updates.append(torch.sub(x.detach(), old, out=old) if has_moved or kept is None else kept)
    return before[0].after(updates)


def _parts(member: Any) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor | None]]:
    """The parts that this rank counts: not the copies that tensor parallelism or tied weights have on other ranks."""
    counted, mechanic = {id(grad): grad for grad in member.get_main_grads_for_grad_norm()}, member.optimizer
    slot = main_slot(mechanic.settings.rule)
    for group in mechanic.param_groups:
        for p in (p for p in group["params"] if id(p.grad) in counted):
            yield group, p.detach(), p.grad, mechanic.state.get(p, {}).get(slot)


# -------------------------------------------------------------------- whole parameters


def layout_of_member(member: Any) -> tuple[list[Tensor], Layout]:
    """A tensor for each parameter of all ranks that the member's sums span, and the layout of these tensors.

    A tensor is empty where this rank holds nothing of the parameter. The ranks tell each other the shapes, because
    those of other pipeline stages and experts have other parameters: call it once, on all ranks.
    """
    held = [] if member.is_stub_optimizer else [each for each in _held(member) if param_is_not_shared(each[0])]
    places = [_place(p) for p, _, _ in held]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    here = stage, parallel_state.get_expert_model_parallel_rank() if held and _is_expert(held[0][0]) else 0
    group = member.get_grad_stats_parallel_group()
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (here, [shape for shape, _, _, _ in places]), group=group)
    tensors, layout = list[Tensor](), Layout([], [], [])
    for stage_and_expert, shapes in sorted({where: shapes for where, shapes in told if shapes}.items()):
        for index, shape in enumerate(shapes):
            tensor, blocks = torch.empty(0), list[Block]()
            if stage_and_expert == here:
                p, tensor, first = held[index]
                _, row, column, is_counted = places[index]
                length, width = tensor.numel() if is_counted else 0, as_matrix(p.shape)[1]
                found = blocks_of_range(len(layout.shapes), width, first, length, 0)
                blocks = [each._replace(row=each.row + row, column=each.column + column) for each in found]
            layout.owners.append(len(tensors))
            layout.shapes.append(shape)
            layout.blocks.append(blocks)
            tensors.append(tensor)
    return tensors, layout


def _held(member: Any) -> list[tuple[Tensor, Tensor, int]]:
    """The model's parameters, what the optimizer steps of each on this rank, and where that begins in it."""
    if isinstance(member, FP32Optimizer):
        return [(p, p, 0) for group in member.param_groups for p in group["params"]]
    if isinstance(member, Float16OptimizerWithFloat16Params):
        low = zip(chain(*member.float16_groups), chain(*member.fp32_from_float16_groups), strict=True)
        return [(p, master, 0) for p, master in low] + [(p, p, 0) for p in chain(*member.fp32_from_fp32_groups)]
    low = zip(chain(*member.model_float16_groups), chain(*member.shard_fp32_from_float16_groups), strict=True)
    full = zip(chain(*member.model_fp32_groups), chain(*member.shard_fp32_groups), strict=True)
    shards = {id(p): (p, shard, member._get_model_param_range_map(p)["param"].start) for p, shard in chain(low, full)}
    everywhere = (p for buffer in member.buffers for p in buffer.param_index_map)  # in the same order on all ranks
    return [shards.get(id(p), (p, torch.empty(0), 0)) for p in everywhere]


def _place(p: Any) -> tuple[tuple[int, int], int, int, bool]:
    """The whole parameter as a matrix, where the part of this tensor-parallel rank begins, and if this rank counts it.

    Parts of interleaved rows, as of queries, keys and values, lie here in another order, with the same spectral norm.
    """
    if _is_expert(p):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    (height, width), rank, size = as_matrix(p.shape), group.rank(), group.size()
    if not getattr(p, "tensor_model_parallel", False):
        return (height, width), 0, 0, rank == 0
    if p.partition_dim == 0:
        return (height * size, width), rank * height, 0, True
    return (height, width * size), 0, rank * width, True


def _is_expert(p: Tensor) -> bool:
    return not getattr(p, "allreduce", True)


# -------------------------------------------------------------------- checkpoints and refusals


def _keep_in_checkpoints(member: Any) -> None:
    """Creates Mechanic's state before a load: Megatron loads only into existing tensors."""
    if isinstance(member, DistributedOptimizer):
        member.optimizer.register_load_state_dict_pre_hook(_make_room)
        member.get_parameter_state_dp_zero = _refuse_to_gather
    elif member.init_state_fn is not None:
        member.init_state_fn = functools.partial(_init_state, member.init_state_fn)


def _make_room(mechanic: MechanicOptimizer, state_dict: dict[str, Any]) -> None:
    slot = main_slot(mechanic.settings.rule)
    for index, entries in state_dict["state"].items():
        entries.setdefault(slot, torch.zeros_like(mechanic._params()[index]))


def _init_state(original: Callable[..., None], mechanic: MechanicOptimizer, *args: Any) -> None:
    original(mechanic, *args)
    mechanic._create_eager_state()


def _refuse_to_gather(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("Megatron gathers Adam's state alone: save with distrib_optim_sharding_type='dp_reshardable'.")


def _refuse_to_share(params: Sequence[Tensor]) -> NoReturn:
    raise RuntimeError("this optimizer holds only this rank's shards of the weights: step Megatron's own.")


def _refuse_unsupported(optimizer: Any, members: Sequence[Any], options: Any) -> None:
    if odd := {"scope", "settings", "group", "sync_replicas", "max_grad_norm"} & options.keys():
        raise ValueError(
            f"Mechanic does not take {sorted(odd)} under Megatron: one scale for all ranks, and Megatron clips."
        )
    kinds, config = {type(optimizer), *map(type, members)} - {ChainedOptimizer}, optimizer.config
    if not kinds <= _KINDS or config.optimizer_cpu_offload or config.use_precision_aware_optimizer:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(f"Mechanic does not support {names} with {config}: use neither offload nor precision-aware.")
    peaks = {max(map(api.peak_lr, one.param_groups)) for one in members if one.param_groups}
    if len(peaks) > 1:
        raise ValueError(f"the chained optimizers have different learning rates, {sorted(peaks)}: give them one.")
