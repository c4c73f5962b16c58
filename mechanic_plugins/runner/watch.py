"""Sees every optimizer that a process builds, and its steps."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from mechanic_plugins.runner.console import NOTHING, is_first_rank, say, stop
from mechanic_plugins.runner.plan import Events, Plan

__all__ = ["MISSED", "Watch", "is_mechanic"]

MISSED = "_mechanic_missed"
"""Attribute of an optimizer that should have been replaced and could not be."""


def is_mechanic(kind: type) -> bool:
    """Whether this is a mechanized class. Checked by name, so that other processes need not import ours."""
    return any(c.__name__ == "MechanicOptimizer" and c.__module__.startswith("mechanic_plugins.") for c in kind.__mro__)


class Watch:
    """The optimizers of one process."""

    def __init__(self, plan: Plan, events: Events) -> None:
        self._plan, self._events = plan, events
        self._seen: WeakSet[Any] = WeakSet()
        self._idle: list[Any] = []
        """The first few mechanized optimizers that have made no step yet. Kept alive until the end."""
        self._stepped_by: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Those whose step was called, with the id of the `step` set on the instance, if any, during the last call."""
        self._trained: WeakSet[Any] = WeakSet()
        """Those that had a gradient in a step."""
        self.was_cut_short = False
        """Whether the program is known to have failed; an exception that nothing caught is found without it."""
        self._recorder: Any = None
        self._has_mechanic = False
        self._plain_steps = 0

    def install(self, module: ModuleType) -> None:
        """Hooks `_patch_step_function`, which every optimizer calls when built or unpickled."""
        original = module.Optimizer._patch_step_function

        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> None:
            original(optimizer)
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                self._built(optimizer)

        module.Optimizer._patch_step_function = _patch_step_function
        self._events.note("torch")
        self._see_gradients(sys.modules["torch.autograd"])

    def _see_gradients(self, autograd: Any) -> None:
        """Notes the first backward pass, since a program may train without any optimizer."""
        original = autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if autograd.backward is backward:
                autograd.backward = original
            self._events.note("gradients")
            return original(*args, **kwargs)

        autograd.backward = backward

    def follow_children(self, util: ModuleType) -> None:
        """Has processes that multiprocessing starts report too: those made by fork run no exit handlers."""

        def begin(watch: Watch) -> None:
            watch._idle, watch._recorder = [], None  # a forked child has its parent's
            watch._stepped_by.clear()
            if "mechanic_plugins.runner.probe" in sys.modules:
                sys.modules["mechanic_plugins.runner.probe"].forget_reports()
            util.Finalize(None, watch.finish, exitpriority=0)

        util.register_after_fork(self, begin)
        if "--multiprocessing-fork" in sys.orig_argv:  # spawned: multiprocessing calls that hook for forks only
            util.Finalize(None, self.finish, exitpriority=0)  # while the error that ends the process is still known

    def _built(self, optimizer: Any) -> None:
        kind = type(optimizer)
        if is_mechanic(kind):
            self._has_mechanic = True
            if len(self._idle) < 4:
                self._idle.append(optimizer)
            self._events.note("mechanic")
            optimizer.register_step_post_hook(self._stepped)
        else:
            self._events.note("built", kind.__name__)
            if self._plan.replace:
                optimizer.register_step_post_hook(self._stepped_plain)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._trained and _has_grad(optimizer):
            self._trained.add(optimizer)
            self._events.note("stepped")
        self._stepped_by[optimizer] = id(vars(optimizer).get("step"))
        if self._idle:
            self._idle = [each for each in self._idle if each is not optimizer]
        if self._plan.probe or self._plan.replace:
            if self._recorder is None:
                from mechanic_plugins.runner.probe import Recorder

                self._recorder = Recorder(self._plan.probe, self._events)
            self._recorder.record(optimizer)

    def _stepped_plain(self, optimizer: Any, *_: Any) -> None:
        """Warns early, rather than at the end of a long run, and ends a probe that measures nothing."""
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if MISSED in vars(optimizer):
            self._events.note("missed", name)
        is_new = self._events.note("plain", name)
        if self._has_mechanic:
            return
        self._plain_steps += 1
        if self._plan.probe and self._plain_steps >= self._plan.probe:
            stop(f"{self._plain_steps} steps were made by {name}, without Mechanic: add --replace {name}", NOTHING)
        if is_new and is_first_rank() and not self._plan.is_default:
            names = " or ".join(each.old for each in self._plan.replace)
            say(f"warning: {name} makes steps without Mechanic, and no {names} was built so far.")

    def finish(self) -> None:
        """Called when the program has ended."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # the one that ends a process of multiprocessing
        is_whole = not self.was_cut_short and (error is None or (isinstance(error, SystemExit) and not error.code))
        for optimizer in [*self._idle, *self._stepped_by]:
            self._check_step(optimizer)
        if self._recorder is not None:
            self._recorder.finish(is_whole=is_whole)
        self._recorder, self._idle = None, []
        self._stepped_by.clear()

    def _check_step(self, optimizer: Any) -> None:
        """Notes a `step` that the program set on the instance and that does not call ours, or that had no effect."""
        step, name = vars(optimizer).get("step"), type(optimizer.base).__name__
        if step is not None and id(step) != self._stepped_by.get(optimizer):
            new = f"{getattr(step, '__module__', '?')}.{getattr(step, '__qualname__', step)}"
            after = f" after step {int(optimizer.tuner.steps)}" if optimizer in self._stepped_by else ""
            self._events.note("idle", f"{name}{after} (the program replaced its step() by {new})")
        elif optimizer in self._stepped_by:
            if optimizer not in self._trained:  # engines may have taken the gradients away again
                self._events.note("stepped" if int(optimizer.tuner.steps) else "bare", name)
        elif _has_grad(optimizer):
            self._events.note("unused", f"{name} (gradients were computed, but its step() was never called)")


def _has_grad(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
