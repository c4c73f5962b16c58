"""Answers to a callback that was built or passed on wrongly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from mechanic_plugins.options import bound

__all__ = ["OfInstances", "answering"]

Init = TypeVar("Init", bound=Callable[..., None])


def answering(init: Init) -> Init:
    """The constructor, with errors that say what to write for arguments it does not take."""
    signature = inspect.signature(init)
    options = signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.wraps(init)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: N807  a method, made here
        name = type(self).__name__
        if args:
            given = args[0].__name__ if isinstance(args[0], type) else type(args[0]).__name__
            raise TypeError(
                f"{name}() takes options by their names, got {given}: it mechanizes whatever configure_optimizers "
                f"returns. Write Trainer(callbacks=[{name}()])."
            )
        bound(name, options, args, kwargs)
        init(self, *args, **kwargs)

    return __init__  # type: ignore[return-value]  # the same arguments


class OfInstances(property):
    """A property that only instances have. Lightning asks each of its callbacks for one before it calls it."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None and owner is not None:
            name = owner.__name__
            raise AttributeError(f"got the class {name} in the place of a callback: build it, as callbacks=[{name}()].")
        return super().__get__(instance, owner)
