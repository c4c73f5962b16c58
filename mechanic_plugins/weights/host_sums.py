"""This rank's sums as floats: the products of the algorithm."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.kernels import triton_support
from mechanic_plugins.kernels.addresses import Kept
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import WIDTH, Sums, empty
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights.dots import Dots, reals
from mechanic_plugins.weights.plan import Batch, Entry
from mechanic_plugins.weights.slots import MASTER, Slots, is_16_bit

__all__ = ["HostBatch", "batches_of_parts", "exact", "sums_of"]

_DG, _GG, _XX, _DX, _DD, _DP = range(len(Sums._fields))


class HostBatch(Batch):
    """A batch whose sums the host waits for."""

    def __init__(self, base: Optimizer, entries: Sequence[Entry], slots: Slots) -> None:
        super().__init__(base, entries, slots)
        self.given: list[Tensor | None] | None = None
        """The gradients, if they are not the parameters' own."""
        self.masters: list[Tensor] | None = None
        """The masters of 16-bit weights with the default rule."""
        if slots.is_default and is_16_bit(self.params[0].dtype):
            masters = [base.state.get(p, {}).get(MASTER) for p in self.params]
            self.masters = masters if all(master is not None for master in masters) else None
        self._needs_dd = slots.is_default
        self._kernels: TritonBatch | None = None
        self._places: list[int] = []
        self._dots = Dots([local(p).numel() * (1 + self.is_complex) for p in self.params], self.device)

    def add_sums(self, out: list[float], *, is_summed: bool, with_decay: bool) -> None:
        """Adds this batch's contribution to its tuner's sums, and its number of gradients to the count at the end.

        Args:
            out: The vector of all tuners.
            is_summed: What is kept is d itself, a sum of updates.
            with_decay: <d, x> and <x, x> are needed.
        """
        if self._kernels is not None and not (is_summed or with_decay) and self._can_use_kernels():
            vector = empty((len(out) - 1) // WIDTH, self.device)
            self._kernels.add_sums(
                vector, tuner_index=self.tuner_index, weight=self.weight, maximize=self.sign < 0, penalty=self.penalty
            )
            out[:] = map(operator.add, out, vector.tolist())
            return
        xs, kept = self.params, self.kept
        grads: list[Any] = [p.grad for p in xs] if self.given is None else self.given
        if self.is_sharded:
            xs, grads, kept = self.xs(), self.grads(), kept and [local(each) for each in kept]
        if self.masters is not None:
            xs = [exact(x, local(master)) for x, master in zip(xs, self.masters, strict=True)]
        missing = sum(map(operator.is_, grads, itertools.repeat(None)))
        if missing:
            grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads, strict=True)]
        if self.is_complex:
            xs, kept, grads = reals(xs), kept and reals(kept), reals(grads)
        with_dx = with_decay or self.penalty != 0
        dg, gg, dd, dx, xx = self._dots.of(
            xs, kept, grads, is_difference=not is_summed, with_dd=self._needs_dd, with_dx=with_dx, with_xx=with_decay
        )
        weight, at = self.weight, WIDTH * self.tuner_index
        out[at + _DG] += self.sign * weight * dg
        out[at + _GG] += weight * gg
        out[at + _XX] += weight * xx
        out[at + _DX] += weight * dx
        out[at + _DD] += weight * dd
        out[at + _DP] += self.penalty * weight * dx
        out[-1] += len(grads) - missing

    def use_kernels(self) -> None:
        """Has Triton compute the default rule's sums if it can."""
        xs, grads = [local(p) for p in self.params], self.grads()
        fits = all(triton_support.fits(x, grad) for x, grad in zip(xs, grads, strict=True))
        kinds = {triton_support.kind_of(x, grad)[:3] for x, grad in zip(xs, grads, strict=True)}
        if self.kept is not None and fits and len(kinds) == 1:
            pairs = itertools.zip_longest(self.kept, self.masters or ())
            kept = [Kept(local(ref), local(master)) for ref, master in pairs]
            self._kernels, self._places = TritonBatch(xs, grads, kept), self._places_now()

    def _places_now(self) -> list[int]:
        """Addresses of a few tensors: tools that offload the state move all of it."""
        assert self.kept is not None
        return [local(each).data_ptr() for each in (self.kept[0], self.kept[-1], *(self.masters or [])[:1])]

    def _can_use_kernels(self) -> bool:
        if self._places != self._places_now():
            self.use_kernels()
        assert self._kernels is not None
        return self._kernels.addresses.refresh([local(p) for p in self.params], self.grads())


def exact(x: Tensor, master: Tensor) -> Tensor:
    """The exact value of 16-bit weights: the master's, or the weights' own where they were changed from outside."""
    x = x.detach()
    return torch.where(x == master.to(x.dtype), master, x.float())


def sums_of(batches: Iterable[HostBatch], tuners: Sequence[Tuner], settings: Settings) -> list[float]:
    """This rank's sums, weighted so that the ranks' vectors add up."""
    is_default, with_decay = settings.rule == "relative", bool(settings.s_decay)
    out = [0.0] * (WIDTH * len(tuners) + 1)
    for batch in batches:
        is_summed = not is_default or tuners[batch.tuner_index].scale == 0
        batch.add_sums(out, is_summed=is_summed, with_decay=with_decay)
    return out


def batches_of_parts(
    base: Optimizer, slots: Slots, parts: Iterable[tuple[Entry, Tensor, Tensor | None]]
) -> list[HostBatch]:
    """Batches of an engine's shards, each given with its gradient and what is kept for it."""
    kinds: dict[tuple[Any, ...], list[tuple[Entry, Tensor, Tensor | None]]] = {}
    for entry, grad, kept in parts:
        kind = id(entry.group), entry.param.dtype, grad.dtype, entry.param.device, kept is None
        kinds.setdefault(kind, []).append((entry, grad, kept))
    batches = []
    for each in kinds.values():
        entries, grads, kept_by_all = zip(*each, strict=True)
        batch = HostBatch(base, entries, slots)
        batch.given = list(grads)
        batch.kept = None if kept_by_all[0] is None else list(kept_by_all)
        batches.append(batch)
    return batches
