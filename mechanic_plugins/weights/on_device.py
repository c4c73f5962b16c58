"""A step that a GPU decides: sums, decision and move are queued there, and the host waits for none of them.

Either a kernel of our own makes the base's update and Mechanic's move in one pass, for the bases in `can_fuse`; or the
base's own fused kernel is told by a tensor what to multiply its lr by, how to clip, and whether to skip the step. The
moments stay in the base's state under its own names, so that checkpoints and `demechanize` see no difference and a run
may change plans at any step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.triton_batch import ADAM, ADAMW, LION, SGD, TritonBatch, Update
from mechanic_plugins.lion import Lion
from mechanic_plugins.rule.decide import Decision
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import empty
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.on_host import COPIED_AT_ONCE, HostPlan
from mechanic_plugins.weights.plan import Batch, Closure, Entry, Group, Plan
from mechanic_plugins.weights.slots import MASTER, REF, Slots, is_16_bit
from mechanic_plugins.weights.step_base import StepBase, is_observed

__all__ = ["DevicePlan", "can_be_told", "can_fuse"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(base: Optimizer, entries: Sequence[Entry] = ()) -> bool:
    """Whether our own kernel knows this base with these settings, and these parameters."""
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


def can_be_told(base: Optimizer, entries: Sequence[Entry], slots: Slots) -> bool:
    """Whether the base's own kernel takes the decision from the device, and ours can compute the sums."""
    if not facts.skips_on_found_inf(base, [e.param for e in entries]) or not facts.is_linear_in_lr(type(base)):
        return False
    if not slots.is_default and any(is_16_bit(e.param.dtype) for e in entries):
        return False
    return all(triton_support.fits(local(e.param), local(e.param.grad)) for e in entries)


