"""Connects a mechanized optimizer to the optimizer that DeepSpeed built around its base.

ZeRO gives each rank a shard of the weights and steps the base once per param group (stages 1 and 2) or per sub-group
(stage 3). The scale needs inner products over all weights of all ranks before any of them moves. So the first
`unscale_and_clip_grads` of a step, where an overflow is ruled out and no weight has moved yet, sums over all shards,
reduces once and decides the step. The base steps that follow only apply it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor

from mechanic_plugins.deepspeed.layout import layout_of_engine
from mechanic_plugins.deepspeed.universal import mend_universal_load, mend_universal_load_of_stage3
from mechanic_plugins.distributed.reduction import Reduction, Shares
from mechanic_plugins.distributed.sharding import shares_of
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.rule.decide import Decision
from mechanic_plugins.rule.sums import with_scaled_gradients
from mechanic_plugins.weights.changes import Changes
from mechanic_plugins.weights.slots import REF, main_slot

__all__ = ["connect"]


def connect(engine: Any, mechanic: MechanicOptimizer) -> None:
    """Lets the optimizer sum over the shards of all ranks.

    Raises:
        ValueError: DeepSpeed built an optimizer of an unknown type.
    """
    holder = engine.optimizer
    mechanic.layout_by_engine = functools.partial(layout_of_engine, holder)
    if type(holder) is DeepSpeedZeroOptimizer:
        _Conductor(mechanic, holder, _Stages1And2(holder)).take_over()
        mend_universal_load(holder, mechanic)
    elif type(holder) is DeepSpeedZeroOptimizer_Stage3:
        _Conductor(mechanic, holder, _Stage3(holder)).take_over()
        mend_universal_load_of_stage3(holder, mechanic)
    elif type(holder) is BF16_Optimizer:
        mechanic.shares_by_engine = lambda params: Shares(Reduction(holder.dp_process_group), {})  # all shards differ
        mend_universal_load(holder, mechanic)
    elif holder is mechanic or isinstance(holder, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        mechanic.shares_by_engine = _shares_of_replicas(engine, mechanic)
    else:
        raise ValueError(
            f"Mechanic does not support {type(holder).__module__}.{type(holder).__name__}, which DeepSpeed built "
            "around the optimizer: use ZeRO stage 0 to 3 without its variants."
        )


# -------------------------------------------------------------------- without ZeRO: how parameters are counted


def _shares_of_replicas(engine: Any, mechanic: MechanicOptimizer) -> Callable[[Sequence[Tensor]], Shares]:
    if not engine.has_moe_layers:
        return lambda params: shares_of(params, sync_replicas=mechanic.sync_replicas)
    if isinstance(engine.optimizer, FP16_Optimizer):
        raise ValueError(
            "Mechanic does not support experts with FusedAdam at ZeRO stage 0: DeepSpeed flattens them into one tensor "
            "with the other weights. Use torch.optim.AdamW, or ZeRO stage 1 or 2."
        )
    return functools.partial(_shares_of_experts, engine)


def _shares_of_experts(engine: Any, params: Sequence[Tensor]) -> Shares:
    """Each expert lives on some of the ranks, every other parameter on all of them."""
    holder = engine.optimizer
    pairs = zip(getattr(holder, "fp32_groups", ()), getattr(holder, "fp16_groups", ()), strict=True)
    models_own = {id(hp): lp for hps, lps in pairs for hp, lp in zip(hps, lps, strict=True)}
    group = engine.seq_data_parallel_group
    everywhere = dist.get_world_size(group)
    copies = {}
    for p in params:
        own = models_own.get(id(p), p)
        copies[id(p)] = groups._get_expert_data_parallel_world_size(own.group_name) if is_moe_param(own) else everywhere
    return Shares(Reduction(group), {key: 1 / n for key, n in copies.items()})


# -------------------------------------------------------------------- ZeRO: where the shards are


class _Stages1And2:
    """Where DeepSpeed keeps this rank's shards."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    def shards(self) -> Sequence[Tensor]:
        """The flat float32 weights."""
        return list(self.zero.single_partition_of_fp32_groups)

    def group_of(self, index: int) -> int:
        """The param group of a shard."""
        return index

    def gradients(self, index: int) -> Sequence[Tensor]:
        """A shard's gradients, in order, before unscaling and clipping."""
        grad = self.zero.single_partition_of_fp32_groups[index].grad
        if grad is None:
            grad = getattr(self.zero, "_get_preflattened_grad_partition", lambda _: None)(index)
        return [grad] if grad is not None else list(self.zero.averaged_gradients[index])

    def unscale(self, probe: Tensor, total_norm: Any) -> None:
        """Multiplies the probe by the factor that DeepSpeed applies to every gradient of this step."""
        type(self.zero).unscale_and_clip_grads(self.zero, [probe], total_norm)

    def prepared(self) -> ExitStack:
        """A context in which all shards are in the param groups and their padding is zero."""
        return ExitStack()


