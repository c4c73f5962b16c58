"""The way around any base: a snapshot of the weights, the base's own step, and Mechanic's move.

In chunks of parameters where the base treats them one by one, so that the snapshot stays small.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import IndexRange
from mechanic_plugins.passes.plan import Closure, Decision, Entry, ParamBatch, Plan, clip
from mechanic_plugins.passes.twins import in_the_place_of, synchronized

__all__ = ["AnyBasePlan", "at_lrs", "skipping"]

SNAPSHOT_BYTES = 512 * 2**20
"""The most that a snapshot holds at once, if no single parameter is larger."""


class Chunk(NamedTuple):
    """Parameters that are stepped together."""

    parts: list[tuple[ParamBatch, IndexRange]]
    params: dict[int, list[Tensor]]
    """By id of their param group."""

    @classmethod
    def of(cls, parts: list[tuple[ParamBatch, IndexRange]]) -> Chunk:
        params: dict[int, list[Tensor]] = {}
        for batch, part in parts:
            params.setdefault(id(batch.group), []).extend(batch.params[part.first : part.last])
        return cls(parts, params)

    def snapshot(self) -> list[Any]:
        return [batch.snapshot(part) for batch, part in self.parts]

    def pairs(self, snapshots: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """See `ParamBatch.pairs`."""
        parts = zip(self.parts, snapshots, strict=True)
        return [pair for (batch, part), snapshot in parts for pair in batch.pairs(part, snapshot)]

    def restore(self, snapshots: Sequence[Any]) -> None:
        for (batch, part), snapshot in zip(self.parts, snapshots, strict=True):
            batch.restore(part, snapshot)

    def warn_of_own_iterates(self, snapshots: Sequence[Any]) -> None:
        """In a parameter's first step, which Mechanic's delta does not know yet; a base's name does not tell all."""
        for (batch, part), snapshot in zip(self.parts, snapshots, strict=True):
            if name := batch.own_iterate(part, snapshot):
                warnings.warn(
                    f"{type(batch.base).__name__} keeps a copy of the weights in its state ({name!r}). If its steps "
                    "start from there (Lookahead, averaged iterates), Mechanic moves the weights from under it, and "
                    "training goes wrong: mechanize the plain optimizer that it is built on, such as AdamW.",
                    stacklevel=2,
                )
                return

    def move(self, snapshots: Sequence[Any], scales: Tensor) -> None:
        for (batch, part), snapshot in zip(self.parts, snapshots, strict=True):
            batch.move(part, snapshot, scales)


