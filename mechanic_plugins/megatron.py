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
from typing import Any, NoReturn

try:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
except ImportError as error:
    raise ImportError(f"mechanic_plugins.megatron needs Megatron-Core ({error}): pip install megatron-core") from error
import torch
from torch import Tensor
from typing_extensions import Unpack

from mechanic_plugins import api
from mechanic_plugins.distributed.reduction import Reduction
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import Options
from mechanic_plugins.rule.sums import empty
from mechanic_plugins.weights.slots import main_slot

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
    optimizer.step_with_ready_grads = functools.partial(_step, members, optimizer.step_with_ready_grads)
    return optimizer


def mechanic_of(optimizer: Any) -> MechanicOptimizer | None:
    """The first mechanized optimizer; all have the same scale. None on a rank without weights to train."""
    inner = [member.optimizer for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    return next((one for one in inner if isinstance(one, MechanicOptimizer)), None)


@torch.no_grad()
def _step(members: Sequence[Any], step: Callable[[], bool]) -> bool:
    """Decides before Megatron's step: all gradients are complete, unscaled and clipped; no weight has moved yet."""
    sums = empty(1, torch.device("cpu"))
    for member in members:  # every rank takes part in each reduction, with or without shards
        mine = torch.zeros_like(sums) if member.is_stub_optimizer else member.optimizer.local_sums(list(_parts(member)))
        sums += Reduction(member.get_grad_stats_parallel_group())(mine).cpu()
    with ExitStack() as stack:
        for mechanic in (member.optimizer for member in members if not member.is_stub_optimizer):
            stack.enter_context(mechanic.applying(mechanic.decide(sums)))
        return step()


def _parts(member: Any) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor | None]]:
    """The parts that this rank counts: not the copies that tensor parallelism or tied weights have on other ranks."""
    counted, mechanic = {id(grad): grad for grad in member.get_main_grads_for_grad_norm()}, member.optimizer
    slot = main_slot(mechanic.settings.rule)
    for group in mechanic.param_groups:
        for p in (p for p in group["params"] if id(p.grad) in counted):
            yield group, p.detach(), p.grad, mechanic.state.get(p, {}).get(slot)


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
