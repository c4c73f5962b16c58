"""The fused path: sums, decision and a known base's update in a few launches, none of which the host waits for.

The moments stay in the base's state under its own names, so that checkpoints and `demechanize` see no difference and a
run may change paths at any step. In float32, AdamW reads and writes 40 bytes a parameter, where
the base alone takes 28.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.param_state import MASTER, REF, is_16_bit
from mechanic_plugins.core.tuner import Decision
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.cuda import on
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.kernels.triton_support import processors, triton_type
from mechanic_plugins.lion import Lion
from mechanic_plugins.passes.plan import Batch, Closure, Entry, Group, Plan

__all__ = ["FusedPlan", "can_fuse"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAM, _ADAMW, _SGD, _LION = range(4)
_BLOCK, _WARPS, _PROGRAMS, _STEPS_BLOCK = 512, 4, 128, 128
"""Elements per block, warps per program, programs per multiprocessor: the fastest on an H200."""


def can_fuse(base: Optimizer, entries: Sequence[Entry] = ()) -> bool:
    """Whether the fused pass knows this base with these settings, and these parameters."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        return False  # the kernel would not call them
    for e in entries:
        x, grad = local(e.param), local(e.param.grad)
        if x.dtype not in _DTYPES or not triton_support.fits(x, grad):
            return False
    if type(base) in (torch.optim.Adam, torch.optim.AdamW):
        return not any(group["amsgrad"] or group["foreach"] for group in base.param_groups)
    if type(base) is torch.optim.SGD:
        return not any(group["dampening"] or group["foreach"] for group in base.param_groups)
    return type(base) is Lion


def prepare(base: Optimizer, params: Sequence[Tensor]) -> None:
    """Creates the base's missing state and puts it on the device, where the kernels need it."""
    for p in params:
        state = base.state[p]
        for name in _moments(base):
            if state.get(name) is None:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
        if _has_steps(base):
            step = state.get("step")
            known = torch.zeros((), dtype=torch.float32) if step is None else torch.as_tensor(step)
            state["step"] = known.to(device=local(p).device, dtype=torch.float32)


