"""The fused path: a known base's update and Mechanic's move in one pass over memory.

The moments stay in the base's own state, under the base's own names, so that checkpoints and `demechanize` do not know
the difference, and a run may change paths at any step.

The pass also leaves <x, x>, <d, x> and <d, d> of what it wrote, so that the next step's sums need not read the weights:
44 bytes a parameter in all for AdamW in float32, where the base alone takes 28.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.param_state import DELTA, REF, IndexRange, ParamState, needs_reference
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels.addresses import BaseState
from mechanic_plugins.kernels.cuda import on
from mechanic_plugins.kernels.triton_batch import FUSED_PROGRAMS, MOVE_BLOCK, MOVE_WARPS, TritonBatch
from mechanic_plugins.kernels.triton_support import triton_type
from mechanic_plugins.lion import Lion
from mechanic_plugins.passes.plan import Closure, Decision, Group, ParamBatch, Plan

__all__ = ["DTYPES", "FusedBatch", "FusedPlan", "can_fuse", "prepare"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAM, _ADAMW, _SGD, _LION = range(4)
_STEPS_BLOCK = 128


def can_fuse(base: Optimizer) -> bool:
    """Whether the fused pass knows this base with these settings."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        return False  # they would not be called
    if type(base) in (torch.optim.Adam, torch.optim.AdamW):
        return not any(group["amsgrad"] or group["foreach"] for group in base.param_groups)
    if type(base) is torch.optim.SGD:
        return not any(group["dampening"] or group["foreach"] for group in base.param_groups)
    return type(base) is Lion


def prepare(base: Optimizer, params: Sequence[Tensor]) -> None:
    """Makes the base's state for parameters that have none yet, as the base itself would."""
    for p in params:
        state = base.state[p]
        for name in _moments(base):
            if state.get(name) is None:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
        if _has_steps(base):
            step = state.get("step")
            known = torch.zeros((), dtype=torch.float32) if step is None else torch.as_tensor(step)
            state["step"] = known.to(device=local(p).device, dtype=torch.float32)


