"""A class for every base: `MechanicAdamW` around AdamW.

Frameworks, monitors and logs tell optimizers apart by their class, and many build one themselves from a class, after a
look at its signature. The classes are made on demand; pickles name the base and make its class again.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import Options, bound, configured, parameters
from mechanic_plugins.passes.planner import Backend, check_backend

__all__ = ["Mechanized", "class_around", "class_with", "not_built", "wrap"]

Recipe = tuple[Callable[..., type], tuple[Any, ...]]


class OptimizerClass(type):
    """The type of classes that no module holds under their name, so that pickle cannot find them there.

    A class has none of its instances' attributes below, as torch's have not: whoever reads one has mistaken the class
    for an optimizer. Others say "OptimizerClass is not an Optimizer".
    """

    _recipe: Recipe

    @property
    def param_groups(cls) -> NoReturn:
        raise AttributeError(not_built(cls))

    @property
    def state(cls) -> NoReturn:
        raise AttributeError(not_built(cls))

    @property
    def defaults(cls) -> NoReturn:
        raise AttributeError(not_built(cls))

    def _reduced(cls) -> Recipe | str:
        return cls._recipe if "_recipe" in vars(cls) else cls.__qualname__  # a user's subclass has a module and a name


def not_built(cls: type) -> str:
    """A sentence for a class in an optimizer's place."""
    name = cls.__name__
    return f"got the class {name} in the place of an optimizer: build it, as {name}(model.parameters())."


copyreg.pickle(OptimizerClass, OptimizerClass._reduced)  # type: ignore[arg-type]

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
    """What every `mechanize(AdamW, ...)` is a subclass of: built with the base's own arguments, then Mechanic's."""

    base_class: ClassVar[type[Optimizer]]
    options: ClassVar[Options]
    """Those that the constructor takes for granted."""
    constructor: ClassVar[_Constructor]
    settings: Settings
    backend: Backend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs, options = self.constructor.parted(type(self).__name__, args, kwargs)
        wrapping = configured({**self.options, **options})  # before the base is built: nothing is left half done
        super().__init__(self.base_class(*args, **kwargs), **wrapping)


@dataclass(frozen=True)
class _Constructor:
    """The base's own arguments, and Mechanic's options behind them."""

    signature: inspect.Signature
    options: dict[str, str]
    """By the names that they have in the signature."""
    lr: float | None
    """The default for an lr that the base takes, in the place of its own."""

    @classmethod
    def of(cls, base: type[Optimizer], options: Options, lr: float | None) -> _Constructor:
        own = list(_own_parameters(base))
        taken = {p.name for p in own}
        if lr is not None and "lr" in taken:
            own = [p.replace(default=lr) if p.name == "lr" else p for p in own]
        names = {_shown(p.name, taken): p.name for p in parameters()}
        ours = [p.replace(name=_shown(p.name, taken), default=options.get(p.name, p.default)) for p in parameters()]
        end = [p for p in own if p.kind is p.VAR_KEYWORD]
        kept = [p for p in own if p.kind is not p.VAR_KEYWORD]
        return cls(
            inspect.Signature([*kept, *ours, *end], return_annotation=None), names, lr if "lr" in taken else None
        )

    def parted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The base's keywords, and Mechanic's options.

        Raises:
            TypeError: An argument that the signature has not got, or something else in the parameters' place.
        """
        _refuse_other_than_params(name, args[0] if args else kwargs.get("params"))
        given = bound(name, self.signature, args, kwargs)
        options = {option: kwargs[shown] for shown, option in self.options.items() if shown in kwargs}
        theirs = {key: value for key, value in kwargs.items() if key not in self.options}
        if self.lr is not None and "lr" not in given:
            theirs["lr"] = self.lr
        return theirs, options


def _own_parameters(base: type[Optimizer]) -> list[inspect.Parameter]:
    """Of the constructor, with types that can be read outside the base's module, where all of them can be."""
    try:
        hints = typing.get_type_hints(base.__init__)
    except NameError:  # imported for type checkers only
        hints = {}
    own = inspect.signature(base).parameters.values()
    return [p.replace(annotation=hints.get(p.name, p.annotation)) for p in own]


def _shown(option: str, taken: set[str]) -> str:
    return f"mechanic_{option}" if option in taken else option


def _refuse_other_than_params(name: str, params: Any) -> None:
    if isinstance(params, type):
        raise TypeError(f"{name}() takes parameters, got the class {params.__name__}: write model.parameters().")
    if isinstance(params, Optimizer):
        raise TypeError(
            f"{name}() builds its own optimizer and takes parameters, got {type(params).__name__}: "
            "mechanize(optimizer) is for one that is built already."
        )
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"{name}() takes parameters, got the module {type(params).__name__}: write model.parameters().")


def class_with(base: type[Optimizer], options: Options, lr: float | None = None, **entries: Any) -> type[Mechanized]:
    """A class that is built with the base's own arguments, then Mechanic's.

    Args:
        base: Its instances are wrapped.
        options: The defaults for Mechanic's. A process group among them is not pickled with the class.
        lr: The default in the place of the base's.
        entries: `__module__` and `__qualname__`, where a module holds the class.
    """
    parent, constructor, wrapping = class_around(base), _Constructor.of(base, options, lr), configured(options)
    check_backend(wrapping.get("backend", "auto"))
    portable = {name: value for name, value in options.items() if name != "group"}
    made: type[Mechanized] = _made(
        base,
        (Mechanized, parent),
        __init__=_shows(constructor.signature, base),
        base_class=base,
        options=options,
        constructor=constructor,
        **{"settings": wrapping["settings"], **(entries or {"_recipe": (class_with, (base, portable, lr))})},
    )
    return made


def _shows(signature: inspect.Signature, base: type[Optimizer]) -> Callable[..., None]:
    """A constructor with this signature, for those who look before they call."""

    @functools.wraps(base.__init__)
    def __init__(self: Mechanized, *args: Any, **kwargs: Any) -> None:  # noqa: N807  a method, made here
        Mechanized.__init__(self, *args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    __init__.__annotations__ = {
        p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty
    } | {"return": None}
    del __init__.__wrapped__  # readers of source code would follow it to the base's
    return __init__


def wrap(base: Optimizer, settings: Settings, **options: Any) -> MechanicOptimizer:
    """A mechanized optimizer around an instance, of the class that goes with the instance's."""
    return class_around(type(base))(base, settings, **options)


def _made(base: type[Optimizer], parents: tuple[type, ...], **entries: Any) -> Any:
    """In the base's module: transformers looks for "bitsandbytes" in the text of a class."""
    name = f"Mechanic{base.__name__}"
    doc = f"{base.__name__} with the scale of its learning rate learned by Mechanic."
    own = {"__module__": base.__module__, "__qualname__": name, "__doc__": doc, **entries}
    return OptimizerClass(own["__qualname__"], parents, own)
