"""What a step iterates over: batches of like parameters, set up once and reused while only data changes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.tuner import SUMS, Decision
from mechanic_plugins.core.tuner_state import empty_sums
from mechanic_plugins.distributed.sharding import align_gradients, is_dtensor, local
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.dots import Dots, count_nonzero, reals, sizes
from mechanic_plugins.kernels.triton_batch import TritonBatch

__all__ = [
    "Batch",
    "Closure",
    "Entry",
    "Group",
    "Plan",
    "Sums",
    "add_sizes",
    "batches_of_parts",
    "exact",
    "sums_of",
]

Closure = Callable[[], Any]
Group = dict[str, Any]
Sums = list[float]
_DG, _GG, _XX, _DX, _DD, _DP = range(len(SUMS))
_OPTIONS = ("maximize", "weight_decay", "foreach", "fused", "capturable", "momentum")
"""Options of a param group that a plan depends on; users may change them between steps."""


class Entry(NamedTuple):
    """A parameter that takes part in a step, with its param group, its tuner and its weight in the sums."""

    param: Tensor
    group: Group
    tuner_index: int
    weight: float


class Batch:
    """Parameters with the same tuner, weight, dtype and device, and the other tensors that enter their sums.

    `wides` are the masters of 16-bit weights; `refs` is None if nothing is kept.
    """

    def __init__(self, base: Optimizer, entries: Sequence[Entry]) -> None:
        first = entries[0]
        self.params = [entry.param for entry in entries]
        self.tuner_index, self.weight = first.tuner_index, first.weight
        self.sign = -1.0 if first.group.get("maximize") else 1.0
        self.penalty = known_bases.l2_penalty(base, first.group)
        self.is_sharded = is_dtensor(self.params[0])
        self.is_complex = self.params[0].is_complex()
        self.device: torch.device = local(self.params[0]).device
        self.given: list[Tensor | None] | None = None
        """The gradients, if they are not the parameters' own."""
        self.refs: list[Tensor] | None = None
        self.wides: list[Tensor] | None = None
        self._kernels: TritonBatch | None = None
        self._places: list[int] = []
        self._dots = Dots([local(p).numel() * (1 + self.is_complex) for p in self.params], self.device)

    @staticmethod
    def kind(base: Optimizer, entry: Entry) -> tuple[Any, ...]:
        """The key that all entries of a batch share."""
        x, group = local(entry.param), entry.group
        loss = bool(group.get("maximize")), known_bases.l2_penalty(base, group)
        is_even = x.device.type == "cpu" or triton_support.is_even(x)
        return entry.tuner_index, entry.weight, x.dtype, x.device, is_even, is_dtensor(entry.param), *loss

    def grads(self) -> list[Tensor | None]:
        """This rank's shards of the gradients."""
        if self.given is not None:
            return self.given
        if self.is_sharded:
            align_gradients(self.params)
            return [local(p.grad) for p in self.params]
        return [p.grad for p in self.params]

    def xs(self) -> list[Tensor]:
        """This rank's shards of the weights. Never kept across steps: FSDP may replace the tensors."""
        if self.wides is not None:
            return [exact(local(p), local(wide)) for p, wide in zip(self.params, self.wides, strict=True)]
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def add_sums(self, out: Sums, *, is_waiting: bool, with_decay: bool = False) -> None:
        """Adds this batch's contribution to its tuner's sums, and its number of gradients to the count at the end.

        `is_waiting`: the refs hold d itself. `with_decay`: <d, x> and <x, x> are needed.
        """
        if self._kernels is not None and not (is_waiting or with_decay) and self.can_use_kernels():
            vector = empty_sums((len(out) - 1) // len(SUMS), self.device)
            self.add_device_sums(vector)
            out[:] = map(operator.add, out, vector.tolist())
            return
        xs, grads, refs = self.xs(), list[Any](self.grads()), self.refs
        refs = [local(ref) for ref in refs] if refs and self.is_sharded else refs
        missing = sum(map(operator.is_, grads, itertools.repeat(None)))
        if missing:
            grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads, strict=True)]
        if self.is_complex:
            xs, refs, grads = reals(xs), refs and reals(refs), reals(grads)
        with_dx = with_decay or self.penalty != 0
        found = self._dots.of(xs, refs, grads, is_difference=not is_waiting, with_dx=with_dx, with_xx=with_decay)
        (dg, gg, dd, dx, xx), weight, at = found, self.weight, len(SUMS) * self.tuner_index
        out[at + _DG] += self.sign * weight * dg
        out[at + _GG] += weight * gg
        out[at + _XX] += weight * xx
        out[at + _DX] += weight * dx
        out[at + _DD] += weight * dd
        out[at + _DP] += self.penalty * weight * dx
        out[-1] += len(grads) - missing

    def use_kernels(self) -> None:
        """Has Triton compute the sums if it can."""
        xs, grads = [local(p) for p in self.params], self.grads()
        fits = all(triton_support.fits(x, grad) for x, grad in zip(xs, grads, strict=True))
        kinds = {triton_support.kind_of(x, grad) for x, grad in zip(xs, grads, strict=True)}
        if self.refs is not None and fits and len({kind[:3] for kind in kinds}) == 1:
            pairs = itertools.zip_longest(self.refs, self.wides or ())
            kept = [Kept(local(ref), local(wide)) for ref, wide in pairs]
            self._kernels, self._places = TritonBatch(xs, grads, kept), self._places_now()

    def _places_now(self) -> list[int]:
        """Addresses of a few tensors: tools that offload the state move all of it."""
        assert self.refs is not None
        kept = [self.refs[0], self.refs[-1], *(self.wides or [])[:1]]
        return [local(each).data_ptr() for each in kept]

    def can_use_kernels(self) -> bool:
        """Whether Triton can compute the sums in this step."""
        if self._kernels is None:
            return False
        if self._places != self._places_now():
            self.use_kernels()
        return self._kernels.addresses.refresh([local(p) for p in self.params], self.grads())

    def add_device_sums(self, out: Tensor) -> None:
        """`add_sums` by Triton. Call `can_use_kernels` first."""
        assert self._kernels is not None
        self._kernels.add_sums(
            out, tuner_index=self.tuner_index, weight=self.weight, maximize=self.sign < 0, penalty=self.penalty
        )

    def add_sizes(self, out: Sums, *, is_first: bool) -> None:
        """Adds what `kernels.dots.sizes` measures in place of sums that are not needed early on.

        With a tuner's first gradient, three numbers in place of <x, x>, <d, x> and <d, p>; with later ones only the
        last of them, in place of <x, x>.
        """
        xs = [local(p) for p in self.params]
        pairs = [(x, grad) for x, grad in zip(xs, self.grads(), strict=True) if grad is not None]
        if not pairs:
            return
        some, grads = (list(each) for each in zip(*pairs, strict=True))
        if self.is_complex:
            some, grads = reals(some), reals(grads)
        at = len(SUMS) * self.tuner_index
        if is_first:
            for place, number in zip((_XX, _DX, _DP), sizes(some, grads), strict=True):
                out[at + place] += self.weight * number
        else:
            out[at + _XX] += self.weight * count_nonzero(grads)


