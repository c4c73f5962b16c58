"""Registers Mechanic's names once a program has imported transformers or DeepSpeed.

A script may set environment variables before its imports, or never import these packages. So this file imports only the
standard library until then.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import", "install"]

Action = Callable[[ModuleType], object]


def install() -> None:
    """Registers with transformers and DeepSpeed when they are imported, or now if they already are. Idempotent."""
    for name, action in _REGISTRATIONS.items():
        if action not in _actions.get(name, ()):
            after_import(name, action)


def after_import(name: str, action: Action) -> None:
    """Calls `action` with the module once it has been imported, or now if it has been already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _actions.setdefault(name, []).append(action)
    if name in sys.modules:
        action(sys.modules[name])


def _add_names(module: ModuleType) -> None:
    """Adds only the names: transformers.trainer may be half imported."""
    from mechanic_plugins.hf.optim_names import add_names

    add_names(module.OptimizerNames)


_REGISTRATIONS: dict[str, Action] = {
    "transformers.training_args": _add_names,
    "transformers.trainer": lambda module: import_module("mechanic_plugins.transformers"),  # registers itself
    "deepspeed": lambda module: import_module("mechanic_plugins.deepspeed"),
}
_actions: dict[str, list[Action]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Delegates to the usual finders and adds actions to run after the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _actions:
            return None
        others = (
            finder for finder in sys.meta_path if not isinstance(finder, _Finder) and hasattr(finder, "find_spec")
        )
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _act_after(spec.loader, _actions[fullname])
        return spec


def _act_after(loader: importlib.abc.Loader, actions: Sequence[Action]) -> None:
    """Patches the loader in place: inspect, pickle and transformers' lazy imports look at it."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        # transformers replaces itself with a lazy module while it runs
        module = sys.modules.get(module.__name__, module)
        for action in actions:
            action(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
