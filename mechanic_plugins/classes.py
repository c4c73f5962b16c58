"""A class for every base: `MechanicAdamW` around AdamW.

Frameworks, monitors and logs tell optimizers apart by their class, and many build one themselves from a class, after a
look at its signature. The classes are made when they are wanted. Pickles name the base and make its class again.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.optim import Optimizer

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.passes.planner import Backend

__all__ = ["Mechanized", "class_around", "class_with", "wrap"]

Recipe = tuple[Callable[..., type], tuple[Any, ...]]


class _Made(type):
    """The type of classes that no module holds under their name, so that pickle cannot find them there."""

    _recipe: Recipe

    def _reduced(cls) -> Recipe | str:
        return cls._recipe if "_recipe" in vars(cls) else cls.__qualname__  # a user's subclass has a module and a name


copyreg.pickle(_Made, _Made._reduced)  # type: ignore[arg-type]

_known: WeakValueDictionary[type[Optimizer], type[MechanicOptimizer]] = WeakValueDictionary()


def class_around(base: type[Optimizer]) -> type[MechanicOptimizer]:
    """The one class of all mechanized optimizers with this base, built as `MechanicOptimizer` is.

    Raises:
        ValueError: The base is such a class itself.
    """
    if issubclass(base, MechanicOptimizer):
        raise ValueError(f"{base.__name__} is mechanized already: mechanize() it once.")
    if base not in _known:
        _known[base] = _made(base, (MechanicOptimizer,), _recipe=(class_around, (base,)))
    return _known[base]


class Mechanized(MechanicOptimizer):
    """What every `mechanize(AdamW, ...)` is a subclass of: built with the base's own arguments."""

    base_class: ClassVar[type[Optimizer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            self.base_class(*args, **kwargs),
            self.settings,
            group=self.group,
            sync_replicas=self.sync_replicas,
            backend=self.backend,
            max_grad_norm=self.max_grad_norm,
        )


def class_with(
    base: type[Optimizer],
    settings: Settings,
    sync_replicas: bool = False,
    backend: Backend = "auto",
    group: dist.ProcessGroup | None = None,
    max_grad_norm: float | None = None,
) -> type[Mechanized]:
    """A class with the base's constructor whose instances have these settings. A process group has no pickle."""

    @functools.wraps(base.__init__)
    def __init__(self: Mechanized, *args: Any, **kwargs: Any) -> None:  # noqa: N807  a method, made here
        Mechanized.__init__(self, *args, **kwargs)

    made: type[Mechanized] = _made(
        base,
        (Mechanized, class_around(base)),
        _recipe=(class_with, (base, settings, sync_replicas, backend, None, max_grad_norm)),
        __init__=__init__,
        base_class=base,
        settings=settings,
        sync_replicas=sync_replicas,
        backend=backend,
        group=group,
        max_grad_norm=max_grad_norm,
    )
    return made


def wrap(base: Optimizer, settings: Settings, **options: Any) -> MechanicOptimizer:
    """A mechanized optimizer around an instance, of the class that goes with the instance's."""
    return class_around(type(base))(base, settings, **options)


def _made(base: type[Optimizer], parents: tuple[type, ...], **entries: Any) -> Any:
    """In the base's module: transformers looks for "bitsandbytes" in the text of a class."""
    name = f"Mechanic{base.__name__}"
    doc = f"{base.__name__} with the scale of its learning rate learned by Mechanic."
    return _Made(name, parents, {"__module__": base.__module__, "__qualname__": name, "__doc__": doc, **entries})