class DeviceBatch(Batch):
    """Parameters of one param group that share launches."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], slots: Slots, *, steps_itself: bool) -> None:
        super().__init__(base, entries, slots)
        self._base = base
        moments = _moments(base) if steps_itself else ()
        other = (MASTER if slots.is_default else REF,) if is_16_bit(self.params[0].dtype) else ()
        steps = ("step",) if steps_itself and _has_steps(base) else ()
        self._names = (slots.main, *other, *moments, *steps)
        self._states = [base.state[p] for p in self.params]
        self._held = {name: [state[name] for state in self._states] for name in self._names}
        self._refuse_foreign_state()
        names = slots.main, *(other or ("",)), *(*moments, "", "")[:2], *steps
        rows = [Kept(*(local(state[name]) if name else None for name in names)) for state in self._states]  # type: ignore[arg-type]
        self.kernels = TritonBatch(self.xs(), self.grads(), rows, summed=not slots.is_default)
        self._ends = [local(each[at]) for each in self._held.values() for at in (0, -1)]
        self._places = list(map(Tensor.data_ptr, self._ends))

    @staticmethod
    def kind(base: Optimizer, entry: Entry, slots: Slots) -> tuple[Any, ...]:
        own = triton_support.kind_of(local(entry.param), local(entry.param.grad))
        return *Batch.kind(base, entry, slots), id(entry.group), *own

    def _refuse_foreign_state(self) -> None:
        """Rejects state of another shape or dtype: a kernel would read past its end."""
        names = [name for name in self._names if name != "step"]
        dtypes = {name: self._held[name][0].dtype for name in names}
        for index, p in enumerate(self.params):
            for name in names:
                tensor = self._held[name][index]
                if tensor.shape != p.shape or tensor.dtype != dtypes[name]:
                    raise ValueError(
                        f"the optimizer's {name} is {tensor.dtype} of shape {tuple(tensor.shape)} where the parameter "
                        f"has shape {tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you "
                        "change a parameter's shape, or use backend='foreach'."
                    )

    def is_ready(self) -> bool:
        """Whether the state is still in the same memory. Loading, and tools that move it, replace the tensors."""
        for name, tensors in self._held.items():
            if not all(map(operator.is_, [state.get(name) for state in self._states], tensors)):
                return False
        if list(map(Tensor.data_ptr, self._ends)) != self._places:
            return False
        return self.kernels.addresses.refresh(self.xs(), self.grads())

    def add_sums(self, out: Tensor, *, with_decay: bool) -> None:
        """Adds this batch's contribution to its tuner's sums, and its number of gradients to the count at the end."""
        self.kernels.add_sums(
            out,
            tuner_index=self.tuner_index,
            weight=self.weight,
            maximize=self.sign < 0,
            penalty=self.penalty,
            decay=with_decay,
        )

    def row(self, table: Tensor) -> Tensor:
        """What was decided for this batch's tuner."""
        return table[self.tuner_index].to(self.device, non_blocking=True)

    def step(self, table: Tensor) -> None:
        """The base's update and Mechanic's move. Writes nothing if the step is not made."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(self.device, torch.float64)
        else:
            lr = torch.full((), lr, dtype=torch.float64, device=self.device)
        self.kernels.step(_update(self._base, self.group), self.row(table), lr)


class DevicePlan(Plan):
    """For tuners that have begun and parameters with complete state."""

    batches: list[DeviceBatch]
    decides_on_device = True

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], slots: Slots, settings: Settings, *, around: HostPlan | None
    ) -> None:
        """`around` steps the base; without it, our own kernel does."""
        if around is None:
            _prepare(base, [entry.param for entry in entries])
        self._around, self._with_decay = around, bool(settings.s_decay)

        def make(base: Optimizer, part: Sequence[Entry], slots: Slots) -> DeviceBatch:
            return DeviceBatch(base, part, slots, steps_itself=around is None)

        make.kind = DeviceBatch.kind  # type: ignore[attr-defined]
        super().__init__(base, entries, slots, make)
        self._step_base, self._stretch = StepBase(base, self.params, may_fuse=False), 1.0
        if not all(batch.is_ready() for batch in self.batches):
            raise AssertionError("a batch's own tensors do not fit its kernels")

    def is_current(self) -> bool:
        """The batches check the weights and the state by their addresses."""
        if self._around is None:
            is_same = can_fuse(self.base)
        else:
            is_same = facts.skips_on_found_inf(self.base, self.params) and self._around.is_current()
        return is_same and super().is_current() and all(batch.is_ready() for batch in self.batches)

    def sums(self, tuners: Sequence[Tuner]) -> Tensor:
        """This rank's sums, on the device."""
        self._stretch = 2.0 ** -math.frexp(tuners[0].unit)[1]
        out = empty(len(tuners), self.batches[0].device)
        for batch in self.batches:
            batch.add_sums(out, with_decay=self._with_decay)
        return out

    def move(self, decision: Decision, closure: Closure | None) -> Any:
        """Moves the weights as decided, undone on an error; returns what the base returned."""
        table = decision.table
        assert table is not None
        if self._around is not None and self.slots.is_default:
            return self._around.step_at_scale(decision, closure)
        if self._around is not None:
            return self._step_and_move(table, closure)
        for batch in self.batches:
            batch.step(table)
        for batch in self.batches:
            torch.autograd.graph.increment_version(batch.xs())
        self.base._opt_called = True  # type: ignore[attr-defined]  # for schedulers built on the base
        return None

    def _step_and_move(self, table: Tensor, closure: Closure | None) -> Any:
        """Published rules: a copy of the weights, the base's step, and the move; a part of the weights at a time."""
        if closure is not None or is_observed(self.base):
            return self._step_part([(batch, 0, len(batch.params)) for batch in self.batches], table, closure)
        parts = list(self._parts())
        if len(parts) == 1:
            return self._step_part(parts[0], table, None)
        lists = [group["params"] for group in self.base.param_groups]
        try:
            for part in parts:
                inside = {id(p) for batch, first, last in part for p in batch.params[first:last]}
                for group, params in zip(self.base.param_groups, lists, strict=True):
                    group["params"] = [p for p in params if id(p) in inside]
                self._step_part(part, table, None)
        finally:
            for group, params in zip(self.base.param_groups, lists, strict=True):
                group["params"] = params
        return None

    def _step_part(self, part: Sequence[tuple[DeviceBatch, int, int]], table: Tensor, closure: Closure | None) -> Any:
        """The lr is multiplied by a power of two that brings it close to 1, and the update divided by it, exactly.

        The weights' rounding then takes fewer of the update's digits: see `HostPlan._stretch`.
        """
        lrs = [group["lr"] * self._stretch for group in self.base.param_groups] if self._stretch != 1 else ()
        copies = [batch.kernels.snapshot(first, last) for batch, first, last in part]
        try:
            result = self._step_base(lrs, table[0, 2], is_made=table[0, 1], closure=closure)
        except BaseException:
            for (batch, first, last), copy in zip(part, copies, strict=True):
                batch.kernels.restore(batch.xs(), first, last, copy)
            raise
        for (batch, first, last), copy in zip(part, copies, strict=True):
            batch.kernels.move(first, last, copy, batch.row(table), shrink=1 / self._stretch)
        return result

    def _parts(self) -> Iterator[list[tuple[DeviceBatch, int, int]]]:
        """Batches, or ranges of one, whose copies fit into memory together."""
        part, size = list[tuple[DeviceBatch, int, int]](), 0
        for batch in self.batches:
            first = 0
            for index, nbytes in enumerate(batch.kernels.snapshot_bytes):
                if size + nbytes > COPIED_AT_ONCE and (part or index > first):
                    yield [*part, (batch, first, index)] if index > first else part
                    part, size, first = [], 0, index
                size += nbytes
            part.append((batch, first, len(batch.params)))
        yield part


def _prepare(base: Optimizer, params: Sequence[Tensor]) -> None:
    """Creates the base's missing state and puts it on the device, where the kernels need it."""
    for p in params:
        state = base.state[p]
        for name in _moments(base):
            if state.get(name) is None:
                dtype = torch.float32 if p.dtype == torch.float16 else p.dtype  # see `weights.masters`
                state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        if _has_steps(base):
            step = state.get("step")
            known = torch.zeros((), dtype=torch.float32) if step is None else torch.as_tensor(step)
            state["step"] = known.to(device=local(p).device, dtype=torch.float32)


def _moments(base: Optimizer) -> tuple[str, ...]:
    if type(base) is torch.optim.SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()
    return ("exp_avg",) if type(base) is Lion else ("exp_avg", "exp_avg_sq")


def _has_steps(base: Optimizer) -> bool:
    return type(base) in (torch.optim.Adam, torch.optim.AdamW)


def _update(base: Optimizer, group: Group) -> Update:
    """The base's update with its constants."""
    decay, maximize = float(group["weight_decay"]), bool(group.get("maximize"))
    if type(base) is torch.optim.SGD:
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        return Update(SGD, decay, momentum, nesterov=nesterov, maximize=maximize)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if type(base) is Lion:
        return Update(LION, decay, beta1, beta2, maximize=maximize)
    is_decoupled = type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay")
    return Update(ADAMW if is_decoupled else ADAM, decay, beta1, beta2, float(group["eps"]), maximize=maximize)
