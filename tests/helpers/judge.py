"""The references with everything else that a training loop does besides steps, for tests that draw it at random.

The rules stay in tests/reference.py and tests/reference_default.py. This thin layer adds what the package promises
around them: skipped steps, frozen parameters, late groups and a held scale.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from reference import Around, Reference
from reference_default import Default, Rule
from torch import Tensor


class Loop(Around):
    """`trains[i]` says whether parameter i may move, `frozen` whether the scale is held."""

    parts: list[Any]

    def __init__(self, *args: Any, counted_from_the_start: bool, ignores_lr: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.blank = copy.deepcopy(self.parts[-1])
        self.counted_from_the_start = counted_from_the_start
        self.had_grad = [counted_from_the_start for _ in self.x]
        self.trains = [True for _ in self.x]
        self.has_stepped = [False for _ in self.x]
        self.ignores_lr = ignores_lr
        self.frozen = False
        self.steps = 0

    @property
    def played(self) -> list[float]:
        """The factor on each group's updates."""
        played = [part.S for part in self.parts]
        return played if self.scope == "group" else played * len(self.base.param_groups)

    def add_group(self, params: Sequence[Tensor], **group: Any) -> None:
        first = len(self.x)
        for p in params:
            self.x_ref.append(p.detach().to(torch.float64, copy=True))
            self.x.append(self.x_ref[-1].clone())
            self.updates().append(torch.zeros_like(self.x_ref[-1]))
            self.copies.append(self.x_ref[-1].clone())
            self.had_grad.append(self.counted_from_the_start)
            self.trains.append(True)
            self.has_stepped.append(False)
        self.base.add_param_group({"params": self.copies[first:], **group})
        new = list(range(first, len(self.x)))
        if self.scope == "all":
            self.parts[0].indices = [*self.parts[0].indices, *new]
        else:
            self.parts.append(self.late_part(new))

    def step(self, grads: Sequence[Tensor | None]) -> None:
        present = [g for g in grads if g is not None]
        if not all(bool(g.isfinite().all()) for g in present):
            self.skipped += 1
            return
        if not present:
            return
        skipped, had = self.skipped, self.had_grad
        before = [(x.clone(), x_ref.clone()) for x, x_ref in zip(self.x, self.x_ref, strict=True)]
        scales = {i: part.S for part in self.parts for i in part.indices}
        self.had_grad = [seen and trains for seen, trains in zip(had, self.trains, strict=True)]
        self.tuned_step(grads)
        if self.skipped > skipped:
            self.had_grad = had
            return
        self.steps += 1
        self.has_stepped = [had or g is not None for had, g in zip(self.has_stepped, grads, strict=True)]
        for part in self.parts:
            for i in (i for i in part.indices if not self.trains[i]):
                self.put_back(i, *before[i], scales[i], part.S)
                self.had_grad[i] = had[i]

    def is_held(self) -> bool:
        return self.frozen or self.is_lr_zero()

    def is_lr_zero(self) -> bool:
        return not self.ignores_lr and all(float(group["lr"]) == 0 for group in self.base.param_groups)


class PublishedLoop(Loop, Reference):
    def updates(self) -> list[Tensor]:
        return self.Delta

    def late_part(self, indices: list[int]) -> Any:
        part = copy.deepcopy(self.blank)
        part.indices = indices
        if self.c is not None:
            part.tuner.s_init /= self.c
            part.tuner.s = part.tuner.s / self.c
            part.tuner.eps *= self.c
        return part

    def tuned_step(self, grads: Sequence[Tensor | None]) -> None:
        starts_at_zero = self.parts[0].tuner.rule in (self.parts[0].tuner.paper, self.parts[0].tuner.theory)
        if not (self.frozen or (starts_at_zero and self.is_held())):
            Reference.step(self, grads)
            return
        self.had_grad = [had or g is not None for had, g in zip(self.had_grad, grads, strict=True)]
        u = self.base_update(grads)
        self.find_c()
        for part in self.parts:
            for i in part.indices:
                self.Delta[i] = self.Delta[i] + u[i]
                self.x[i] = self.x_ref[i] + part.S * self.Delta[i]

    def takes_along(self, i: int) -> bool:
        """Whether weights changed from outside move their reference along."""
        return True

    def put_back(self, i: int, x: Tensor, x_ref: Tensor, was: float, now: float) -> None:
        """Restores x, and moves the reference so that it continues from there."""
        self.x[i] = x
        self.x_ref[i] = x - now * self.Delta[i]


class DefaultLoop(Loop, Default):
    has_history = False

    def updates(self) -> list[Tensor]:
        return []  # it keeps none

    def late_part(self, indices: list[int]) -> Any:
        return Rule(indices)

    def lr_of(self, part: Rule) -> float:
        return 1.0 if self.ignores_lr else super().lr_of(part)

    def tuned_step(self, grads: Sequence[Tensor | None]) -> None:
        Default.step(self, grads)

    def begin_anew(self) -> None:
        """Does nothing if the base had state before the first step."""
        if not self.counted_from_the_start and not self.has_history:
            super().begin_anew()
            self.steps = 0

    def takes_along(self, i: int) -> bool:
        """Only before the first move, as there is no reference yet."""
        return not self.has_stepped[i] or any(part.S == 0 for part in self.parts if i in part.indices)

    def put_back(self, i: int, x: Tensor, x_ref: Tensor, was: float, now: float) -> None:
        """Restores x."""
        self.x[i] = x


def Judge(*args: Any, rule: str, **options: Any) -> Any:
    return DefaultLoop(*args, **options) if rule == "relative" else PublishedLoop(*args, rule=rule, **options)
