"""A step's passes over memory: the sums, and the base's step with Mechanic's move behind it.

Two paths lead to the same weights. Around any base: a snapshot of the weights, the base's own step, and the move, in
chunks of parameters where the base treats them one by one. Fused, where the base is known and on a GPU: all in one
pass without a snapshot.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mechanic_plugins import bases, fused, kernels, multi_tensor
from mechanic_plugins.checkpoint import DELTA, REF
from mechanic_plugins.sharding import local
from mechanic_plugins.slots import Slot, delta_dtype, needs_reference
from mechanic_plugins.tuner import SUMS

__all__ = ["Backend", "Batch", "Decision", "Entry", "Passes", "check_backend", "zeros_like"]

Backend = Literal["auto", "fused", "triton", "foreach"]
Closure = Callable[[], Any]
Group = dict[str, Any]

SNAPSHOT_BYTES = 256 * 2**20
"""The most that a snapshot holds at once, if no single parameter is larger."""
_KEPT_PLANS = 64


class Entry(NamedTuple):
    """A parameter that takes part in a step: its param group, local tensors, tuner, and weight in the sums."""

    param: Tensor
    group: Group
    slot: Slot
    row: int
    weight: float


class Decision(NamedTuple):
    """What a step will do: whether it is made, and for each tuner the scale that was and will be played."""

    moves: bool | Tensor
    before: Tensor
    after: Tensor
    packed: Tensor | None = None

    def scales(self) -> Tensor:
        """Before, after and whether the step is made, for each tuner."""
        if self.packed is not None:
            return self.packed
        made = torch.as_tensor(self.moves, dtype=self.before.dtype, device=self.before.device)
        return torch.stack([self.before, self.after, made.expand_as(self.before)], dim=1)


class Batch(NamedTuple):
    """Entries that move together (one tuner, device and dtype), and their weights from before the base's step."""

    entries: list[Entry]
    row: int
    olds: list[Tensor]


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
        self.workspace = None if backend == "foreach" else multi_tensor.Workspace()
        self._plans: OrderedDict[tuple[int, ...], fused.Plan] = OrderedDict()

    # ---------------------------------------------------------------- the sums

    def sums(self, entries: Sequence[Entry], *, tuners: int, device: torch.device) -> Tensor:
        """Five sums for each tuner and, last, how many gradients there are, weighted so that all ranks' add up."""
        buckets = defaultdict(list)
        for entry in entries:
            buckets[entry.row, entry.weight, bool(entry.group.get("maximize"))].append(entry.slot)
        table = torch.zeros(tuners, len(SUMS), dtype=torch.float64, device=device)
        for (row, weight, maximize), slots in buckets.items():
            part = kernels.local_sums(slots, maximize=maximize, device=device, workspace=self.workspace)
            table[row].add_(part, alpha=weight)
        gradients = sum(entry.slot.grad is not None for entry in entries)
        return torch.cat([table.flatten(), table.new_full((1,), gradients)])

    # ---------------------------------------------------------------- the step

    def start(self, entries: Sequence[Entry], closure: Closure | None) -> list[Batch]:
        """What of `play` needs no decision, to be done while the sums travel: the first chunk's snapshot."""
        if self.is_fused(entries):
            return []
        return _snapshots(next(self._chunks(entries, closure)))

    def play(
        self,
        entries: Sequence[Entry],
        decision: Decision,
        *,
        unit: float,
        closure: Closure | None,
        started: Sequence[Batch] = (),
    ) -> Any:
        """Steps the base at lr / unit and moves the weights as decided; returns what the base returned."""
        if self.is_fused(entries):
            self._start_plan(entries).play(decision.scales(), unit=unit)
            return None
        result = None
        for chunk in self._chunks(entries, closure):
            batches, started = started or _snapshots(chunk), ()
            with _restored_on_error(batches):
                with _only(chunk, self.base, of=entries), _at_unit_lr(self.base, unit), _skipping(self.base, decision):
                    result = self.base.step() if closure is None else self.base.step(closure)
                for batch in batches:
                    self._move(batch, decision)
        return result

    def _move(self, batch: Batch, decision: Decision) -> None:
        slots = [self.completed(e, old) for e, old in zip(batch.entries, batch.olds, strict=True)]
        device = slots[0].x.device
        before, after = (t[batch.row].to(device, non_blocking=True) for t in (decision.before, decision.after))
        kernels.move(slots, batch.olds, before=before, after=after, workspace=self.workspace)

    def is_fused(self, entries: Sequence[Entry]) -> bool:
        """Whether this step is made in one pass."""
        if self.backend in ("foreach", "triton") or not entries:
            return False
        possible = fused.can_fuse(self.base) and all(
            multi_tensor.can_run(e.slot.x.device) and e.slot.x.dtype in fused.DTYPES and multi_tensor.is_plain(e.slot)
            for e in entries
        )
        if self.backend == "fused" and not possible:
            raise ValueError(
                f"backend='fused' cannot step {type(self.base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        return possible

    def plan(self, key: tuple[int, ...]) -> fused.Plan | None:
        """The fused pass over the parameters with these ids, where an earlier step has set it up and it still fits."""
        plan = self._plans.get(key)
        return plan if plan is not None and plan.is_current(key) else None

    def _start_plan(self, entries: Sequence[Entry]) -> fused.Plan:
        fused.prepare(self.base, [entry.param for entry in entries if entry.slot.grad is not None])
        for entry in entries:
            self.completed(entry, entry.slot.x)
        key = tuple(id(p) for group in self.base.param_groups for p in group["params"])
        plan = fused.Plan.of(self.base, key, [(e.param, e.group, e.row, e.weight) for e in entries])
        assert plan.is_current(key)
        self._plans[key] = plan
        if len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)
        return plan

    def completed(self, entry: Entry, old: Tensor) -> Slot:
        """The slot with a delta. Never before the base has its state: bases take an empty one for a new parameter."""
        slot, p = entry.slot, entry.param
        if slot.delta is None:
            delta = self.base.state[p][DELTA] = zeros_like(p)
            slot = slot._replace(delta=local(delta))
        if slot.ref is None and needs_reference(p.dtype):
            ref = self.base.state[p][REF] = torch.empty_like(p, requires_grad=False)
            slot = slot._replace(ref=local(ref).copy_(old))
        return slot

    def _chunks(self, entries: Sequence[Entry], closure: Closure | None) -> Iterator[Sequence[Entry]]:
        """All at once, or so that a snapshot stays small where the base treats its parameters one by one.

        An error in a later chunk leaves the earlier ones a step ahead; no weight is ever left half way.
        """
        if closure is not None or not bases.steps_parameters_independently(self.base) or _has_step_hooks(self.base):
            yield entries
            return
        chunk: list[Entry] = []
        size = 0
        for entry in entries:
            own = entry.slot.x.numel() * entry.slot.x.element_size()
            if chunk and size + own > SNAPSHOT_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(entry)
            size += own
        yield chunk


