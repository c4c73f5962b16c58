"""What a step walks over: the parameters in batches of one kind, set up once and used while nothing but data changes.

Setting up looks at each parameter in turn. A step that follows a plan reads a few addresses for each parameter and
starts a handful of launches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, REF, IndexRange, ParamState, needs_reference
from mechanic_plugins.core.tuner_state import empty_sums
from mechanic_plugins.distributed.sharding import align_gradients, is_dtensor, local
from mechanic_plugins.kernels.batch import TensorBatch
from mechanic_plugins.kernels.foreach import ForeachBatch
from mechanic_plugins.kernels.sizes import add_sizes, make_room
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.passes.deltas import complete
from mechanic_plugins.passes.kept import KeptState

__all__ = ["Closure", "Decision", "Entry", "Group", "ParamBatch", "Plan", "clip"]

Closure = Callable[[], Any]
Group = dict[str, Any]


class Entry(NamedTuple):
    """A parameter that takes part in a step: its param group, local tensors, tuner, and weight in the sums.

    `delta_dtype` is what its delta is to be, if that was chosen.
    """

    param: Tensor
    group: Group
    param_state: ParamState
    tuner_index: int
    weight: float
    delta_dtype: torch.dtype | None = None


class Decision(NamedTuple):
    """What a step will do.

    `table` has a row for each tuner: the scale that was and that will be played, whether the step is made, what delta
    and the gradients are multiplied by, and the steps so far.
    """

    applied: bool | Tensor
    table: Tensor
    has_clip: bool

    @property
    def after(self) -> Tensor:
        return self.table[:, 1]

    @property
    def clip(self) -> Tensor | None:
        """What multiplies the gradients that the base sees, 0-dim; None leaves them as they are."""
        return self.table[0, 4] if self.has_clip else None


class ParamBatch:
    """Parameters that share launches: one param group, tuner, weight and kind of tensor."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], *, by_kernels: bool) -> None:
        first = entries[0]
        self.base, self.group, self.tuner_index = base, first.group, first.tuner_index
        self.weight, self.delta_dtype = first.weight, first.delta_dtype
        self.params = [entry.param for entry in entries]
        self.is_sharded = is_dtensor(self.params[0])
        self.device: torch.device = first.param_state.x.device
        self.states: list[Any] = [base.state.get(p) for p in self.params]
        self.watched = [self._watched(state) for state in self.states]
        kept = {name: [watched[name] for watched in self.watched] for name in self._names()}
        self._kept = KeptState(self.states, kept)
        self.tensors = self._tensor_batch([entry.param_state for entry in entries], by_kernels=by_kernels)

    def _tensor_batch(self, param_states: Sequence[ParamState], *, by_kernels: bool) -> TensorBatch:
        return TritonBatch(param_states) if by_kernels else ForeachBatch(param_states)

    def _names(self) -> tuple[str, ...]:
        """What of a parameter's state the launches know the address of."""
        return (DELTA, REF) if needs_reference(self.params[0].dtype) else (DELTA,)

    def _watched(self, state: dict[str, Any] | None) -> dict[str, Any]:
        return {name: None if state is None else state.get(name) for name in self._names()}

    def is_current(self) -> bool:
        """Whether the state is still where it was: a load, or a change of paths, puts other tensors there."""
        return self._kept.is_there()

    def refresh_pointers(self) -> bool:
        """Looks where weights and gradients are in this step; False where one is not like it was."""
        if self.is_sharded:
            align_gradients(self.params)
        return self.tensors.refresh_pointers(self.xs(), self.grads())

    def xs(self) -> list[Tensor]:
        """This rank's part of the weights. Never kept across steps: FSDP may put another tensor there."""
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def grads(self) -> list[Tensor | None]:
        grads = [p.grad for p in self.params]
        return [local(grad) for grad in grads] if self.is_sharded else grads

    def add_sums(self, out: Tensor, *, with_dx: bool) -> None:
        """Adds this batch's share to its tuner's sums, and its gradients to the count at the end."""
        by_kernels = isinstance(self.tensors, TritonBatch)  # which read the addresses before
        self.tensors.add_sums(
            () if by_kernels else self.xs(),
            () if by_kernels else self.grads(),
            out,
            tuner_index=self.tuner_index,
            weight=self.weight,
            maximize=bool(self.group.get("maximize")),
            penalty=known_bases.l2_penalty(self.base, self.group),
            with_dx=with_dx,
        )

    @property
    def sizes(self) -> list[int]:
        """For each parameter the bytes that a snapshot of it holds."""
        return self.tensors.sizes

    def pairs(self, part: IndexRange, snapshot: Any) -> Sequence[tuple[Tensor, Tensor]]:
        """The parameters of a part for which the base is to step other tensors, each with its other."""
        return ()

    def snapshot(self, part: IndexRange) -> Any:
        """The weights of a part, for `move` or `restore`."""
        return self.tensors.snapshot(part, self.xs()[part.first : part.last])

    def own_iterate(self, part: IndexRange, snapshot: Any) -> str | None:
        """See `known_bases.own_iterate`: looks only at parameters that have no delta yet."""
        if self._kept.is_complete:
            return None
        here = slice(part.first, part.last)
        states = [self.base.state.get(p) for p in self.params[here]]
        known = [{k: local(v) for k, v in s.items()} if isinstance(s, dict) else None for s in states]
        each = map(known_bases.own_iterate, known, self.grads()[here], snapshot, self.xs()[here])
        return next(filter(None, each), None)

    def restore(self, part: IndexRange, snapshot: Any) -> None:
        """The weights as they were before the base touched them."""
        self.tensors.restore(part, self.xs()[part.first : part.last], snapshot)

    def begin_moves(self, parts: Sequence[IndexRange]) -> None:
        """The parts whose moves will make up the whole."""
        self.tensors.begin_moves(parts)

    def move(self, part: IndexRange, snapshot: Any, scales: Tensor) -> None:
        """From the base's weights to Mechanic's."""
        if isinstance(self.tensors, ForeachBatch):
            self._complete(self.tensors, part, snapshot)
        scales = scales[self.tuner_index].to(self.device, non_blocking=True)
        self.tensors.move(part, self.xs()[part.first : part.last], snapshot, scales)

    def finish_moves(self) -> None:
        """All parts have moved."""
        self.tensors.finish_moves(self.xs())

    def _complete(self, rows: ForeachBatch, part: IndexRange, olds: Sequence[Tensor]) -> None:
        """Makes deltas. Never before the base has its state: bases take an empty one for a new parameter."""
        if self._kept.is_complete:
            return
        for index, old in zip(range(part.first, part.last), olds, strict=True):
            if any(tensor is None for tensor in self.watched[index].values()):
                p = self.params[index]
                complete(self.base, p, old, self.delta_dtype)
                rows.deltas[index], rows.refs[index] = (local(self.base.state[p].get(name)) for name in (DELTA, REF))


