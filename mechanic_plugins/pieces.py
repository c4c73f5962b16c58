"""What a step walks over: the parameters in pieces of one kind, set up once and used while nothing but data changes.

Setting up looks at each parameter in turn. A step that follows a plan reads a few addresses for each parameter and
starts a handful of launches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins import bases
from mechanic_plugins.checkpoint import DELTA, REF
from mechanic_plugins.kernels import Tensors
from mechanic_plugins.multi_tensor import Rows
from mechanic_plugins.sharding import align_gradients, is_dtensor, local
from mechanic_plugins.slots import Part, Slot, delta_dtype, needs_reference

__all__ = ["Closure", "Decision", "Entry", "Group", "Piece", "Plan", "complete", "conform", "zeros_like"]

Closure = Callable[[], Any]
Group = dict[str, Any]


class Entry(NamedTuple):
    """A parameter that takes part in a step: its param group, local tensors, tuner, and weight in the sums."""

    param: Tensor
    group: Group
    slot: Slot
    row: int
    weight: float


class Decision(NamedTuple):
    """What a step will do: whether it is made, and for each tuner the scale that was and will be played.

    `kept` is what delta is multiplied by, so that less than all of it, or none, is played again at the new scale.
    """

    moves: bool | Tensor
    before: Tensor
    after: Tensor
    kept: Tensor
    packed: Tensor | None = None

    def scales(self) -> Tensor:
        """Before, after, whether the step is made and what delta is multiplied by, for each tuner."""
        if self.packed is not None:
            return self.packed
        made = torch.as_tensor(self.moves, dtype=self.before.dtype, device=self.before.device)
        return torch.stack([self.before, self.after, made.expand_as(self.before), self.kept], dim=1)


class Piece:
    """Parameters that share launches: one param group, tuner, weight and kind of tensor."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], *, by_kernels: bool) -> None:
        self.base, self.group, self.row, self.weight = base, entries[0].group, entries[0].row, entries[0].weight
        self.params = [entry.param for entry in entries]
        self.is_sharded = is_dtensor(self.params[0])
        self.device: torch.device = entries[0].slot.x.device
        self.states: list[Any] = [base.state.get(p) for p in self.params]
        self.watched = [self._watched(state) for state in self.states]
        self._places = [(s, name) for s, names in zip(self.states, self.watched, strict=True) for name in names]
        self._tensors = [tensor for watched in self.watched for tensor in watched.values()]
        self._is_complete = all(tensor is not None for tensor in self._tensors)
        self.rows = self._rows([entry.slot for entry in entries], by_kernels=by_kernels)

    def _rows(self, slots: Sequence[Slot], *, by_kernels: bool) -> Rows | Tensors:
        return Rows(slots) if by_kernels else Tensors(slots)

    def _names(self) -> tuple[str, ...]:
        """What of a parameter's state the launches know the address of."""
        return (DELTA, REF) if needs_reference(self.params[0].dtype) else (DELTA,)

    def _watched(self, state: dict[str, Any] | None) -> dict[str, Any]:
        return {name: None if state is None else state.get(name) for name in self._names()}

    def is_current(self) -> bool:
        """Whether the state is still where it was: a load, or a change of paths, puts other tensors there."""
        if not self._is_complete:
            return False
        return all(map(operator.is_, [state.get(name) for state, name in self._places], self._tensors))

    def point(self) -> bool:
        """Looks where weights and gradients are in this step; False where one is not like it was."""
        if self.is_sharded:
            align_gradients(self.params)
        return self.rows.point(self.xs(), self.grads())

    def xs(self) -> list[Tensor]:
        """This rank's part of the weights. Never kept across steps: FSDP may put another tensor there."""
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def grads(self) -> list[Tensor | None]:
        grads = [p.grad for p in self.params]
        return [local(grad) for grad in grads] if self.is_sharded else grads

    def add_sums(self, out: Tensor) -> None:
        """Adds this piece's share to its tuner's five sums, and its gradients to the count at the end."""
        maximize = bool(self.group.get("maximize"))
        self.rows.add_sums(self.xs(), self.grads(), out, row=self.row, weight=self.weight, maximize=maximize)

    @property
    def sizes(self) -> list[int]:
        """For each parameter the bytes that a snapshot of it holds."""
        return self.rows.sizes

    def pairs(self, part: Part, snapshot: Any) -> Sequence[tuple[Tensor, Tensor]]:
        """The parameters of a part for which the base is to step other tensors, each with its other."""
        return ()

    def snapshot(self, part: Part) -> Any:
        """The weights of a part, for `move` or `restore`."""
        return self.rows.snapshot(part, self.xs()[part.first : part.last])

    def own_iterate(self, part: Part, snapshot: Any) -> str | None:
        """See `bases.own_iterate`: looks only at parameters that have no delta yet."""
        if self._is_complete:
            return None
        here = slice(part.first, part.last)
        states = [self.base.state.get(p) for p in self.params[here]]
        known = [{k: local(v) for k, v in s.items()} if isinstance(s, dict) else None for s in states]
        each = map(bases.own_iterate, known, self.grads()[here], snapshot, self.xs()[here])
        return next(filter(None, each), None)

    def restore(self, part: Part, snapshot: Any) -> None:
        """The weights as they were before the base touched them."""
        self.rows.restore(part, self.xs()[part.first : part.last], snapshot)

    def begin(self, parts: Sequence[Part]) -> None:
        """The parts whose moves will make up the whole."""
        self.rows.begin(parts)

    def move(self, part: Part, snapshot: Any, scales: Tensor) -> None:
        """From the base's weights to Mechanic's."""
        if isinstance(self.rows, Tensors):
            self._complete(self.rows, part, snapshot)
        scales = scales[self.row].to(self.device, non_blocking=True)
        self.rows.move(part, self.xs()[part.first : part.last], snapshot, scales)

    def moved(self) -> None:
        """All parts have moved."""
        self.rows.moved(self.xs())

    def _complete(self, rows: Tensors, part: Part, olds: Sequence[Tensor]) -> None:
        """Makes deltas. Never before the base has its state: bases take an empty one for a new parameter."""
        for index, old in zip(range(part.first, part.last), olds, strict=True):
            if any(tensor is None for tensor in self.watched[index].values()):
                p = self.params[index]
                complete(self.base, p, old)
                rows.deltas[index], rows.refs[index] = (local(self.base.state[p].get(name)) for name in (DELTA, REF))