class _Stage3(_Stages1And2):
    def shards(self) -> Sequence[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def group_of(self, index: int) -> int:
        group: int = self.zero.sub_group_to_group_id[index]
        return group

    def gradients(self, index: int) -> Sequence[Tensor]:
        grad = self.zero.fp32_partitioned_groups_flat[index].grad
        return [grad] if grad is not None else list(self.zero.averaged_gradients[index])

    def unscale(self, probe: Tensor, total_norm: Any) -> None:
        twin = copy.copy(self.zero)  # this stage reads the gradient from its shard: give it one that holds the probe
        twin.fp32_partitioned_groups_flat = [SimpleNamespace(grad=probe)]
        type(self.zero).unscale_and_clip_grads(twin, 0, total_norm)

    def prepared(self) -> ExitStack:
        self._clear_padding()
        stack = ExitStack()
        self.zero._set_fp32_optimizer_param_groups()
        stack.callback(self.zero._clear_fp32_optimizer_param_groups)
        return stack

    def _clear_padding(self) -> None:
        """Zeroes the padding of the shards, which is uninitialised memory and would enter the norms."""
        for shard, params in zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True):
            start = 0
            for p in params:
                size = p.partition_numel()
                used = min(max(p.ds_numel - dist.get_rank(p.ds_process_group) * size, 0), size)
                shard.data[start + used : start + size] = 0
                start += size


# -------------------------------------------------------------------- ZeRO: one decision per step


class _Conductor:
    """Decides each step once, before the first shard moves; the base steps that follow move one shard each."""

    def __init__(self, mechanic: MechanicOptimizer, zero: Any, places: _Stages1And2) -> None:
        self.mechanic = mechanic
        self.zero = zero
        self.places = places
        self.reduction = Reduction(zero.dp_process_group)
        self._zero_step, self._zero_unscale = zero.step, zero.unscale_and_clip_grads
        self._is_decided = False
        self._decided: Decision | None = None
        """The step's decision, if it is measured."""
        self._olds: list[Tensor] = []

    def take_over(self) -> None:
        self.zero.step, self.zero.unscale_and_clip_grads = self.step, self.unscale_and_clip_grads
        self.mechanic.shares_by_engine = self._refuse_to_count

    def step(self, closure: Any = None) -> Any:
        """DeepSpeed's step. On overflow it returns before unscaling, so Mechanic never sees that step."""
        self._is_decided, self._decided = False, None
        with ExitStack() as stack:
            self._stack = stack
            result = self._zero_step(closure)
        self._note_changes()
        return result

    def unscale_and_clip_grads(self, which: Any, total_norm: Any) -> None:
        """Called once per shard. At the first call all gradients are complete and no weight has moved."""
        if not self._is_decided:
            self._is_decided = True
            self._stack.enter_context(self.mechanic.applying(self._decision(total_norm)))
        self._zero_unscale(which, total_norm)

    @torch.no_grad()
    def _decision(self, total_norm: Any) -> Decision:
        is_measured = self.mechanic.is_step_measured
        with self.places.prepared():
            sums = self.mechanic.local_sums(list(self._parts()))
            decision = self.mechanic.decide(self.reduction(self._unscaled(sums, total_norm)))
            if is_measured and decision.is_made:
                self._begin_measurement(decision)
        return decision

    def _begin_measurement(self, decision: Decision) -> None:
        """Looks at the model's parameters before the first shard moves."""
        shards, layout, places = self.places.shards(), layout_of_engine(self.zero), self.places
        self._tuner_of = [places.group_of(i) if len(decision.new_scales) > 1 else 0 for i in range(len(shards))]
        grads = [torch.cat([grad.reshape(-1) for grad in places.gradients(i)]) for i in range(len(shards))]
        kept = [self.mechanic.state.get(shard, {}).get(REF) for shard in shards]
        moved = [each is not None and decision.old_scales[t] > 0 for each, t in zip(kept, self._tuner_of, strict=True)]
        starts = [each if has else shard for shard, each, has in zip(shards, kept, moved, strict=True)]
        self._before = Changes.before(shards, grads, starts, layout, [1.0] * len(shards), self.reduction)
        self._decided, self._olds = decision, [shard.detach().clone() for shard in shards]

    @torch.no_grad()
    def _note_changes(self) -> None:
        """Measures how a step that is due has changed the model's parameters, after all shards have moved."""
        decision, olds, self._olds = self._decided, self._olds, []
        if decision is None:
            return
        updates = []
        for shard, old, tuner in zip(self.places.shards(), olds, self._tuner_of, strict=True):
            has_moved = decision.new_scales[tuner] > 0
            updates.append(torch.sub(shard.detach(), old, out=old) if has_moved else self.mechanic.state[shard][REF])
        owners = [self._tuner_of[owner] for owner in self._before.layout.owners]
        self.mechanic.note_changes(self._before.after(updates), owners, decision)

    def _parts(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor | None]]:
        """Param group, weights, gradient, and the reference or delta."""
        slot = main_slot(self.mechanic.settings.rule)
        for index, shard in enumerate(self.places.shards()):
            group = self.mechanic.param_groups[self.places.group_of(index)]
            kept = self.mechanic.state.get(shard, {}).get(slot)
            start = 0
            for grad in self.places.gradients(index):
                here = slice(start, start + grad.numel())
                x = shard.detach()[here]
                yield group, x, grad.view(-1), None if kept is None else kept[here]
                start += grad.numel()

    def _unscaled(self, sums: Tensor, total_norm: Any) -> Tensor:
        """The sums for unscaled and clipped gradients."""
        factor = torch.ones(1, device=self.places.shards()[0].device)
        self.places.unscale(factor, total_norm)
        return with_scaled_gradients(sums, factor.to(sums)[0])

    def _refuse_to_count(self, params: Sequence[Tensor]) -> NoReturn:
        raise RuntimeError(
            "this optimizer holds only this rank's shards of the weights: call engine.step(), not optimizer.step()."
        )
