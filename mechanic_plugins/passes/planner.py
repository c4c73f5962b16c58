"""Chooses how a step is made: fused with a known base on a GPU, else around the base."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.passes.around import AroundBase
from mechanic_plugins.passes.fused import FusedPlan, can_fuse
from mechanic_plugins.passes.plan import Entry, Plan
from mechanic_plugins.passes.slots import Slots
from mechanic_plugins.passes.with_delta import WithDelta

__all__ = ["Backend", "Planner", "check_backend"]

Backend = Literal["auto", "fused", "triton", "foreach"]
_KEPT = 64


def check_backend(backend: str) -> None:
    """Rejects unknown backends."""
    if backend not in get_args(Backend):
        choices = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {choices}, got {backend!r}: 'auto' takes the fastest that works.")


class Planner:
    """The plans of one base. Holds nothing that belongs in a checkpoint."""

    def __init__(self, base: Optimizer, backend: Backend, settings: Settings, slots: Slots) -> None:
        self.base, self.backend, self.settings, self.slots = base, backend, settings, slots
        self._uses_kernels: dict[torch.device, bool] = {}
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()

    def uses_kernels(self, device: torch.device) -> bool:
        """Whether Triton is used on this device."""
        if device not in self._uses_kernels:
            is_default = self.settings.rule == "relative"
            self._uses_kernels[device] = is_default and self.backend != "foreach" and triton_support.can_run(device)
        return self._uses_kernels[device]

    def plan(
        self,
        params: Sequence[Tensor],
        entries: Callable[[], Sequence[Entry]],
        tuner_of: Callable[[], Sequence[int]],
        *,
        is_released: bool = False,
        has_begun: bool = False,
    ) -> Plan:
        """The plan of an earlier step with the same moving parameters if it is still valid, else a new one.

        `has_begun`: a kernel may decide.
        """
        key = is_released, has_begun, *map(id, [p for p in params if p.grad is not None or p.requires_grad])
        plan = self._plans.get(key)
        if plan is None or not plan.is_current():
            plan = self._plans[key] = self._new(entries(), tuner_of(), is_released, has_begun)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return plan

    def forget(self) -> None:
        """Drops all plans and the tensors they hold."""
        self._plans.clear()

    def _new(self, entries: Sequence[Entry], tuner_of: Sequence[int], is_released: bool, has_begun: bool) -> Plan:
        base, slots = self.base, self.slots
        if is_released:
            return AroundBase(base, entries, tuner_of, slots, keeps=False)
        may_fuse, by_kernels = self.backend == "auto", self.backend != "foreach"
        if self.settings.rule != "relative":
            return WithDelta(base, entries, (), slots, may_fuse=may_fuse)
        if self._can_fuse(entries) and has_begun and slots.are_complete(base.state, [e.param for e in entries]):
            return FusedPlan(base, entries)
        how = {"may_fuse": may_fuse, "by_kernels": by_kernels, "has_begun": has_begun}
        return AroundBase(base, entries, tuner_of, slots, **how)

    def _can_fuse(self, entries: Sequence[Entry]) -> bool:
        """Whether the fused pass can make this step."""
        if self.backend in ("foreach", "triton") or not entries:
            return False
        possible = can_fuse(self.base, entries)
        if self.backend == "fused" and not possible:
            raise ValueError(
                f"backend='fused' cannot step {type(self.base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        return possible
