"""The reference among everything that a training loop does beside steps; for tests that draw such things at random.

A thin layer: Algorithm 1 stays in tests/reference.py. Here is what the package promises around it: steps that are not
made, parameters that are frozen, groups that come late, and a scale that is held.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from reference import Reference
from torch import Tensor


class Judge(Reference):
    """`trains[i]` says whether parameter i may move, `frozen` whether the scale is held."""

    def __init__(
        self,
        params: Sequence[Tensor],
        base_factory: Any,
        *,
        counted_from_the_start: bool,
        ignores_lr: bool,
        **options: Any,
    ) -> None:
        super().__init__(params, base_factory, **options)
        self.blank = copy.deepcopy(self.parts[-1])
        self.counted_from_the_start = counted_from_the_start
        self.had_grad = [counted_from_the_start for _ in self.x]
        self.trains = [True for _ in self.x]
        self.frozen = False
        self.steps = self.skipped = 0
        self.holds_at_zero = options.get("rule", "paper") in ("paper", "theory") and not ignores_lr

    @property
    def played(self) -> list[float]:
        """What each group's updates are multiplied by."""
        played = [part.played for part in self.parts]
        return played if self.scope == "group" else played * len(self.base.param_groups)

    def add_group(self, params: Sequence[Tensor], **group: Any) -> None:
        first = len(self.x)
        for p in params:
            self.x_ref.append(p.detach().to(torch.float64, copy=True))
            self.x.append(self.x_ref[-1].clone())
            self.Delta.append(torch.zeros_like(self.x_ref[-1]))
            self.copies.append(self.x_ref[-1].clone())
            self.had_grad.append(self.counted_from_the_start)
            self.trains.append(True)
        self.base.add_param_group({"params": self.copies[first:], **group})
        new = list(range(first, len(self.x)))
        if self.scope == "all":
            self.parts[0].indices = [*self.parts[0].indices, *new]
            return
        part = copy.deepcopy(self.blank)
        part.indices = new
        if self.c is not None:
            part.tuner.s_init /= self.c
            part.tuner.s = part.tuner.s / self.c
            part.tuner.eps *= self.c
        self.parts.append(part)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        present = [g for g in grads if g is not None]
        if not all(bool(g.isfinite().all()) for g in present):
            self.skipped += 1
            return
        if not present:
            return
        self.steps += 1
        before = [
            (x.clone(), delta.clone(), had) for x, delta, had in zip(self.x, self.Delta, self.had_grad, strict=True)
        ]
        self.had_grad = [had and trains for had, trains in zip(self.had_grad, self.trains, strict=True)]
        if self.frozen or (self.holds_at_zero and self._is_lr_zero()):
            self._step_at_this_scale(grads)
        else:
            super().step(grads)
        self._put_back_frozen(before)

    def _is_lr_zero(self) -> bool:
        return all(float(group["lr"]) == 0 for group in self.base.param_groups)

    def _step_at_this_scale(self, grads: Sequence[Tensor | None]) -> None:
        self.had_grad = [had or g is not None for had, g in zip(self.had_grad, grads, strict=True)]
        u = self.base_update(grads)
        self.find_c()
        self.note_first_lrs()
        for part in self.parts:
            if part.own_warmup:
                part.highest_lr = max(part.highest_lr, self.lr_of(part))
            for i in part.indices:
                self.Delta[i] = self.Delta[i] + u[i]
                self.x[i] = self.x_ref[i] + part.played * self.Delta[i]

    def _put_back_frozen(self, before: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        """They stand where they stood, and will go on from there."""
        for part in self.parts:
            for i in (i for i in part.indices if not self.trains[i]):
                self.x[i], self.Delta[i], self.had_grad[i] = before[i]
                self.x_ref[i] = self.x[i] - part.played * self.Delta[i]