class FusedBatch(ParamBatch):
    """Parameters whose base and move share a launch."""

    tensors: TritonBatch

    def _names(self) -> tuple[str, ...]:
        return (*super()._names(), *_moments(self.base), *(("step",) if _has_steps(self.base) else ()))

    def _tensor_batch(self, param_states: Sequence[ParamState], *, by_kernels: bool) -> TritonBatch:
        assert by_kernels
        states = [{name: local(t) for name, t in each.items()} for each in self.watched]
        self._refuse_foreign_state()
        param_states = [
            param_state._replace(delta=s[DELTA], ref=s.get(REF))
            for param_state, s in zip(param_states, states, strict=True)
        ]
        first, second, *_ = *_moments(self.base), "", ""
        self.moment_type = states[0][first].dtype if first else param_states[0].x.dtype
        return TritonBatch(param_states, extras=[BaseState(s.get(first), s.get(second), s.get("step")) for s in states])

    def _refuse_foreign_state(self) -> None:
        """A kernel would read past the end of what is too short."""
        moments = _moments(self.base)
        kinds = {torch.float32, *(self.states[0][name].dtype for name in (DELTA, *moments))}
        for p, state in zip(self.params, self.states, strict=True):
            for name in (DELTA, *moments):
                tensor = state[name]
                if tensor.shape != p.shape or tensor.dtype not in kinds:
                    raise ValueError(
                        f"the optimizer's {name} is {tensor.dtype} of shape {tuple(tensor.shape)} where the parameter "
                        f"has shape {tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you "
                        "change a parameter's shape, or use backend='foreach'."
                    )

    def launch_key(self) -> tuple[Any, ...]:
        """What the launches of a step are made with, besides the learning rate and what is on the device."""
        group = self.group
        flags = (group.get("maximize"), group.get("nesterov"), group.get("betas"), group.get("decoupled_weight_decay"))
        return self.tensors.launch_key(), self.tuner_index, self.weight, _constants(self.base, group), flags

    def lr(self, unit: float) -> Tensor:
        """What the base is stepped at, on the device."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            return lr.to(self.device, torch.float64) / unit
        return torch.full((), lr / unit, dtype=torch.float64, device=self.device)

    def apply(self, scales: Tensor, lr: Tensor) -> None:
        """Steps the base and plays the scale; where the step is not made, touches nothing."""
        from mechanic_plugins.kernels import triton_fused as kernels

        rows, group = self.tensors, self.group
        whole = IndexRange(0, len(self.params))
        rows.begin_moves([whole], programs=FUSED_PROGRAMS)
        norms, tiles = rows.targets[whole], rows.table.tiled(MOVE_BLOCK)
        scales = scales[self.tuner_index].to(self.device, non_blocking=True)
        if tiles.starts[-1]:
            with on(self.device):
                kernels.fused_kernel[(len(norms),)](
                    rows.pointers,
                    rows.gradient_pointers,
                    tiles.blocks,
                    tiles.firsts,
                    tiles.starts[-1],
                    scales,
                    norms,
                    self._corrections(kernels, scales) if _has_steps(self.base) else norms,
                    lr,
                    *_constants(self.base, group),
                    KIND=_kind(self.base, group),
                    MOMENTUM=bool(group.get("momentum")),
                    NESTEROV=bool(group.get("nesterov")),
                    MAXIMIZE=bool(group.get("maximize")),
                    **rows.types("xtype", "gtype", "dtype"),
                    mtype=triton_type(self.moment_type),
                    LOW=needs_reference(rows.xtype),
                    DITHERED=rows.dtype == torch.bfloat16,
                    ALIGNED=rows.addresses.are_aligned,
                    SIZE=MOVE_BLOCK,
                    num_warps=MOVE_WARPS,
                )

    def _corrections(self, kernels: Any, scales: Tensor) -> Tensor:
        """Counts Adam's step for every parameter, and its bias corrections."""
        count = len(self.params)
        corrections = torch.empty(count, 2, device=self.device)
        logs = tuple(math.log(beta) if beta > 0 else -math.inf for beta in self.group["betas"])
        rows, constants = self.tensors, self.tensors.table.constant(logs)
        where = rows.pointers, rows.gradient_pointers
        with on(self.device):
            kernels.adam_steps_kernel[(-(-count // _STEPS_BLOCK),)](
                *where, count, scales, constants, corrections, SIZE=_STEPS_BLOCK, num_warps=4
            )
        return corrections


class FusedPlan(Plan):
    """A step in one pass."""

    is_fused = True
    batches: list[FusedBatch]  # type: ignore[assignment]
    recording: object = None
    """The launches as CUDA graphs: see `mechanic_plugins.optimizer.recording`."""

    def is_current(self) -> bool:
        return can_fuse(self.base) and super().is_current()

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        scales = decision.table
        for batch in self.batches:
            batch.apply(scales, batch.lr(unit))
        self.finish()

    def finish(self) -> None:
        """All launches of the step are made."""
        for batch in self.batches:
            batch.tensors.finish_one_move(batch.xs())
        self.base._opt_called = True  # type: ignore[attr-defined]  # for schedulers built on the base

    def launch_key(self) -> tuple[Any, ...]:
        """See `FusedBatch.launch_key`."""
        return tuple(batch.launch_key() for batch in self.batches)


def _moments(base: Optimizer) -> tuple[str, ...]:
    if type(base) is torch.optim.SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()
    return ("exp_avg",) if type(base) is Lion else ("exp_avg", "exp_avg_sq")


def _has_steps(base: Optimizer) -> bool:
    return type(base) in (torch.optim.Adam, torch.optim.AdamW)


def _kind(base: Optimizer, group: Group) -> int:
    if type(base) is torch.optim.SGD:
        return _SGD
    if type(base) is Lion:
        return _LION
    return _ADAMW if type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay") else _ADAM


def _constants(base: Optimizer, group: Group) -> tuple[float, float, float, float]:
    """Weight decay, and the base's own three."""
    decay = float(group["weight_decay"])
    if type(base) is torch.optim.SGD:
        return decay, float(group["momentum"]), 0.0, 0.0
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return decay, beta1, beta2, float(group.get("eps", 0.0))
