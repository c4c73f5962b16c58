"""For programs that tests start: frameworks import much because it is there, which takes longer than to train."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType


def hide(*packages: str) -> None:
    """As if they were not installed. Before the frameworks are imported."""
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    version = importlib.metadata.version

    def version_of_others(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = version_of_others


def leave_compiler_out() -> None:
    """An optimizer's first step imports torch's compiler, only to say that it leaves the step alone. Before torch."""
    compiler = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    compiler.graph_break = lambda: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = compiler
