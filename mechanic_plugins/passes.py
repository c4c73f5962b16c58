"""A step's passes over memory: the sums, and the base's step with Mechanic's move behind it.

Two paths lead to the same weights. Around any base: a snapshot of the weights, the base's own step, and the move, in
chunks of parameters where the base treats them one by one. Fused, where the base is known and on a GPU: all in one
pass without a snapshot.
"""

from __future__ import annotations

from collections import defaultdict
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

__all__ = ["Backend", "Decision", "Entry", "Passes", "check_backend", "zeros_like"]

Backend = Literal["auto", "fused", "triton", "foreach"]
Closure = Callable[[], Any]
Group = dict[str, Any]

SNAPSHOT_BYTES = 256 * 2**20
"""The most that a snapshot holds at once, if no single parameter is larger."""


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

    def scales(self, device: torch.device) -> Tensor:
        """Before, after and whether the step is made, for each tuner."""
        made = self.before.new_ones(()) if isinstance(self.moves, bool) else self.moves.to(self.before.dtype)
        return torch.stack([self.before, self.after, made.expand_as(self.before)], dim=1).to(device, non_blocking=True)


class Batch(NamedTuple):
    """Entries that move together (one tuner, weight, device and dtype), and their weights from before the step."""

    entries: list[Entry]
    row: int
    olds: list[Tensor]


class _Norms(NamedTuple):
    """<x, x>, <d, x>, <d, d> as the last step left them, and how to tell that nobody has touched x or d since."""

    stamp: list[tuple[int, int, int]]
    parts: dict[tuple[int, float], list[Tensor]]


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
        self._norms: _Norms | None = None

    # ---------------------------------------------------------------- the sums

    def sums(self, entries: Sequence[Entry], *, tuners: int, device: torch.device) -> Tensor:
        """Five sums for each tuner and, last, how many gradients there are, weighted so that all ranks' add up."""
        buckets = defaultdict(list)
        for entry in entries:
            buckets[entry.row, entry.weight, bool(entry.group.get("maximize"))].append(entry.slot)
        known = self._known_norms(entries)
        table = torch.zeros(tuners, len(SUMS), dtype=torch.float64, device=device)
        for (row, weight, maximize), slots in buckets.items():
            part = kernels.local_sums(
                slots, maximize=maximize, device=device, workspace=self.workspace, norms=known is None
            )
            table[row].add_(part, alpha=weight)
        for (row, weight), parts in (known or {}).items():
            table[row, 2:].add_(multi_tensor.norms_of(parts).to(device, non_blocking=True), alpha=weight)
        gradients = sum(entry.slot.grad is not None for entry in entries)
        return torch.cat([table.flatten(), table.new_full((1,), gradients)])

    def _known_norms(self, entries: Sequence[Entry]) -> dict[tuple[int, float], list[Tensor]] | None:
        """The last step's, where it left them and nothing has changed: the sums then need not read the weights.

        A change through `.data` leaves no mark: the norms are then one step old, which only the s_decay term sees.
        """
        norms, self._norms = self._norms, None
        return norms.parts if norms is not None and norms.stamp == _stamp(entries) else None

    # ---------------------------------------------------------------- the step

    def play(self, entries: Sequence[Entry], decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        """Steps the base at lr / unit and moves the weights as decided; returns what the base returned."""
        if self.is_fused(entries):
            return self._play_fused(entries, decision, unit=unit)
        result = None
        moved: list[tuple[Batch, Tensor | None]] = []
        for chunk in self._chunks(entries, closure):
            batches = _snapshots(chunk)
            with _restored_on_error(batches):
                with _only(chunk, self.base, of=entries), _at_unit_lr(self.base, unit), _skipping(self.base, decision):
                    result = self.base.step() if closure is None else self.base.step(closure)
                moved += [(batch._replace(olds=[]), self._move(batch, decision)) for batch in batches]
        self._remember(entries, [((b.row, b.entries[0].weight), norms) for b, norms in moved])
        return result

    def _move(self, batch: Batch, decision: Decision) -> Tensor | None:
        slots = [self.completed(e, old) for e, old in zip(batch.entries, batch.olds, strict=True)]
        device = slots[0].x.device
        before, after = (t[batch.row].to(device, non_blocking=True) for t in (decision.before, decision.after))
        return kernels.move(slots, batch.olds, before=before, after=after, workspace=self.workspace)

    def _remember(self, entries: Sequence[Entry], norms: Sequence[tuple[tuple[int, float], Tensor | None]]) -> None:
        """The norms that this step left, if kernels took them for every parameter."""
        parts = defaultdict(list)
        for key, shares in norms:
            if shares is None:
                return
            parts[key].append(shares)
        self._norms = _Norms(_stamp(entries), parts)

    def is_fused(self, entries: Sequence[Entry]) -> bool:
        """Whether this step is made in one pass."""
        if self.backend in ("foreach", "triton"):
            return False
        possible = fused.can_fuse(self.base) and all(
            multi_tensor.can_run(e.slot.x.device) and multi_tensor.is_row(e.slot.x) and e.slot.x.dtype in fused.DTYPES
            for e in entries
        )
        if self.backend == "fused" and not possible:
            raise ValueError(
                f"backend='fused' cannot step {type(self.base).__name__} as it is set up here: it knows torch's Adam, "
                "AdamW and SGD (no amsgrad, dampening, foreach=True or step hooks) and Lion, with dense float32, bf16 "
                "or fp16 weights on a GPU with Triton. Use backend='auto', which falls back by itself."
            )
        return possible

    def _play_fused(self, entries: Sequence[Entry], decision: Decision, *, unit: float) -> None:
        fused.prepare(self.base, [entry.param for entry in entries if entry.slot.grad is not None])
        parts: dict[Any, list[Entry]] = defaultdict(list)
        for entry in entries:
            kind = multi_tensor.kind_of(entry.slot)
            parts[id(entry.group), entry.row, entry.weight, kind].append(entry)
        launches = [self._fused_part(part) for part in parts.values()]
        scales = decision.scales(entries[0].slot.x.device)
        norms = fused.step(self.base, launches, scales, unit=unit, workspace=self.workspace)
        keys = [(part[0].row, part[0].weight) for part in parts.values()]
        self._remember(entries, list(zip(keys, norms, strict=True)))

    def _fused_part(self, entries: list[Entry]) -> fused.Part:
        slots = [self.completed(entry, entry.slot.x) for entry in entries]
        return fused.Part(entries[0].group, [entry.param for entry in entries], slots, entries[0].row)

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


def _stamp(entries: Sequence[Entry]) -> list[tuple[int, int, int]]:
    return [
        (e.slot.x.data_ptr(), e.slot.x._version, 0 if e.slot.delta is None else e.slot.delta.data_ptr())
        for e in entries
    ]


def _snapshots(entries: Sequence[Entry]) -> list[Batch]:
    kinds = defaultdict(list)
    for entry in entries:
        kinds[entry.row, entry.weight, entry.slot.x.device, entry.slot.x.dtype].append(entry)
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
    shown = {id(entry.param) for entry in chunk}
    try:
        for group in base.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in shown]
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
    base.found_inf = (~decision.moves).to(torch.float32)
    try:
        yield
    finally:
        del base.found_inf


def _has_step_hooks(base: Optimizer) -> bool:
    """Hooks see a step once: such a base is not stepped in chunks."""
    own = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