class FusedBatch(Batch):
    """Parameters of one param group that share launches."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry]) -> None:
        super().__init__(base, entries)
        self.base, self.group = base, entries[0].group
        moments, steps = _moments(base), ("step",) if _has_steps(base) else ()
        self.names = (REF, *((MASTER,) if is_16_bit(self.params[0].dtype) else ()), *moments, *steps)
        self._states = [base.state[p] for p in self.params]
        self._kept = {name: [state[name] for state in self._states] for name in self.names}
        self._refuse_foreign_state()
        rows = [self._row(state) for state in self._states]
        self.tensors = self._kernels = TritonBatch(self.xs(), self.grads(), rows)
        self._ends = [local(each[at]) for each in self._kept.values() for at in (0, -1)]
        self._places = list(map(Tensor.data_ptr, self._ends))

    @staticmethod
    def kind(base: Optimizer, entry: Entry) -> tuple[Any, ...]:
        own = triton_support.kind_of(local(entry.param), local(entry.param.grad))
        return *Batch.kind(base, entry), id(entry.group), *own

    def _row(self, state: dict[str, Any]) -> Kept:
        first, second, *_ = *_moments(self.base), "", ""
        others = (MASTER, first, second, "step")
        return Kept(local(state[REF]), *(local(state[name]) if name in self.names else None for name in others))

    def _refuse_foreign_state(self) -> None:
        """Rejects state of another shape or dtype: a kernel would read past its end."""
        names = [name for name in self.names if name != "step"]
        kinds = {name: self._kept[name][0].dtype for name in names}
        for index, p in enumerate(self.params):
            for name in names:
                tensor = self._kept[name][index]
                if tensor.shape != p.shape or tensor.dtype != kinds[name]:
                    raise ValueError(
                        f"the optimizer's {name} is {tensor.dtype} of shape {tuple(tensor.shape)} where the parameter "
                        f"has shape {tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you "
                        "change a parameter's shape, or use backend='foreach'."
                    )

    def can_use_kernels(self) -> bool:
        """Whether the state is still in the same memory. Loading, and tools that move it, replace the tensors."""
        for name, tensors in self._kept.items():
            if not all(map(operator.is_, [state.get(name) for state in self._states], tensors)):
                return False
        if list(map(Tensor.data_ptr, self._ends)) != self._places:
            return False
        return self.tensors.addresses.refresh(self.xs(), self.grads())

    def launch_key(self) -> tuple[Any, ...]:
        """Everything a step's launches depend on, other than the learning rate and data on the device."""
        group = self.group
        flags = group.get("maximize"), group.get("nesterov"), group.get("betas"), group.get("decoupled_weight_decay")
        return self.tensors.launch_key(), self.tuner_index, self.weight, _constants(self.base, group), flags

    def lr(self, unit: float) -> Tensor:
        """The base's lr at a scale of 1, on the device."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            return lr.to(self.device, torch.float64) / unit
        return torch.full((), lr / unit, dtype=torch.float64, device=self.device)

    def apply(self, scales: Tensor, lr: Tensor) -> None:
        """Steps the base at the scale. Writes nothing if the step is not made."""
        from mechanic_plugins.kernels import triton_fused as kernels

        batch, group = self.tensors, self.group
        tiles = batch.table.tiled(_BLOCK)
        scales = scales[self.tuner_index].to(self.device, non_blocking=True)
        if not tiles.count:
            return
        with on(self.device):
            kernels.fused_kernel[(min(tiles.count, _PROGRAMS * processors(self.device)),)](
                batch.table.pointers,
                batch.table.gradients,
                tiles.blocks,
                tiles.firsts,
                tiles.count,
                scales,
                self._corrections(kernels, scales) if _has_steps(self.base) else scales,
                lr,
                *_constants(self.base, group),
                KIND=_kind(self.base, group),
                MOMENTUM=bool(group.get("momentum")),
                NESTEROV=bool(group.get("nesterov")),
                MAXIMIZE=bool(group.get("maximize")),
                **batch.types("xtype", "gtype"),
                mtype=triton_type(self._moment_type()),
                LOW=batch.is_low,
                ALIGNED=batch.addresses.are_aligned,
                SIZE=_BLOCK,
                num_warps=_WARPS,
            )

    def _moment_type(self) -> torch.dtype:
        moments = _moments(self.base)
        return self._kept[moments[0]][0].dtype if moments else self.tensors.xtype

    def _corrections(self, kernels: Any, scales: Tensor) -> Tensor:
        """Increments Adam's step counts and computes its bias corrections."""
        count = len(self.params)
        corrections = torch.empty(count, 2, device=self.device)
        logs = tuple(math.log(beta) if beta > 0 else -math.inf for beta in self.group["betas"])
        batch, constants = self.tensors, self.tensors.table.constant(logs)
        with on(self.device):
            kernels.adam_steps_kernel[(-(-count // _STEPS_BLOCK),)](
                batch.table.pointers, batch.table.gradients, count, scales, constants, corrections,
                SIZE=_STEPS_BLOCK, num_warps=4,
            )  # fmt: skip
        return corrections


class FusedPlan(Plan):
    """For tuners that have begun and parameters with complete state."""

    recording: object = None
    """The launches recorded as CUDA graphs: see `mechanic_plugins.optimizer.recording`."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry]) -> None:
        prepare(base, [entry.param for entry in entries])
        super().__init__(base, entries, REF, FusedBatch)
        pointed = all(batch.can_use_kernels() for batch in self.batches)
        assert pointed

    def is_current(self) -> bool:
        """The batches check the weights and the state by their addresses."""
        is_current = can_fuse(self.base) and self.has_same_groups()
        return is_current and all(batch.can_use_kernels() for batch in self.batches)

    def decides_on_device(self) -> bool:
        return True

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        scales = decision.table(self.batches[0].device)
        for batch in self.batches:
            batch.apply(scales, batch.lr(unit))
        self.finish()

    def finish(self) -> None:
        """Called after the last launch of a step."""
        for batch in self.batches:
            torch.autograd.graph.increment_version(batch.xs())
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
    """Weight decay, then up to three constants of the base's own."""
    decay = float(group["weight_decay"])
    if type(base) is torch.optim.SGD:
        return decay, float(group["momentum"]), 0.0, 0.0
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return decay, beta1, beta2, float(group.get("eps", 0.0))
