"""Records the steps of mechanized optimizers and reports what they learned; with `--probe 200` it then stops."""

from __future__ import annotations

import sys
import time
from multiprocessing import parent_process
from weakref import WeakKeyDictionary, ref

import torch

from mechanic_plugins.api import plain_lrs
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.optimizer.step import is_called_by
from mechanic_plugins.runner.console import STOPPED, is_first_rank, say
from mechanic_plugins.runner.plan import Events
from mechanic_plugins.summary import (
    NOTHING_LEARNED,
    STILL_RISING,
    ScaleHistory,
    is_still_rising,
    learned,
    remarks,
    report,
)

__all__ = ["Recorder", "forget_reports"]


_SETTINGS = {
    "transformers.trainer": "or for the Trainer: --learning_rate {}",
    "deepspeed.runtime.engine": 'or, if the DeepSpeed config builds it: "optimizer": {{"params": {{"lr": {}}}}}',
}
"""Where else a plain optimizer's lr may be set, by the module that calls `step`."""


_LOGGERS = {"transformers.trainer", "lightning.pytorch", "pytorch_lightning"}
"""Our plugins log the learning rate in force there. Other programs log the lr of the param groups."""
_RESCALED = (
    'rule="{}" also rescales the updates that were made before, which no plain optimizer does: at this rate it trains '
    "another run. Compare it with a few others, or probe by the default rule."
)
_ANNOUNCED = tuple(10**k for k in range(1, 9))
_probes: set[int] = set()
"""Those recorded in this process. A runner started by a runner records twice, and reports once."""


def forget_reports() -> None:
    """For a forked child, whose parent's reports are not its own."""
    _probes.clear()


class _Run:
    """One optimizer's run. May outlive the optimizer, and does not keep it alive."""

    def __init__(self, optimizer: MechanicOptimizer, probe: int) -> None:
        self.base, self.rule, self.optimizer = type(optimizer.base), optimizer.settings.rule, ref(optimizer)
        self.setting = next((text for module, text in _SETTINGS.items() if is_called_by(module)), None)
        self.history = ScaleHistory(limit=2 * probe or 512)
        self.learned = optimizer.learned
        self.peaks: list[float] = []
        self.before = max(int(optimizer.tuner.steps) - 1, 0)  # without gradients, the first call made no step
        self.steps = self.calls = 0

    def record(self, optimizer: MechanicOptimizer) -> None:
        """Records a step without waiting for the device."""
        self.history.record(optimizer)
        self.learned = optimizer.learned

    def said(self, *, is_whole: bool) -> list[str]:
        """The report at the end. A run that was cut short is not told to train for longer."""
        optimizer, name = self.optimizer(), self.base.__name__
        if optimizer is not None:
            found = remarks(optimizer, self.history)
            return [f"{name}: {report(optimizer)}", *(one for one in found if is_whole or one != STILL_RISING)]
        lr = float(self.learned.max())
        rising = [STILL_RISING] if is_whole and is_still_rising(self.history) else []
        return [f"{name}: {learned(lr, self.rule) if lr else NOTHING_LEARNED}", *rising]


class Recorder:
    """Called after every step of every mechanized optimizer.

    Args:
        probe: Number of steps after which to stop; 0 for never.
        events: Notes that something was probed.
    """

    def __init__(self, probe: int, events: Events) -> None:
        self._probe, self._events = probe, events
        self._runs: list[_Run] = []
        self._run_of: WeakKeyDictionary[MechanicOptimizer, _Run] = WeakKeyDictionary()
        self._has_reported = False
        self._speaks = probe not in _probes and is_first_rank()
        _probes.add(probe)

    def record(self, optimizer: MechanicOptimizer) -> None:
        """Exits the program when a probe is complete, on every rank in the same step."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        run = self._run_of.get(optimizer)
        if run is None:
            run = self._run_of[optimizer] = _Run(optimizer, self._probe)
            self._runs.append(run)
        run.record(optimizer)
        run.calls += 1
        if run.calls in _ANNOUNCED and not self._probe and self._speaks and not _LOGGERS & sys.modules.keys():
            say(f"{run.base.__name__}: learning rate in force at step {run.calls}: {max(optimizer.effective_lrs):.3g}")
        if self._probe:
            run.peaks = optimizer.top_lrs
            run.steps = int(optimizer.tuner.steps) - run.before  # not the calls: DeepSpeed steps in parts
            if self._is_complete():
                self._report_probe()
                sys.exit(self._status())

    def _is_complete(self) -> bool:
        """Whether all optimizers made their steps, or one made twice as many while the others rest."""
        steps = [run.steps for run in self._runs]
        return min(steps) >= self._probe or max(steps) >= 2 * self._probe

    def _status(self) -> int:
        """The exit status: 0, except under multiprocessing, where a parent would wait for its result forever.

        The first process to fail ends the others, so each waits until rank 0 has reported.
        """
        if parent_process() is None:
            return 0
        deadline = time.monotonic() + 60
        while not self._events.of("reported") and time.monotonic() < deadline:
            time.sleep(0.05)
        return STOPPED

    def finish(self, *, is_whole: bool) -> None:
        """Called when the program has ended by itself; `is_whole` unless an error cut it short."""
        if self._probe:
            self._report_probe()
        elif self._speaks and "transformers.trainer" not in sys.modules:  # its callback reports it
            for run in self._runs:
                for line in run.said(is_whole=is_whole):
                    say(line)

    def _report_probe(self) -> None:
        runs = [run for run in self._runs if run.steps]
        if self._has_reported or not runs:
            return
        self._has_reported = True
        self._events.note("probed")
        if self._speaks:
            for run in runs:
                sys.stdout.write("\n".join(_lines(run, self._probe)) + "\n")
            sys.stdout.flush()
        if is_first_rank():
            self._events.note("reported")


def _lines(run: _Run, probe: int) -> list[str]:
    steps = f"{run.steps} steps" if run.steps >= probe else f"{run.steps} of {probe} steps, then the program ended"
    title, lr = f"Mechanic around {run.base.__name__}, {steps}", float(run.learned.max())
    if not lr:
        return [f"{title}: no learning rate was learned. Probe for more steps."]
    first = f'{title}: learned lr {lr:.3g} (rule="{run.rule}")'
    lines = [first, "Set it in the plain optimizer:", f"  {_code(run, lr)}"]
    if run.setting:
        lines.append(run.setting.format(f"{lr:.3g}"))
    if is_still_rising(run.history):
        lines.append("It was still rising: probe for more steps before you rely on it.")
    if run.rule != "relative":
        lines.append(_RESCALED.format(run.rule))
    return lines


def _code(run: _Run, lr: float) -> str:
    lrs = [f"{each:.3g}" for each in plain_lrs(run.learned.tolist(), run.peaks)]
    if len(set(lrs)) == 1:
        module = "torch.optim" if run.base.__module__.startswith("torch.optim.") else run.base.__module__
        return f"{module}.{run.base.__qualname__}(model.parameters(), lr={lr:.3g})  # your other arguments"
    return f'for group, lr in zip(optimizer.param_groups, [{", ".join(lrs)}]): group["lr"] = lr'
