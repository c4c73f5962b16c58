"""Registers Mechanic's names at the moment when a program imports transformers or DeepSpeed, and not before.

A script may set environment variables before its imports, or never import these at all: both must go as if this
package were not there. So this file imports nothing but the standard library until then.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]


def install() -> None:
    """Waits for the imports, or registers now what was imported already. Twice is harmless."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name, action in _AFTER.items():
        if name in sys.modules:
            action(sys.modules[name])


def _add_names(module: ModuleType) -> None:
    """No more than the names: transformers.trainer may be half imported."""
    from mechanic_plugins.hf.optim_names import add_names

    add_names(module.OptimizerNames)


def _register(module: ModuleType) -> None:
    import mechanic_plugins.transformers  # noqa: F401  registers itself


def _register_with_deepspeed(module: ModuleType) -> None:
    import mechanic_plugins.deepspeed  # noqa: F401  registers itself


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "transformers.training_args": _add_names,
    "transformers.trainer": _register,
    "deepspeed": _register_with_deepspeed,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find a module, and adds something to do when it was executed."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AFTER or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, _AFTER[fullname])
        return spec


class _ThenAct(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # what looks at the module later (inspect, pickling, transformers' own lazy imports) finds the usual loader
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