def exact(x: Tensor, master: Tensor) -> Tensor:
    """The exact value of 16-bit weights: the master's, or the weights' own where they were changed from outside."""
    x = x.detach()
    return torch.where(x == master.to(x.dtype), master, x.float())


def _batches(base: Optimizer, entries: Iterable[Entry], slot: str, make: type[Batch]) -> list[Any]:
    """The entries in batches. In a parameter's first step its slot is empty."""
    kinds: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        has_one = slot in base.state.get(entry.param, ())
        kinds.setdefault((*make.kind(base, entry), has_one), []).append(entry)
    batches = [make(base, part) for part in kinds.values()]
    for batch in batches:
        if slot in base.state.get(batch.params[0], ()):
            batch.refs = [base.state[p][slot] for p in batch.params]
    return batches


def batches_of_parts(base: Optimizer, parts: Iterable[tuple[Entry, Tensor, Tensor | None]]) -> list[Batch]:
    """Batches of an engine's shards, each given with its gradient and its reference or delta."""
    kinds: dict[tuple[Any, ...], list[tuple[Entry, Tensor, Tensor | None]]] = {}
    for entry, grad, kept in parts:
        kind = id(entry.group), entry.param.dtype, grad.dtype, entry.param.device, kept is None
        kinds.setdefault(kind, []).append((entry, grad, kept))
    batches = []
    for each in kinds.values():
        entries, grads, kept_by_all = zip(*each, strict=True)
        batch = Batch(base, entries)
        batch.given = list(grads)
        batch.refs = None if kept_by_all[0] is None else list(kept_by_all)
        batches.append(batch)
    return batches