def complete(base: Optimizer, p: Tensor, old: Tensor) -> None:
    """Gives a parameter the delta, and the reference, that it has not yet; `old` is what the reference is to hold."""
    state = base.state[p]
    if DELTA not in state:
        state[DELTA] = zeros_like(p)
    if REF not in state and needs_reference(p.dtype):
        state[REF] = torch.empty_like(p, requires_grad=False)
        local(state[REF]).copy_(old)


def conform(base: Optimizer, p: Tensor) -> None:
    """Has the state lie in memory as the parameter does, whose memory format or dtype somebody may have changed.

    Kernels walk both as flat memory. Quantized moments, which are no plain floating tensors, are left alone.
    """
    state = base.state.get(p)
    if not state:
        return
    if REF in state and not needs_reference(p.dtype):
        del state[REF]
    ours = {DELTA: delta_dtype(p.dtype), REF: p.dtype}
    for name, kept in state.items():
        if _is_like(kept, p):
            state[name] = _laid_out_like(p, kept, ours.get(name, kept.dtype))


def _is_like(kept: object, p: Tensor) -> bool:
    if not isinstance(kept, Tensor) or kept.shape != p.shape or type(local(kept)) not in (Tensor, torch.nn.Parameter):
        return False
    return kept.is_floating_point() or kept.is_complex()


def _laid_out_like(p: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    if kept.dtype == dtype and local(kept).stride() == local(p).stride():
        return kept
    twin = torch.empty_like(p, dtype=dtype, device=kept.device, requires_grad=False)
    if kept.dtype == dtype and local(kept).stride() == local(twin).stride():
        return kept  # the parameter has gaps, which the state has not
    local(twin).copy_(local(kept))
    return twin


def zeros_like(p: Tensor) -> Tensor:
    """A new delta, of the parameter's own tensor type."""
    return torch.zeros_like(p, dtype=delta_dtype(p.dtype), requires_grad=False)


class Plan:
    """The pieces of one optimizer, good as long as its parameters and their state stay the same."""

    is_fused: ClassVar[bool] = False

    def __init__(self, base: Optimizer, entries: Sequence[Entry], pieces: Sequence[Piece]) -> None:
        self.base, self.pieces = base, list(pieces)
        inside = {id(entry.param) for entry in entries}
        every = [p for group in base.param_groups for p in group["params"]]
        self._outsiders = [p for p in every if id(p) not in inside]
        """Parameters that never had a gradient: the first one they get ends the plan."""
        self._state, self._groups = base.state, list(base.param_groups)

    def is_current(self) -> bool:
        """Whether this step can follow the plan, if its parameters are the same; reads the addresses it needs."""
        return (
            self._state is self.base.state
            and list(map(id, self._groups)) == list(map(id, self.base.param_groups))
            and all(p.grad is None for p in self._outsiders)
            and all(piece.is_current() and piece.point() for piece in self.pieces)
        )

    def sums(self, *, tuners: int, device: torch.device) -> Tensor:
        """Five sums for each tuner and, last, how many gradients there are, weighted so that all ranks' add up."""
        out = torch.zeros(5 * tuners + 1, dtype=torch.float64, device=device)
        for piece in self.pieces:
            piece.add_sums(out)
        return out

    def start(self, closure: Closure | None) -> list[Any]:
        """What of `play` needs no decision, to be done while the sums travel. `play` takes it out of the list."""
        return []

    def play(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        """Steps the base at lr / unit and moves the weights as decided; returns what the base returned."""
        raise NotImplementedError