def _are_the_same(these: Collection[object], those: Collection[object]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def clip(grads: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiplies gradients of one device in place, as torch.nn.utils.clip_grad_norm_ does."""
    present = [grad for grad in grads if grad is not None]
    if not present or (factor.device.type == "cpu" and factor == 1):
        return
    if factor.device.type == "cpu":
        torch._foreach_mul_(present, factor.item())
    elif len({grad.dtype for grad in present}) == 1 and not needs_reference(present[0].dtype):
        torch._foreach_mul_(present, factor.to(present[0].device, present[0].dtype))
    else:  # torch would round the factor to 16 bits first
        for grad in present:
            grad.copy_(grad.to(torch.promote_types(grad.dtype, torch.float32)).mul_(factor.to(grad.device)))


class Plan:
    """The batches of one optimizer, good as long as its parameters and their state stay the same."""

    is_fused: ClassVar[bool] = False

    def __init__(self, base: Optimizer, entries: Sequence[Entry], batches: Sequence[ParamBatch]) -> None:
        self.base, self.batches = base, list(batches)
        inside = {id(entry.param) for entry in entries}
        every = [p for group in base.param_groups for p in group["params"]]
        self._outsiders = [p for p in every if id(p) not in inside]
        """Parameters that never had a gradient: the first one they get ends the plan."""
        self._state, self._states = base.state, list(base.state.values())
        self._groups = list(base.param_groups)
        self._count = len(every)

    def is_current(self) -> bool:
        """Whether this step can follow the plan, if its parameters are the same; reads the addresses it needs."""
        return (
            self.has_same_dicts()
            and _are_the_same(self._states, self._state.values())
            and all(p.grad is None for p in self._outsiders)
            and all(batch.is_current() and batch.refresh_pointers() for batch in self.batches)
        )

    def has_same_dicts(self) -> bool:
        """Whether param groups and the base's state are the dicts they were: a load puts another state there."""
        return self._state is self.base.state and _are_the_same(self._groups, self.base.param_groups)

    def has_every_gradient(self) -> bool:
        """Whether all parameters have one in this step, as `is_current` has found it."""
        return sum(batch.tensors.gradients for batch in self.batches) == self._count

    def sums(self, *, tuners: int, device: torch.device, with_dx: bool) -> Tensor:
        """The sums for each tuner and, last, how many gradients there are, weighted so that all ranks' add up.

        `with_dx`: whether anybody asks for <d, x>, which is a pass of its own without kernels.
        """
        out = empty_sums(tuners, device)
        for batch in self.batches:
            batch.add_sums(out, with_dx=with_dx)
        return out

    def add_sizes(self, out: Tensor, new: Mapping[int, bool]) -> None:
        """What is measured of tuners that begin: see `kernels.sizes`."""
        make_room(out, new)
        for batch in self.batches:
            index = batch.tuner_index
            if index in new:
                add_sizes(out, index, batch.xs(), batch.grads(), batch.weight, is_first=new[index])

    def start(self, closure: Closure | None) -> list[Any]:
        """What of `apply` needs no decision, to be done while the sums travel. `apply` takes it out of the list."""
        return []

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        """Steps the base at lr / unit and moves the weights as decided; returns what the base returned."""
        raise NotImplementedError

    def finish(self) -> None:
        """All launches of the step are made, by somebody else."""
        raise NotImplementedError
