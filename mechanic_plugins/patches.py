"""Changing a framework's function in memory, where it offers no other way in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["patch"]


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Lets `owner.name(...)` call `replacement(original, ...)`. Only the first call for a name does anything."""
    original = getattr(owner, name)
    if hasattr(original, "_mechanic"):
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    patched._mechanic = True  # type: ignore[attr-defined]
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(patched) if is_static else patched)