class AnyBasePlan(Plan):
    """The base steps, and the move follows."""

    def __init__(
        self, base: Optimizer, entries: Sequence[Entry], batches: Sequence[ParamBatch], *, may_fuse_on_cpu: bool
    ) -> None:
        super().__init__(base, entries, batches)
        self._may_fuse_on_cpu = may_fuse_on_cpu and not any(batch.is_sharded for batch in batches)
        self._whole = [Chunk.of([(batch, IndexRange(0, len(batch.params))) for batch in batches])]
        self._chunks = list(_chunks(batches))

    def _chunks_for_step(self) -> list[Chunk]:
        """Parts where the base treats its parameters one by one and no hook would see more than one step; else all.

        An error in a later chunk leaves the earlier ones a step ahead; no weight is ever left half way.
        """
        apart = known_bases.is_torchs_own(self.base) and not known_bases.has_step_hooks(self.base)
        return self._chunks if apart else self._whole

    def start(self, closure: Closure | None) -> list[Any]:
        return [self._chunks_for_step()[0].snapshot()]

    def apply(self, decision: Decision, *, unit: float, closure: Closure | None, started: list[Any]) -> Any:
        chunks, scales = self._chunks_for_step(), decision.table
        for batch in self.batches:
            batch.begin_moves([part for chunk in chunks for other, part in chunk.parts if other is batch])
        with (
            at_lrs(self.base, self._lrs(unit)),
            skipping(self.base, decision),
            self._clipped(decision.clip) as inside,
            _clipping(self.base, inside),
        ):
            if len(chunks) == 1:
                result = self._apply_one(chunks[0], started, scales, closure)
            else:  # torch's own bases do nothing with a closure but to return its loss, which the caller has
                for chunk in chunks:
                    with _only(chunk, self.base):
                        result = self._apply_one(chunk, started, scales, None)
        for batch in self.batches:
            batch.finish_moves()
        return result

    def _lrs(self, unit: float) -> Sequence[Any]:
        """For an update of order 1, which keeps its digits when read off the weights."""
        return () if unit == 1.0 else [group["lr"] / unit for group in self.base.param_groups]

    @contextmanager
    def _clipped(self, factor: Tensor | None) -> Iterator[float | None]:
        """Multiplies the gradients, or yields the factor where the base's kernel does so while it reads them.

        After an error they are as before, so that the step can be made again; not on a GPU, where nobody knows whether
        the factor is 1, and a copy of them would be needed in every step.
        """
        one_for_all = factor is not None and factor.numel() == 1 and factor.device.type == "cpu"
        if factor is None:
            yield None
        elif one_for_all and factor < 1 and self._fuses_on_cpu() and self._is_in_float32():
            yield factor.item()
        else:
            changes = factor.device.type == "cpu" and bool((factor < 1).any())
            grads = [grad for batch in self.batches for grad in batch.grads() if grad is not None]
            before = [grad.clone() for grad in grads] if changes else []
            for batch in self.batches:
                clip(batch.grads(), factor)
            try:
                yield None
            except BaseException:
                for grad, old in zip(grads, before, strict=False):
                    grad.copy_(old)
                raise

    def _is_in_float32(self) -> bool:
        """The kernels' own factor is."""
        return all(p.dtype == torch.float32 for batch in self.batches for p in batch.params)

    def _apply_one(self, chunk: Chunk, started: list[Any], scales: Tensor, closure: Closure | None) -> Any:
        snapshots = started.pop() if started else chunk.snapshot()  # gone when this returns: never two of them
        pairs = chunk.pairs(snapshots)
        closure = synchronized(closure, pairs)
        try:
            with in_the_place_of(self.base, pairs), _fused(self.base, self._fuses_on_cpu()):
                result = self.base.step() if closure is None else self.base.step(closure)
            if not known_bases.is_torchs_own(self.base):
                chunk.warn_of_own_iterates(snapshots)
            chunk.move(snapshots, scales)
        except BaseException:  # out of memory, Ctrl-C: nobody is left with weights between the base's and ours
            chunk.restore(snapshots)
            raise
        return result

    def _fuses_on_cpu(self) -> bool:
        return self._may_fuse_on_cpu and known_bases.can_fuse_on_cpu(self.base)


def _chunks(batches: Sequence[ParamBatch]) -> Iterator[Chunk]:
    parts: list[tuple[ParamBatch, IndexRange]] = []
    held = 0
    for batch in batches:
        first = 0
        for index, size in enumerate(batch.sizes):
            if held and held + size > SNAPSHOT_BYTES:
                yield Chunk.of([*parts, (batch, IndexRange(first, index))] if index > first else parts)
                parts, held, first = [], 0, index
            held += size
        parts = [*parts, (batch, IndexRange(first, len(batch.params)))]
    yield Chunk.of(parts)


@contextmanager
def _only(chunk: Chunk, base: Optimizer) -> Iterator[None]:
    """Hides all other parameters from the base."""
    params = [group["params"] for group in base.param_groups]
    try:
        for group in base.param_groups:
            group["params"] = chunk.params.get(id(group), [])
        yield
    finally:
        for group, all_of_them in zip(base.param_groups, params, strict=True):
            group["params"] = all_of_them


@contextmanager
def at_lrs(base: Optimizer, lrs: Sequence[Any]) -> Iterator[None]:
    """Has the base step at other learning rates than its param groups'; none given leaves them."""
    groups = base.param_groups[: len(lrs)]
    before = [group["lr"] for group in groups]
    try:
        for group, lr in zip(groups, lrs, strict=True):
            group["lr"] = lr
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


@contextmanager
def _fused(base: Optimizer, wanted: bool) -> Iterator[None]:
    """Has the base step by torch's fused kernel, which its groups leave open."""
    if not wanted:
        yield
        return
    try:
        for group in base.param_groups:
            group["fused"] = True
        yield
    finally:
        for group in base.param_groups:
            group["fused"] = None


@contextmanager
def _clipping(base: Any, factor: float | None) -> Iterator[None]:
    """Has a fused base multiply its gradients: it divides them by a grad scaler's factor, if there is one."""
    if factor is None:
        yield
        return
    base.grad_scale = torch.tensor(1 / factor, dtype=torch.float32)
    try:
        yield
    finally:
        del base.grad_scale


@contextmanager
def skipping(base: Any, decision: Decision) -> Iterator[None]:
    """Tells a fused base, on the device, whether to leave this step out."""
    if isinstance(decision.applied, bool):
        yield
        return
    base.found_inf = decision.applied.logical_not().to(torch.float32)
    try:
        yield
    finally:
        del base.found_inf
