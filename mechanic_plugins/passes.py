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

from mechanic_plugins import fused, multi_tensor
from mechanic_plugins.any_base import AnyBasePlan
from mechanic_plugins.fused import FusedPiece, FusedPlan
from mechanic_plugins.kernels import Tensors
from mechanic_plugins.multi_tensor import Rows, Table
from mechanic_plugins.pieces import Closure, Decision, Entry, Piece, Plan, complete
from mechanic_plugins.sharding import is_dtensor
from mechanic_plugins.slots import Slot, needs_reference
from mechanic_plugins.twins import piece_for

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
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()

    def uses_kernels(self, device: torch.device) -> bool:
        """Whether what is on this device is left to Triton."""
        return self.backend != "foreach" and multi_tensor.can_run(device)

    def plan(self, key: tuple[int, ...], entries: Callable[[], Sequence[Entry]]) -> Plan:
        """What an earlier step has set up for the parameters with these ids, where it still fits; else a new plan."""
        plan = self._plans.get(key)
        if plan is not None and plan.is_current():
            return plan
        return self._new_plan(key, entries())

    def _new_plan(self, key: tuple[int, ...], entries: Sequence[Entry]) -> Plan:
        kinds = _in_kinds(entries, self._kind)
        pieces = [piece_for(self.base, part, by_kernels=kind[0]) for kind, part in kinds.items()]
        pointed = all(piece.point() for piece in pieces)
        assert pointed
        if self._can_fuse(entries):
            return _Fusing(self.base, entries, pieces, lambda: self._keep(key, self._fused_plan(entries)))
        plan = AnyBasePlan(self.base, entries, pieces, may_fuse_on_cpu=self.backend == "auto")
        return self._keep(key, plan)

    def _fused_plan(self, entries: Sequence[Entry]) -> FusedPlan:
        fused.prepare(self.base, [entry.param for entry in entries])
        for entry in entries:
            complete(self.base, entry.param, entry.slot.x)
        kinds = _in_kinds(entries, multi_tensor.kind_of).values()
        return FusedPlan(self.base, entries, [FusedPiece(self.base, part, by_kernels=True) for part in kinds])

    def _keep(self, key: tuple[int, ...], plan: AnyPlan) -> AnyPlan:
        _remember(self._plans, key, plan)
        return plan

    def _kind(self, slot: Slot) -> tuple[Any, ...]:
        """Whether kernels can walk it, and what else slots that share launches have in common."""
        by_kernels = slot.is_complete() and self.backend != "foreach" and multi_tensor.fits(slot)
        if by_kernels:
            return True, *multi_tensor.kind_of(slot)
        is_first = needs_reference(slot.x.dtype) and not slot.is_complete()
        return False, slot.x.device, slot.x.dtype, is_first

    def _can_fuse(self, entries: Sequence[Entry]) -> bool:
        """Whether this step can be made in one pass."""
        if self.backend in ("foreach", "triton") or not entries:
            return False
        possible = fused.can_fuse(self.base) and all(
            e.slot.x.dtype in fused.DTYPES and multi_tensor.fits(e.slot) for e in entries
        )
        if self.backend == "fused" and not possible:
            raise ValueError(
                f"backend='fused' cannot step {type(self.base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        return possible

    def sums(self, entries: Sequence[Entry], *, tuners: int, device: torch.device) -> Tensor:
        """The sums of slots that an engine put together, which may be others in every step: see `Plan.sums`."""
        out = torch.zeros(5 * tuners + 1, dtype=torch.float64, device=device)
        for kind, part in _in_kinds(entries, self._kind).items():
            slots, entry = [e.slot for e in part], part[0]
            rows = Rows(slots, table=self._table(slots)) if kind[0] else Tensors(slots)
            xs, grads = [slot.x for slot in slots], [slot.grad for slot in slots]
            pointed = rows.point(xs, grads)
            assert pointed
            maximize = bool(entry.group.get("maximize"))
            rows.add_sums(xs, grads, out, row=entry.row, weight=entry.weight, maximize=maximize)
        return out

    def _table(self, slots: Sequence[Slot]) -> Table:
        key = multi_tensor.kind_of(slots[0]), tuple(slot.x.numel() for slot in slots)
        if key not in self._tables:
            _remember(self._tables, key, Table(slots[0].x.device, key[1]))
        return self._tables[key]


def _in_kinds(
    entries: Sequence[Entry], kind_of: Callable[[Slot], tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Entry]]:
    """Entries that one piece can hold, together."""
    kinds: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for e in entries:
        kind = (*kind_of(e.slot), id(e.group), e.row, e.weight, is_dtensor(e.param))
        kinds[kind].append(e)
    return kinds


def _remember(kept: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        kept.popitem(last=False)


class _Fusing(Plan):
    """The first step of a fused plan: the sums are of what is there; the base's state is made when the step is."""

    is_fused = True

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], pieces: Sequence[Piece], fuse: Callable[[], FusedPlan]
    ) -> None:
        super().__init__(base, entries, pieces)
        self._fuse = fuse

    def play(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        plan = self._fuse()
        pointed = plan.is_current()
        assert pointed
        plan.play(decision, unit=unit, closure=closure, started=started)
        for piece in plan.pieces:  # a CUDA graph reads them too: captured later, it must find that kernel loaded
            piece.rows.forget_norms()
