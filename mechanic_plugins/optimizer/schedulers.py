"""How long a run is, as the schedule of its learning rate shows."""

from __future__ import annotations

import dis
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from mechanic_plugins.checkpoints.format import LR, STEPS
from mechanic_plugins.distributed.live_objects import live_objects
from mechanic_plugins.optimizer.freezing import Freezing

__all__ = ["Scheduled", "SchedulerWatch", "length_of"]

_log = logging.getLogger(__name__)
_LENGTH = "Mechanic: the run has %d optimizer steps, by its schedule."

_LONGEST = 24
"""Powers of two steps that a function of the step is followed."""
_FALLEN = 0.5
"""A schedule has ended where it stays below this part of its peak. One that stays higher was a warm-up."""
_HALFWAY = 0.01
"""A schedule that ends has more than this part of its peak halfway. One that has less fades away, and has no end."""

_WRITES = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR"}
_TAKES = {"next", "send", "pop", "popleft", "append", "print"}
"""What a function's code has in it that changes something when it is called: see `_may_be_asked`."""

_LONG_WARM_UP, _RUN_OF_WARM_UPS = (50, 10_000), 20
"""Steps, and how many times as long a run is taken for where nothing but its warm-up is seen, as in loops that set the
learning rate by hand. Shorter ones come in runs of all lengths, longer ones are something else."""

Group = dict[str, Any]


class Scheduled(Freezing):
    """Learns how long the run is from its schedule, where nobody has told it."""

    def _start(self) -> None:
        super()._start()
        self._watch = SchedulerWatch(self.param_groups)
        self.scheduled_steps: Callable[[], int | None] | None = None
        """Asked of an engine whose own scheduler knows."""

    def _learn_length(self) -> None:
        if self._total_steps is not None:
            return
        if self.scheduled_steps is not None and (steps := self.scheduled_steps()) is not None:
            self.total_steps = steps  # it will be asked again when the run is resumed
            _log.info(_LENGTH, steps)
            return
        steps = self._watch.total_steps(self.param_groups, done=self.param_groups[0].get(STEPS, 0))
        if steps is not None:
            self.total_steps = self._progress.total_steps = steps
            _log.info(_LENGTH, steps)


class SchedulerWatch:
    """Watches the schedulers during the first two steps: by then it is seen which are used, and how far a step goes.

    That is before the tuner's first bet, so nothing is lost.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._step: int | None = None
        self._before: list[tuple[ref[LRScheduler], int]] | None = None
        self._peak, self._first_lr = _highest(groups, "initial_lr", "lr"), 0.0

    def total_steps(self, groups: Sequence[Group], *, done: int) -> int | None:
        """The optimizer steps of the run that begins. Asked in every step, it has an answer in the second at most.

        Args:
            groups: The optimizer's param groups.
            done: Steps made before the first that was watched. A longer run keeps the length that it had.
        """
        self._step = done + 1 if self._step is None else self._step + 1
        if self._before is None and self._step <= 2:
            self._before = [(ref(s), 0 if done else s.last_epoch) for s in _schedulers_of(groups)]
            self._first_lr = groups[0].get(LR, 0.0) if done else _highest(groups, "lr")
        if self._step != 2 or self._before is None:
            return None
        found = [(scheduler(), last_epoch) for scheduler, last_epoch in self._before]
        lengths = [_steps_left(scheduler, since) for scheduler, since in found if scheduler is not None]
        return max(filter(None, lengths), default=None) or self._by_warm_up(groups)

    def _by_warm_up(self, groups: Sequence[Group]) -> int | None:
        """A linear one, whose length follows from its first two steps. A long one belongs to a long run."""
        rise = _highest(groups, "lr") - self._first_lr
        length = self._peak / rise if rise > 0 else 0.0
        return round(_RUN_OF_WARM_UPS * length) if _LONG_WARM_UP[0] <= length <= _LONG_WARM_UP[1] else None


def _highest(groups: Sequence[Group], *keys: str) -> float:
    """The highest of the groups' learning rates, each under the first key that it has.

    Tensors are not looked at: that might mean to wait for a GPU.
    """
    lrs = [next((group[key] for key in keys if group.get(key) is not None), 0.0) for group in groups]
    return max((float(lr) for lr in lrs if isinstance(lr, (int, float))), default=0.0)


def _schedulers_of(groups: Sequence[Group]) -> list[LRScheduler]:
    """They hold the optimizer, or a framework's proxy of it; the optimizer does not hold them."""
    if not any("initial_lr" in group for group in groups):  # every scheduler puts it there
        return []
    found = live_objects(lambda kind: issubclass(kind, LRScheduler))
    ours = (s for s in found if getattr(getattr(s, "optimizer", None), "param_groups", None) is groups)
    return [s for s in ours if isinstance(getattr(s, "last_epoch", None), int)]  # ChainedScheduler's parts have one


def _steps_left(scheduler: LRScheduler, since: int) -> int | None:
    """In optimizer steps: Accelerate's schedulers advance once for each rank, others once for each micro-batch."""
    advance = scheduler.last_epoch - since
    if advance < 1 or (length := length_of(scheduler)) is None:  # stepped once an epoch, or not in use
        return None
    return max(round((length - since) / advance), 1)


def length_of(scheduler: LRScheduler) -> int | None:
    """The number of the scheduler's own steps until the learning rate has fallen for good; None if it does not say."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, PolynomialLR):
        return scheduler.total_iters
    if isinstance(scheduler, LinearLR):
        return scheduler.total_iters if scheduler.end_factor < _FALLEN * scheduler.start_factor else None
    if isinstance(scheduler, SequentialLR):
        *_, last = getattr(scheduler, "_schedulers", [None])
        length = None if last is None else length_of(last)
        return None if length is None else scheduler._milestones[-1] + length
    if isinstance(scheduler, LambdaLR):
        return max(filter(None, map(_length_of_function, scheduler.lr_lambdas)), default=None)
    return None


def _length_of_function(factor: Callable[[int], Any]) -> int | None:
    told = getattr(factor, "keywords", {}).get("num_training_steps")  # transformers' cosine rises again after it
    if isinstance(told, int):
        return told
    if not _may_be_asked(factor):
        return None
    try:
        return _end_of(lambda step: float(factor(step)))
    except Exception:  # a table that ends, or whatever else a function may say to steps that it never expected
        return None


def _may_be_asked(factor: Callable[[int], Any]) -> bool:
    """Not of a function that changes something, such as a generator that it draws from: its schedule would jump."""
    factor = factor.func if isinstance(factor, functools.partial) else factor
    code = getattr(factor, "__code__", None)
    if code is None:  # an object, which may count its calls
        return False
    writes = {step.opname for step in dis.get_instructions(code)} & _WRITES
    return not writes and _TAKES.isdisjoint(code.co_names)


def _end_of(factor: Callable[[int], float]) -> int | None:
    """The step from which on a schedule is constant, if it has fallen by then."""
    powers = [2**k for k in range(_LONGEST)]
    last = factor(powers[-1])
    constant = list(itertools.takewhile(lambda step: factor(step) == last, reversed(powers)))
    if len(constant) < 3 or len(constant) == len(powers):
        return None
    before, end = constant[-1] // 2, constant[-1]
    while end - before > 1:
        middle = (before + end) // 2
        before, end = (before, middle) if factor(middle) == last else (middle, end)
    peak = max(factor(end * eighth // 8) for eighth in range(8))
    return end if last < _FALLEN * peak and factor(end // 2) > _HALFWAY * peak else None
