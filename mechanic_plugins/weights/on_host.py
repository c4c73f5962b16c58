"""A step that the host decides, around any base: the base's own step, at learning rate lr * S.

What a base not known to be linear in lr adds to the weights is read off them instead, and multiplied by S. So is every
base's update while the scale is still unknown (it is only measured, and kept in place of the reference), and with a
published rule, which also keeps the sum of all updates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import is_dtensor, local
from mechanic_plugins.rule.decide import Decision
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights import facts, masters
from mechanic_plugins.weights.host_sums import HostBatch, exact, sums_of
from mechanic_plugins.weights.plan import Closure, Entry, Plan
from mechanic_plugins.weights.slots import DELTA, MASTER, REF, Slots, is_16_bit
from mechanic_plugins.weights.step_base import StepBase, is_discarded, is_observed, warn_of_own_iterates
from mechanic_plugins.weights.with_delta import move_dithered, move_plain, move_rounded

__all__ = ["HostPlan"]

COPIED_AT_ONCE = 512 * 2**20
"""The most bytes of weights that a step copies at once, unless the base has to step all of them together."""


class Float32Copy(NamedTuple):
    """A 16-bit parameter, its copy, and what stands in for the parameter while the base steps."""

    param: Tensor
    master: Tensor
    stand_in: Tensor


class HostPlan(Plan):
    """Steps the base itself."""

    batches: list[HostBatch]

    def __init__(
        self,
        base: Optimizer,
        entries: Sequence[Entry],
        tuner_of: Sequence[int],
        slots: Slots,
        settings: Settings,
        *,
        keeps: bool = True,
        may_fuse: bool = False,
        uses_kernels: bool = False,
    ) -> None:
        """`tuner_of` has the tuner's index for each param group.

        `keeps` is False after `freeze(release=True)`, when only the gradients enter the sums. `uses_kernels`: Triton
        may compute the sums.
        """
        super().__init__(base, entries, slots, HostBatch)
        self.settings, self._tuner_of, self._keeps = settings, tuner_of, keeps
        self._step_base = StepBase(base, self.params, may_fuse=may_fuse)
        self._is_linear = facts.is_linear_in_lr(type(base))
        self._uses_masters = keeps and masters.are_usable(base, self.params)
        self._is_sharded = any(map(is_dtensor, self.params))
        self._bytes = sum(map(_bytes_of, self.params))
        kept = [each is not None and each.dtype == p.dtype for p, each in zip(self.params, self._kept, strict=True)]
        self._is_plain = bool(kept) and all(kept) and not self._is_sharded
        """Whether there are weights, everything that is kept has their dtype, and all of it is on this rank."""
        if self._uses_masters and slots.is_default:
            low = [batch for batch in self.batches if is_16_bit(batch.params[0].dtype)]
            self.is_complete = self.is_complete and all(batch.masters is not None for batch in low)
        else:
            for batch in self.batches:
                batch.masters = None
        self.is_complete = self.is_complete or not keeps
        for batch in self.batches if uses_kernels and slots.is_default else ():
            batch.use_kernels()

    def sums(self, tuners: Sequence[Tuner]) -> list[float]:
        """This rank's sums. Waits for the device."""
        return sums_of(self.batches, tuners, self.settings)

    def move(self, decision: Decision, closure: Closure | None) -> Any:
        """Moves the weights as decided, undone on an error; returns what the base returned."""
        scales = decision.new_scales
        if (not self._keeps or (self.slots.is_default and self._is_linear)) and 0 not in [
            scales[entry.tuner_index] for entry in self.entries if entry.param.grad is not None
        ]:
            return self.step_at_scale(decision, closure)
        if closure is not None or self._bytes <= COPIED_AT_ONCE:
            return self._step_apart(self.entries, decision, closure)
        chunks = list(self._chunks())
        lists = [group["params"] for group in self.base.param_groups]
        try:
            for chunk in chunks:
                inside = {id(entry.param) for entry in chunk}
                for group, params in zip(self.base.param_groups, lists, strict=True):
                    group["params"] = [p for p in params if id(p) in inside]
                self._step_apart(chunk, decision, None)
        finally:
            for group, params in zip(self.base.param_groups, lists, strict=True):
                group["params"] = params
        return None

    # ---------------------------------------------------------------- at the scale

    def step_at_scale(self, decision: Decision, closure: Closure | None) -> Any:
        """Steps the base at lr * S. The scales are a tensor if a GPU has decided."""
        is_begun = not self._keeps or (self.is_complete and 0 not in decision.old_scales)
        starts = {} if is_begun else self._starts(decision)
        copies = self._float32_copies(self.entries) if self._uses_masters else []
        scales = decision.new_scales
        lrs = [group["lr"] * scales[i] for group, i in zip(self.base.param_groups, self._tuner_of, strict=True)]
        if isinstance(scales, Tensor):
            lrs = [lr.float() for lr in lrs]  # the dtype that torch's fused kernels read
        try:
            if copies:
                result = self._step_copies(copies, lrs, decision, closure)
            else:
                result = self._step_base(lrs, decision.clip, is_made=decision.is_made, closure=closure)
        except BaseException:
            for copy in copies:
                local(copy.master).copy_(local(copy.param))
            raise
        for copy in copies:
            local(copy.param).copy_(local(copy.master))
        if starts or copies:
            self._keep(starts, copies)
        return result

    # ---------------------------------------------------------------- read off the weights

    def _chunks(self) -> Iterator[list[Entry]]:
        """Parts of the parameters that may step one after the other, so that not all weights are copied at once."""
        if not facts.is_torchs_own(self.base) or is_observed(self.base):
            yield self.entries
            return
        chunk, size = list[Entry](), 0
        for entry in self.entries:
            nbytes = _bytes_of(entry.param)
            if chunk and size + nbytes > COPIED_AT_ONCE:
                yield chunk
                chunk, size = [], 0
            chunk.append(entry)
            size += nbytes
        yield chunk

    def _step_apart(self, entries: Sequence[Entry], decision: Decision, closure: Closure | None) -> Any:
        """Steps the base at its own learning rate, and replaces its weights. On an error they are restored."""
        starts = self._starts(decision) if self.slots.is_default else {}
        copies = self._float32_copies(entries) if self._uses_masters else []
        moved = [entry for entry in entries if entry.param.grad is not None] if self.slots.is_default else entries
        xs, lost = [entry.param for entry in moved], list[bool]()
        if self._uses_masters:
            masters_of = {id(copy.param): copy.master for copy in copies}
            xs, lost = [masters_of.get(id(p), p) for p in xs], [is_discarded(self.base, p) for p in xs]
        if self._is_sharded:
            xs = [local(x) for x in xs]
        olds, unit, stretch = list(map(Tensor.clone, xs)), decision.tuners[0].unit, 1.0
        if self._is_linear and 0 < unit < math.inf:  # brings the lr next to 1: the updates keep their digits
            stretch = 2.0 ** -math.frexp(unit)[1]
        if self._is_linear and self.slots.is_default and not any(decision.new_scales):
            stretch *= self._stretch(moved, olds, stretch)
        lrs = [group["lr"] * stretch for group in self.base.param_groups] if stretch != 1 else ()
        try:
            if copies:
                result = self._step_copies(copies, lrs, decision, closure)
            else:
                result = self._step_base(lrs, decision.clip, closure=closure)
            if not self.is_complete:
                warn_of_own_iterates(self.base, [entry.param for entry in moved], olds)
            if xs:  # each update takes the place of the weights that it is read off
                torch._foreach_sub_(xs, olds)
            if self._is_plain and not self.slots.is_default and entries is self.entries and not decision.old_scales[1:]:
                scales = decision.old_scales[0], float(decision.new_scales[0])
                move_plain(olds, xs, self._kept, *scales, shrink=1 / stretch)
                return result
            if xs and stretch != 1:
                torch._foreach_mul_(xs, 1 / stretch)
            for x in itertools.compress(xs, lost):
                x.zero_()
            if self.slots.is_default:
                self._add_to_weights(moved, xs, olds, starts, copies, decision)
            else:
                self._add_to_deltas(moved, xs, olds, decision)
        except BaseException:
            for x, old in zip(xs, olds, strict=True):
                x.copy_(old)
            raise
        return result

    def _add_to_weights(
        self,
        moved: Sequence[Entry],
        updates: Sequence[Tensor],
        olds: Sequence[Tensor],
        starts: dict[Tensor, Tensor | None],
        copies: Sequence[Float32Copy],
        decision: Decision,
    ) -> None:
        """Default rule: x + S * u; while the scale is 0, the update is only stored. The updates are x's own memory."""
        params = {entry.param for entry in moved}
        self._keep({p: x for p, x in starts.items() if p not in params}, copies)
        for entry, x, old in zip(moved, updates, olds, strict=True):
            p, update, scale = entry.param, x, float(decision.new_scales[entry.tuner_index])
            if scale == 0 or p in starts:
                update = x.clone()
                x.copy_(old)
            if p in starts:
                self._keep({p: starts[p]}, ())
            if scale == 0:
                local(self.base.state[p][REF]).add_(update)
                self.unapplied[p] = update
            else:
                torch.add(old, update, alpha=scale, out=x)
            if x.dtype != p.dtype:
                local(p).copy_(x)

    def _add_to_deltas(
        self, moved: Sequence[Entry], updates: list[Tensor], olds: list[Tensor], decision: Decision
    ) -> None:
        """Published rules: x_ref + S * Delta."""
        for entry in moved:
            self.slots.begin(entry.param, self.base.state[entry.param], has_master=False)
        place = 0
        for entry, old, update in zip(moved, olds, updates, strict=True):
            state, x = self.base.state[entry.param], local(entry.param)
            scales = decision.old_scales[entry.tuner_index], float(decision.new_scales[entry.tuner_index])
            delta, step = local(state[DELTA]), int(decision.tuners[entry.tuner_index].steps)
            if is_16_bit(x.dtype):
                move_rounded(x, old.to(x.dtype), update, delta, local(state[REF]), *scales)
            elif delta.dtype != update.dtype:
                move_dithered(old, update, delta, *scales, place=place, step=step)
            else:
                move_plain([old], [update], [delta], *scales)
            place += update.numel()

    def _step_copies(
        self, copies: Sequence[Float32Copy], lrs: Sequence[Any], decision: Decision, closure: Closure | None
    ) -> Any:
        pairs = [(copy.param, copy.stand_in) for copy in copies]
        with masters.in_the_place_of(self.base, pairs):
            closure = masters.synchronized(closure, pairs)
            result = self._step_base(lrs, decision.clip, is_made=decision.is_made, closure=closure)
        for copy in copies:
            if local(copy.stand_in).data_ptr() != local(copy.master).data_ptr():  # the base has replaced the tensor
                local(copy.master).copy_(local(copy.stand_in))
        return result

    def _stretch(self, moved: Sequence[Entry], olds: Sequence[Tensor], stretch: float) -> float:
        """A power of two to multiply the lr by, if lr * stretch * gradient would be lost in the weights' rounding.

        For updates that are only measured. 1 with 16-bit weights, whose range it could exceed. Overshooting is
        harmless: dividing by a power of two is exact. Ranks differ in it: measure with it, never move weights by it.
        """
        lr = stretch * max((float(entry.group["lr"]) for entry in moved), default=0.0)
        grads = [local(entry.param.grad) for entry in moved if entry.param.grad is not None]
        x, g = (
            max((each.abs().max().item() for each in tensors if each.numel()), default=0.0) for tensors in (olds, grads)
        )
        if not 0 < 1024 * lr * g < x < math.inf:
            return 1.0
        limit = {torch.float64: 512, torch.float32: 64}.get(olds[0].dtype, 0)
        return float(2.0 ** min(math.frexp(x / (lr * g))[1], limit))

    # ---------------------------------------------------------------- what is kept

    def _starts(self, decision: Decision) -> dict[Tensor, Tensor | None]:
        """The parameters that get a reference in this step, with its value, or None if their tuner has no scale yet.

        At a tuner's first move these are all of its parameters: the stored updates are dropped.
        """
        if not self._keeps:
            return {}
        first = [was == 0 < now for was, now in zip(decision.old_scales, decision.new_scales, strict=True)]
        starts: dict[Tensor, Tensor | None] = {}
        for group, index in zip(self.base.param_groups, self._tuner_of, strict=True):
            for p in group["params"]:
                has_one = REF in self.base.state.get(p, {})
                if (has_one and first[index]) or (not has_one and p.grad is not None):
                    starts[p] = local(p).detach().clone() if decision.new_scales[index] > 0 else None
        return starts

    def _keep(self, starts: dict[Tensor, Tensor | None], copies: Sequence[Float32Copy]) -> None:
        """Called after the base has created its state, since bases recognise a new parameter by its empty state."""
        for copy in copies:
            self.base.state[copy.param].setdefault(MASTER, copy.master)
        for p, x in starts.items():
            state = self.base.state[p]
            self.slots.begin(p, state, has_master=self._uses_masters and is_16_bit(p.dtype))
            if x is not None:
                self.slots.put(p, state, REF, x)

    def _float32_copies(self, entries: Sequence[Entry]) -> list[Float32Copy]:
        copies = []
        for p in [entry.param for entry in entries]:
            if not is_16_bit(p.dtype) or p.grad is None or is_discarded(self.base, p):
                continue
            master = self.base.state.get(p, {}).get(MASTER)
            if master is None:
                master = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
                local(master).copy_(local(p))
            else:
                local(master).copy_(exact(local(p), local(master)))
            copies.append(Float32Copy(p, master, masters.stand_in(p, master)))
        return copies


def _bytes_of(p: Tensor) -> int:
    return int(local(p).numel()) * p.element_size()
