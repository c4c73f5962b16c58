"""Sees every optimizer that a process builds, and its steps where a plan asks for that."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any
from weakref import WeakSet

from mechanic_plugins.runner.console import NOTHING, is_first_rank, say, stop
from mechanic_plugins.runner.events import Events
from mechanic_plugins.runner.plan import Plan

__all__ = ["Watch", "is_mechanic"]


def is_mechanic(kind: type) -> bool:
    """By name: a process that builds none need not import ours."""
    return any(c.__name__ == "MechanicOptimizer" and c.__module__.startswith("mechanic_plugins.") for c in kind.__mro__)


class Watch:
    """What one process builds."""

    def __init__(self, plan: Plan, events: Events) -> None:
        self._plan = plan
        self._events = events
        self._seen: WeakSet[Any] = WeakSet()
        self._recorder: Any = None
        self._has_mechanic = False
        self._plain_steps = 0

    def install(self, module: ModuleType) -> None:
        """`_patch_step_function` is what torch's optimizers and ours call when they are built or unpickled."""
        original = module.Optimizer._patch_step_function

        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> None:
            original(optimizer)
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                self._built(optimizer)

        module.Optimizer._patch_step_function = _patch_step_function

    def _built(self, optimizer: Any) -> None:
        kind = type(optimizer)
        if is_mechanic(kind):
            self._has_mechanic = True
            self._events.note("mechanic")
            if self._plan.probe or self._plan.replace:
                optimizer.register_step_post_hook(self._record)
        else:
            self._events.note("built", kind.__name__)
            if self._plan.replace:
                optimizer.register_step_post_hook(self._stepped_plain)

    def _record(self, optimizer: Any, *_: Any) -> None:
        if self._recorder is None:
            from mechanic_plugins.runner.probe import Recorder

            self._recorder = Recorder(self._plan.probe, self._events)
        self._recorder.record(optimizer)

    def _stepped_plain(self, optimizer: Any, *_: Any) -> None:
        """Says early what would otherwise be known at the end of a long run, and ends a probe that measures nothing."""
        if self._has_mechanic:
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._plain_steps += 1
        if self._plan.probe and self._plain_steps >= self._plan.probe:
            stop(f"{self._plain_steps} steps were made by {name}, without Mechanic: add --replace {name}", NOTHING)
        if self._events.note("plain", name) and is_first_rank() and not self._plan.is_default:
            names = " or ".join(each.old for each in self._plan.replace)
            say(f"warning: {name} makes steps without Mechanic, and no {names} was built so far.")

    def finish(self) -> None:
        """What there is to say when the program has ended."""
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder = None
