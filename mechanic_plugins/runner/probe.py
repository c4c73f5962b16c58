"""`--probe 200`: records so many steps, says which learning rate was learned, and stops the program.

Without a probe it only records, and says at the end what was learned.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from multiprocessing import parent_process
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.runner.console import STOPPED, is_first_rank, say
from mechanic_plugins.runner.events import Events
from mechanic_plugins.summary import ScaleHistory, described, group_names, is_still_rising

__all__ = ["Recorder", "Spread", "spreads"]


_SETTINGS = {
    "transformers.trainer": "or for the Trainer: --learning_rate {}",
    "deepspeed.runtime.engine": 'or, if the DeepSpeed config builds it: "optimizer": {{"params": {{"lr": {}}}}}',
}
"""Where else the lr of a plain optimizer may be set, by the module that calls `step`."""


class Spread(NamedTuple):
    """A group's learned lr over the last quarter of the steps."""

    name: str
    middle: float
    low: float
    high: float


class _Run:
    """What is known of one optimizer, which may be gone when it is asked for."""

    def __init__(self, optimizer: MechanicOptimizer, probe: int) -> None:
        self.base = type(optimizer.base)
        self.setting = next((text for module, text in _SETTINGS.items() if _is_called_by(module)), None)
        self.history = ScaleHistory(limit=2 * probe or 512)
        self.names: list[str] = []
        self.steps = 0
        self._before: int | None = None

    def record(self, optimizer: MechanicOptimizer) -> None:
        self.history.record(optimizer)
        self.names = group_names(optimizer)

    def count(self, optimizer: MechanicOptimizer) -> None:
        """The tuner's steps, not calls: DeepSpeed's engines step part by part. Synchronises with the device."""
        steps = int(optimizer.tuner.steps)
        if self._before is None:
            self._before = steps - 1
        self.steps = steps - self._before


class Recorder:
    """Called after every step of every mechanized optimizer.

    Args:
        probe: After how many steps to stop; 0 for never.
        events: To note that something was probed.
    """

    def __init__(self, probe: int, events: Events) -> None:
        self._probe = probe
        self._events = events
        self._runs: list[_Run] = []
        self._run_of: WeakKeyDictionary[MechanicOptimizer, _Run] = WeakKeyDictionary()
        self._was_told = False

    def record(self, optimizer: MechanicOptimizer) -> None:
        """Exits the program when a probe is complete: every rank does in the same step."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        run = self._run_of.get(optimizer)
        if run is None:
            run = self._run_of[optimizer] = _Run(optimizer, self._probe)
            self._runs.append(run)
        run.record(optimizer)
        if self._probe:
            run.count(optimizer)
            if self._is_complete():
                self._tell_probe()
                sys.exit(self._status())

    def _status(self) -> int:
        """0, but for a process that multiprocessing started: whoever waits for its result would wait for ever.

        The first that fails takes the others with it, so they let rank 0 speak. The runner knows what it means.
        """
        if parent_process() is None:
            return 0
        deadline = time.monotonic() + 60
        while not self._events.of("reported") and time.monotonic() < deadline:
            time.sleep(0.05)
        return STOPPED

    def _is_complete(self) -> bool:
        """All optimizers made their steps, as a GAN's two do, or one made twice as many and the others rest."""
        steps = [run.steps for run in self._runs]
        return min(steps) >= self._probe or max(steps) >= 2 * self._probe

    def finish(self) -> None:
        """The program has ended by itself."""
        if self._probe:
            self._tell_probe()
        elif is_first_rank() and "transformers.trainer" not in sys.modules:  # whose callback has said it
            for run in self._runs:
                say(f"{run.base.__name__}: {described(run.history.peaks(), run.names)}")

    def _tell_probe(self) -> None:
        if self._was_told:
            return
        self._was_told = True
        self._events.note("probed")
        if is_first_rank():
            for run in self._runs:
                sys.stdout.write("\n".join(_lines(run, self._probe)) + "\n")
            sys.stdout.flush()
            self._events.note("reported")


def _is_called_by(module: str) -> bool:
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


# -------------------------------------------------------------------- the report


def spreads(history: ScaleHistory, names: list[str]) -> list[Spread]:
    """For each group the learned lr: the scale times the highest lr that the schedule has reached.

    While a schedule warms up that is the lr in force, which Mechanic keeps independent of the warm-up; when it falls,
    it is what the peak would be now.
    """
    steps = history.pairs()
    found = []
    for group, name in enumerate(names):
        rows = [step[group] for step in steps if group < len(step)]
        highest, learned = 0.0, []
        for scale, lr in rows:
            highest = max(highest, lr)
            learned.append(scale * highest)
        last = learned[-max(1, len(learned) // 4) :]
        found.append(Spread(name, statistics.median(last), min(last), max(last)))
    return found


def _lines(run: _Run, probe: int) -> list[str]:
    groups = spreads(run.history, run.names)
    steps = f"{run.steps} steps" if run.steps >= probe else f"{run.steps} of {probe} steps, then the program ended"
    title = f"Mechanic around {run.base.__name__}, {steps}"
    if not any(group.middle for group in groups):
        return [f"{title}: no learning rate was learned. Probe for more steps."]
    if len({group[1:] for group in groups}) == 1:
        groups = [groups[0]._replace(name="all groups" if len(groups) > 1 else "")]
    quarter = max(1, len(run.history) // 4)
    lines = [f"{title}. Learned lr, and its range over the last {quarter} steps:"]
    peaks = map(math.prod, run.history.peaks())
    written = [_as_written(group, peak) for group, peak in zip(groups, peaks, strict=False)]
    lines += [f"  {group.name + ': ' if group.name else ''}{text}" for group, text in zip(groups, written, strict=True)]
    lines += ["Set it in the plain optimizer:", f"  {_code(run.base, groups)}"]
    if run.setting:
        first = next(group for group in groups if group.middle)
        of = "" if len(groups) == 1 else f" (of group {first.name})"
        lines += [f"{run.setting.format(f'{first.middle:.3g}')}{of}"]
    if is_still_rising(run.history):
        lines.append("It was still rising: probe for more steps before you rely on it.")
    return lines


def _as_written(group: Spread, peak: float) -> str:
    """With the highest lr that was in force, where the last quarter was far below it."""
    if not group.middle:
        return "nothing, as it has no weights or none that are trained; below it has the smallest of the others"
    earlier = f", earlier up to {peak:.3g}" if peak > 2 * group.middle else ""
    return f"{group.middle:.3g} ({group.low:.3g} to {group.high:.3g}){earlier}"


def _code(base: type, groups: list[Spread]) -> str:
    if len(groups) == 1:
        module = "torch.optim" if base.__module__.startswith("torch.optim.") else base.__module__
        return f"{module}.{base.__qualname__}(model.parameters(), lr={groups[0].middle:.3g})  # your other arguments"
    smallest = min(group.middle for group in groups if group.middle)
    lrs = ", ".join(f"{group.middle or smallest:.3g}" for group in groups)
    return f'for group, lr in zip(optimizer.param_groups, [{lrs}]): group["lr"] = lr'
