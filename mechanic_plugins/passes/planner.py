"""Which way a step goes over memory: in one pass where the base is known and on a GPU, else around the base.

Both ways lead to the same weights, and a run may change between them at any step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import ParamState, needs_reference
from mechanic_plugins.core.tuner_state import empty_sums
from mechanic_plugins.distributed.sharding import is_dtensor
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.kernels.foreach import ForeachBatch
from mechanic_plugins.kernels.table import Table
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.passes import fused
from mechanic_plugins.passes.any_base import AnyBasePlan
from mechanic_plugins.passes.deltas import complete
from mechanic_plugins.passes.fused import FusedBatch, FusedPlan
from mechanic_plugins.passes.plan import Closure, Decision, Entry, ParamBatch, Plan
from mechanic_plugins.passes.twins import batch_for

__all__ = ["Backend", "Passes", "check_backend"]

Backend = Literal["auto", "fused", "triton", "foreach"]

AnyPlan = TypeVar("AnyPlan", bound=Plan)

_KEPT = 64


def check_backend(backend: str) -> None:
    """Refuses a name that is none of the backends."""
    if backend not in get_args(Backend):
        choices = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {choices}, got {backend!r}: 'auto' takes the fastest that works.")


class Passes:
    """The passes around one base. Holds nothing that a checkpoint needs."""

    def __init__(self, base: Optimizer, backend: Backend) -> None:
        self.base = base
        self.backend = backend
        self._plans: OrderedDict[tuple[int, ...], Plan] = OrderedDict()
        self._last: tuple[Sequence[Tensor], Plan | None] = ((), None)
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()

    def uses_kernels(self, device: torch.device) -> bool:
        """Whether what is on this device is left to Triton."""
        return self.backend != "foreach" and triton_support.can_run(device)

    def plan(self, params: Sequence[Tensor], entries: Callable[[], Sequence[Entry]]) -> Plan:
        """What an earlier step has set up for those of the parameters that move, where it still fits; else a new plan.

        Where all have a gradient, as they mostly do, the plan of the last step needs no search.
        """
        those, last = self._last
        fits = params is those and last is not None and last.is_current()
        if last is not None and fits and last.has_every_gradient():
            return last
        key = _ids_of_moving(params)
        plan = self._plans.get(key)
        if plan is None or not ((plan is last and fits) or plan.is_current()):
            plan = self._new_plan(key, entries())
        self._last = params, self._plans.get(key)
        return plan

    def _new_plan(self, key: tuple[int, ...], entries: Sequence[Entry]) -> Plan:
        kinds = _in_kinds(entries, self._kind)
        batches = [batch_for(self.base, part, by_kernels=kind[0]) for kind, part in kinds.items()]
        pointed = all(batch.refresh_pointers() for batch in batches)
        assert pointed
        if self._can_fuse(entries):
            return FirstFusedStep(self.base, entries, batches, lambda: self._keep(key, self._fused_plan(entries)))
        plan = AnyBasePlan(self.base, entries, batches, may_fuse_on_cpu=self.backend == "auto")
        return self._keep(key, plan)

    def _fused_plan(self, entries: Sequence[Entry]) -> FusedPlan:
        fused.prepare(self.base, [entry.param for entry in entries])
        for entry in entries:
            complete(self.base, entry.param, entry.param_state.x, entry.delta_dtype)
        kinds = _in_kinds(entries, triton_support.kind_of).values()
        return FusedPlan(self.base, entries, [FusedBatch(self.base, part, by_kernels=True) for part in kinds])

    def _keep(self, key: tuple[int, ...], plan: AnyPlan) -> AnyPlan:
        _remember(self._plans, key, plan)
        return plan

    def _kind(self, param_state: ParamState) -> tuple[Any, ...]:
        """Whether kernels can walk it, and what else param_states that share launches have in common."""
        by_kernels = param_state.is_complete() and self.backend != "foreach" and triton_support.fits(param_state)
        if by_kernels:
            return True, *triton_support.kind_of(param_state)
        is_first = needs_reference(param_state.x.dtype) and not param_state.is_complete()
        return False, param_state.x.device, param_state.x.dtype, is_first

    def _can_fuse(self, entries: Sequence[Entry]) -> bool:
        """Whether this step can be made in one pass."""
        if self.backend in ("foreach", "triton") or not entries:
            return False
        possible = fused.can_fuse(self.base) and all(
            e.param_state.x.dtype in fused.DTYPES and triton_support.fits(e.param_state) for e in entries
        )
        if self.backend == "fused" and not possible:
            raise ValueError(
                f"backend='fused' cannot step {type(self.base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        return possible

    def sums(self, entries: Sequence[Entry], *, tuners: int, device: torch.device, with_dx: bool) -> Tensor:
        """The sums of param_states that an engine put together, which may be others in every step: see `Plan.sums`."""
        out = empty_sums(tuners, device)
        for kind, part in _in_kinds(entries, self._kind).items():
            param_states, entry = [e.param_state for e in part], part[0]
            rows = TritonBatch(param_states, table=self._table(param_states)) if kind[0] else ForeachBatch(param_states)
            xs, grads = (
                [param_state.x for param_state in param_states],
                [param_state.grad for param_state in param_states],
            )
            pointed = rows.refresh_pointers(xs, grads)
            assert pointed
            rows.add_sums(
                xs,
                grads,
                out,
                tuner_index=entry.tuner_index,
                weight=entry.weight,
                maximize=bool(entry.group.get("maximize")),
                penalty=known_bases.l2_penalty(self.base, entry.group),
                with_dx=with_dx,
            )
        return out

    def _table(self, param_states: Sequence[ParamState]) -> Table:
        key = triton_support.kind_of(param_states[0]), tuple(param_state.x.numel() for param_state in param_states)
        if key not in self._tables:
            _remember(self._tables, key, Table(param_states[0].x.device, key[1]))
        return self._tables[key]


def _ids_of_moving(params: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(id(p) for p in params if p.grad is not None or p.requires_grad)


def _in_kinds(
    entries: Sequence[Entry], kind_of: Callable[[ParamState], tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Entry]]:
    """Entries that one batch can hold, together."""
    kinds: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for e in entries:
        kind = (*kind_of(e.param_state), id(e.group), e.tuner_index, e.weight, is_dtensor(e.param))
        kinds[kind].append(e)
    return kinds


def _remember(kept: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        kept.popitem(last=False)


class FirstFusedStep(Plan):
    """The first step of a fused plan: the sums are of what is there; the base's state is made when the step is."""

    is_fused = True

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], batches: Sequence[ParamBatch], fuse: Callable[[], FusedPlan]
    ) -> None:
        super().__init__(base, entries, batches)
        self._fuse = fuse

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        plan = self._fuse()
        pointed = plan.is_current()
        assert pointed
        plan.apply(decision, unit=unit, closure=closure, started=started)
        for batch in plan.batches:  # a CUDA graph reads them too: captured later, it must find that kernel loaded
            batch.tensors.forget_norms()