def zeros_like(p: Tensor) -> Tensor:
    """A new delta, of the parameter's own tensor type."""
    return torch.zeros_like(p, dtype=delta_dtype(p.dtype), requires_grad=False)


def _snapshots(entries: Sequence[Entry]) -> list[Batch]:
    kinds = defaultdict(list)
    for entry in entries:
        kinds[entry.row, entry.slot.x.device, entry.slot.x.dtype].append(entry)
    return [Batch(part, row, _clones([e.slot.x.detach() for e in part])) for (row, *_), part in kinds.items()]


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


@contextmanager
def _restored_on_error(batches: Sequence[Batch]) -> Iterator[None]:
    """Nobody is left with weights half way between the base's and ours: out of memory, Ctrl-C."""
    try:
        yield
    except BaseException:
        for batch in batches:
            kernels.restore([e.slot for e in batch.entries], batch.olds)
        raise


@contextmanager
def _only(chunk: Sequence[Entry], base: Optimizer, *, of: Sequence[Entry]) -> Iterator[None]:
    """Hides all other parameters from the base."""
    if len(chunk) == len(of):
        yield
        return
    params = [group["params"] for group in base.param_groups]
    shown = defaultdict(list)
    for entry in chunk:
        shown[id(entry.group)].append(entry.param)
    try:
        for group in base.param_groups:
            group["params"] = shown.get(id(group), [])
        yield
    finally:
        for group, all_of_them in zip(base.param_groups, params, strict=True):
            group["params"] = all_of_them


@contextmanager
def _at_unit_lr(base: Optimizer, unit: float) -> Iterator[None]:
    """Steps the base at lr / unit: its update is then of order 1 and keeps its digits when read off the weights."""
    if unit == 1.0:
        yield
        return
    lrs = [group["lr"] for group in base.param_groups]
    try:
        for group, lr in zip(base.param_groups, lrs, strict=True):
            group["lr"] = lr / unit
        yield
    finally:
        for group, lr in zip(base.param_groups, lrs, strict=True):
            group["lr"] = lr


@contextmanager
def _skipping(base: Any, decision: Decision) -> Iterator[None]:
    """Tells a fused base, on the device, whether to leave this step out."""
    if isinstance(decision.moves, bool):
        yield
        return
    base.found_inf = decision.moves.logical_not().to(torch.float32)
    try:
        yield
    finally:
        del base.found_inf


def _has_step_hooks(base: Optimizer) -> bool:
    """Hooks see a step once: such a base is not stepped in chunks."""
    own = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
