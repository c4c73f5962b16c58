"""For programs started by tests: frameworks import whatever is installed, which takes longer than the training."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType


def hide(*packages: str) -> None:
    """Makes packages look as if not installed. Call it before importing the frameworks."""
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    version = importlib.metadata.version

    def version_of_others(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = version_of_others


def leave_compiler_out() -> None:
    """Stubs torch's compiler, which an optimizer's first step imports for nothing. Call it before importing torch."""
    compiler = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    compiler.graph_break = lambda: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = compiler
