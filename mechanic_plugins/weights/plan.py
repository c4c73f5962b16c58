"""What a step goes over: batches of like parameters, set up once and reused while only data changes.

A plan has two parts to play in a step: `sums`, before the decision, and `move`, after it. On a host
(`mechanic_plugins.weights.on_host`) the sums are floats; on a GPU that decides (`mechanic_plugins.weights.on_device`)
they stay there, and nothing waits for them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import align_gradients, is_dtensor, local
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.rule.decide import Decision
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.slots import Slots

__all__ = ["Batch", "Closure", "Entry", "Group", "Plan"]

Closure = Callable[[], Any]
Group = dict[str, Any]
_OPTIONS = ("maximize", "weight_decay", "foreach", "fused", "capturable", "momentum")
"""Options of a param group that a plan depends on; users may change them between steps."""


class Entry(NamedTuple):
    """A parameter that takes part in a step, with its param group, its tuner and its weight in the sums."""

    param: Tensor
    group: Group
    tuner_index: int
    weight: float


class Batch:
    """Parameters with the same tuner, weight, dtype and device, and what is kept for each."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], slots: Slots) -> None:
        first = entries[0]
        self.params = [entry.param for entry in entries]
        self.group, self.tuner_index, self.weight = first.group, first.tuner_index, first.weight
        self.sign = -1.0 if first.group.get("maximize") else 1.0
        self.penalty = facts.l2_penalty(base, first.group)
        self.is_sharded = is_dtensor(self.params[0])
        self.is_complex = self.params[0].is_complex()
        self.device: torch.device = local(self.params[0]).device
        states = [base.state.get(p, {}) for p in self.params]
        self.kept: list[Tensor] | None = None
        """References or deltas; None in a parameter's first step, or if nothing is kept."""
        if slots.main in states[0]:
            self.kept = [state[slots.main] for state in states]

    @staticmethod
    def kind(base: Optimizer, entry: Entry, slots: Slots) -> tuple[Any, ...]:
        """The key that all entries of a batch share."""
        x, group = local(entry.param), entry.group
        loss = bool(group.get("maximize")), facts.l2_penalty(base, group)
        is_even = x.device.type == "cpu" or triton_support.is_even(x)
        has_kept = slots.main in base.state.get(entry.param, ())
        where = entry.tuner_index, entry.weight, x.dtype, x.device, is_even, is_dtensor(entry.param)
        return *where, *loss, has_kept

    def xs(self) -> list[Tensor]:
        """This rank's shards of the weights. Not to be kept across steps: FSDP may replace the tensors."""
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def grads(self) -> list[Tensor | None]:
        """This rank's shards of the gradients."""
        if self.is_sharded:
            align_gradients(self.params)
            return [local(p.grad) for p in self.params]
        return [p.grad for p in self.params]


class Plan:
    """How to make the steps of one optimizer. Valid while its parameters and their state stay the same."""

    decides_on_device = False
    """Whether `sums` returns a tensor, and `move` takes a decision that is on the device."""

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], slots: Slots, make: Callable[..., Any] = Batch
    ) -> None:
        self.base, self.entries, self.slots = base, list(entries), slots
        self.params = [entry.param for entry in entries]
        self.batches: list[Any] = [make(base, part, slots) for part in _alike(base, entries, slots, make)]
        self.is_complete = all(batch.kept is not None for batch in self.batches)
        """Whether every parameter has been stepped before. If not, the next step makes another plan."""
        inside = set(map(id, self.params))
        every = [p for group in base.param_groups for p in group["params"]]
        self._outsiders = [p for p in every if id(p) not in inside]
        """Parameters that never had a gradient. Their first one invalidates the plan."""
        self._groups = list(base.param_groups)
        self._options = [{name: group[name] for name in _OPTIONS if name in group} for group in base.param_groups]
        self._kinds = [(p.dtype, p.shape, p.device, p.stride()) for p in self.params]
        self._state, self._states = base.state, list(base.state.values())
        self._mine: list[Any] = [base.state.get(p, {}) for p in self.params]
        self._kept = [state.get(slots.main) for state in self._mine]
        self.unapplied: dict[Tensor, Tensor] = {}
        """The updates of the last step that were only measured."""

    def is_current(self) -> bool:
        """Whether this step can follow the plan, given that the optimizer's parameters are the same.

        Asked before every step, so it compares whole lists with as little Python as possible.
        """
        base = self.base
        return (
            self.is_complete
            and all(map(operator.is_, map(dict.get, self._mine, itertools.repeat(self.slots.main)), self._kept))
            and [(p.dtype, p.shape, p.device, p.stride()) for p in self.params] == self._kinds
            and self._state is base.state
            and list(map(id, base.param_groups)) == list(map(id, self._groups))
            and list(map(id, base.state.values())) == list(map(id, self._states))
            and (not self._outsiders or all(p.grad is None for p in self._outsiders))
            and False not in [old.items() <= new.items() for old, new in zip(self._options, self._groups, strict=True)]
        )

    def sums(self, tuners: Sequence[Tuner]) -> Any:
        """This rank's sums."""
        raise NotImplementedError

    def move(self, decision: Decision, closure: Closure | None) -> Any:
        """Moves the weights as decided, undone on an error; returns what the base returned."""
        raise NotImplementedError


def _alike(base: Optimizer, entries: Iterable[Entry], slots: Slots, make: Any) -> list[list[Entry]]:
    kinds: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(make.kind(base, entry, slots), []).append(entry)
    return list(kinds.values())