def add_sizes(batches: Iterable[Batch], out: Sums, new: Mapping[int, bool]) -> None:
    """Adds the measurements for new tuners; the values of `new` tell whether this is their first gradient."""
    for index, is_first in new.items():
        for place in (_XX, _DX, _DP) if is_first else (_XX,):
            out[len(SUMS) * index + place] = 0.0
    for batch in batches:
        if batch.tuner_index in new:
            batch.add_sizes(out, is_first=new[batch.tuner_index])


def sums_of(batches: Iterable[Batch], waiting: Sequence[bool], *, with_decay: bool = False) -> Sums:
    """This rank's sums per tuner and, last, the number of gradients, weighted so that the ranks' vectors add up.

    `waiting` (per tuner) and `with_decay` are those of `Batch.add_sums`.
    """
    out = [0.0] * (len(SUMS) * len(waiting) + 1)
    for batch in batches:
        batch.add_sums(out, is_waiting=waiting[batch.tuner_index], with_decay=with_decay)
    return out


class Plan:
    """How to make the steps of one optimizer. Valid while its parameters and their state stay the same."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], slot: str, make: type[Batch] = Batch) -> None:
        """`slot` names the state that enters the sums: the reference or delta."""
        self.base, self.entries, self.slot = base, list(entries), slot
        self.params = [entry.param for entry in entries]
        self.batches = _batches(base, entries, slot, make)
        self.is_complete = all(batch.refs is not None for batch in self.batches)
        """Whether every parameter has been stepped before. If not, the next step makes another plan."""
        inside = set(map(id, self.params))
        every = [p for group in base.param_groups for p in group["params"]]
        self._outsiders = [p for p in every if id(p) not in inside]
        """Parameters that never had a gradient. Their first one invalidates the plan."""
        self._groups = list(base.param_groups)
        self._options = [{name: group[name] for name in _OPTIONS if name in group} for group in base.param_groups]
        self._kinds = [(p.dtype, p.shape, p.device) for p in self.params]
        self._strides = list(map(Tensor.stride, self.params))
        self._state, self._states = base.state, list(base.state.values())
        self._mine: list[Any] = [base.state.get(p, {}) for p in self.params]
        self._kept = [state.get(slot) for state in self._mine]

    def is_current(self) -> bool:
        """Whether this step can follow the plan, given that the optimizer's parameters are the same.

        Called before every step, so it compares whole lists with as little Python as possible.
        """
        return (
            self.has_same_groups()
            and all(map(operator.is_, map(dict.get, self._mine, itertools.repeat(self.slot)), self._kept))
            and [(p.dtype, p.shape, p.device) for p in self.params] == self._kinds
            and list(map(Tensor.stride, self.params)) == self._strides
        )

    def has_same_groups(self) -> bool:
        """Whether the base's param groups, options and states are the same objects as before."""
        base = self.base
        return (
            self.is_complete
            and self._state is base.state
            and list(map(id, base.param_groups)) == list(map(id, self._groups))
            and list(map(id, base.state.values())) == list(map(id, self._states))
            and (not self._outsiders or all(p.grad is None for p in self._outsiders))
            and False not in [old.items() <= new.items() for old, new in zip(self._options, self._groups, strict=True)]
        )

    def decides_on_device(self) -> bool:
        """Whether the base can act on a decision made on the device, without the host."""
        return False

    def device_sums(self, tuners: int, device: torch.device) -> Tensor:
        """`sums_of` on the device, when that decides."""
        out = empty_sums(tuners, device)
        for batch in self.batches:
            batch.add_device_sums(out)
        return out

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None) -> Any:
        """Moves the weights as decided; returns what the base returned."""
        raise NotImplementedError
