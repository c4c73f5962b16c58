"""Applies a plan to this process and to the processes it starts."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mechanic_plugins import hook
from mechanic_plugins.patches import patch
from mechanic_plugins.runner.plan import VARIABLE, Events, Plan
from mechanic_plugins.runner.replace import wait_for
from mechanic_plugins.runner.watch import Watch

__all__ = ["activate", "told_to_children"]

_SITE = str(Path(__file__).parent / "site")


def activate(plan: Plan) -> Watch:
    """Acts when the program imports torch or a framework. Nothing heavy is loaded before that."""
    events = Events(plan.events)
    watch = Watch(plan, events)
    hook.install()
    hook.after_import("torch.optim.optimizer", watch.install)
    for each in plan.replace:
        wait_for(each, plan, events)
    hook.after_import("multiprocessing.util", watch.follow_children)
    if plan.replace:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            # the package is complete by then
            hook.after_import(package, _log_in_lightning)
    atexit.register(watch.finish)
    return watch


def _log_in_lightning(package: ModuleType) -> None:
    """Adds a callback through the function that every Trainer asks for other packages' callbacks."""
    connector = import_module(f"{package.__name__}.trainer.connectors.callback_connector")
    patch(connector, "_load_external_callbacks", _with_ours)


def _with_ours(original: Callable[[str], list[Any]], group: str) -> list[Any]:
    from mechanic_plugins.lightning import LogLearnedLr

    return [*original(group), LogLearnedLr()]


@contextlib.contextmanager
def told_to_children(plan: Plan) -> Iterator[tuple[Plan, Events]]:
    """A context in which child Python processes get the plan. Cleans up the environment and the file afterwards."""
    events = Events.new()
    plan = replace(plan, events=events.path)
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ[VARIABLE] = plan.to_text()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, before["PYTHONPATH"])))
    try:
        yield plan, events
    finally:
        events.remove()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
