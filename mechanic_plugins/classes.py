"""Optimizer classes: `MechanicAdamW` around AdamW.

Frameworks and logs tell optimizers apart by their class, and many programs build one from a class after reading its
signature. So there is a class for every base, made on demand, and its constructor shows the base's own arguments.
"""

from __future__ import annotations

import copyreg
import inspect
import typing
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import DEFAULTS, Options, configured, hint, parameters
from mechanic_plugins.rule.settings import Settings

__all__ = ["Mechanized", "class_with", "not_built", "wrap"]


class OptimizerClass(type):
    """The metaclass of classes made here. No module holds them, so pickles store how to recreate them."""


def _reduced(cls: type) -> Any:
    return vars(cls).get("_recipe", cls.__qualname__)  # a user's subclass has a module and a name


copyreg.pickle(OptimizerClass, _reduced)
_around: WeakValueDictionary[type[Optimizer], type[MechanicOptimizer]] = WeakValueDictionary()


def wrap(base: Optimizer, settings: Settings, **options: Any) -> MechanicOptimizer:
    """Mechanizes an instance; all instances of one base class share a class."""
    return _class_around(type(base))(base, settings, **options)


def _class_around(base: type[Optimizer]) -> type[MechanicOptimizer]:
    if base not in _around:
        _around[base] = _made(base, MechanicOptimizer, _recipe=(_class_around, (base,)))
    return _around[base]


class Mechanized(MechanicOptimizer):
    """Parent of the classes that `mechanize(AdamW)` returns, built with AdamW's arguments and Mechanic's options.

    If the base has an argument of the same name, the option is called `mechanic_<name>`.
    """

    base_class: ClassVar[type[Optimizer]]
    options: ClassVar[Options]
    """Defaults of the constructor's options."""
    signature: ClassVar[inspect.Signature]

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        name, signature = type(self).__name__, self.signature
        _check_params(name, params)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for key in kwargs:
            if key not in signature.parameters and not takes_any:
                raise TypeError(f"{name}() has no argument {key!r}{hint(key, signature.parameters)}")
        if "lr" in signature.parameters and "lr" not in signature.bind(params, *args, **kwargs).arguments:
            kwargs["lr"] = signature.parameters["lr"].default
        shown = {_shown(option, self.base_class): option for option in DEFAULTS}
        options = {option: kwargs.pop(key) for key, option in shown.items() if key in kwargs}
        wrapping = configured({**self.options, **options})  # first, so that an error leaves nothing behind
        super().__init__(self.base_class(params, *args, **kwargs), **wrapping)


def class_with(base: type[Optimizer], options: Options, lr: float | None = None, **entries: Any) -> type[Mechanized]:
    """A class that takes the base's arguments, then Mechanic's options.

    Args:
        base: The class whose instances are wrapped.
        options: Defaults for Mechanic's options. A process group is not pickled with the class.
        lr: Default in place of the base's.
        entries: `__module__` and `__qualname__` of a class that a module holds.

    Raises:
        ValueError: The base is mechanized already, or an option is out of range.
    """
    configured(options)
    portable = {name: value for name, value in options.items() if name != "group"}
    recipe = {} if entries else {"_recipe": (class_with, (base, portable, lr))}
    made = _made(base, Mechanized, base_class=base, options=options, **recipe, **entries)
    made.signature = _signature(base, options, lr)
    made.__init__ = _constructor(made.signature)
    return made  # type: ignore[no-any-return]


def _signature(base: type[Optimizer], options: Options, lr: float | None) -> inspect.Signature:
    """The base's parameters, with another default for lr, followed by the options."""
    try:
        hints = typing.get_type_hints(base.__init__)
    except NameError:  # names imported for type checkers only
        hints = {}
    own = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in inspect.signature(base).parameters.values()]
    if lr is not None:
        own = [p.replace(default=lr) if p.name == "lr" else p for p in own]
    defaults = {**DEFAULTS, **options}
    ours = [p.replace(name=_shown(p.name, base), default=defaults[p.name]) for p in parameters()]
    end = [p for p in own if p.kind is p.VAR_KEYWORD]
    return inspect.Signature([*(p for p in own if p.kind is not p.VAR_KEYWORD), *ours, *end], return_annotation=None)


def _constructor(signature: inspect.Signature) -> Any:
    """`Mechanized.__init__` with this signature, for programs that pass only arguments found in a signature."""

    def __init__(self: Mechanized, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        Mechanized.__init__(self, *args, **kwargs)

    own: Any = __init__
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    hints = {p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty}
    own.__annotations__ = {**hints, "return": None}
    return own


def _shown(option: str, base: type[Optimizer]) -> str:
    return f"mechanic_{option}" if option in inspect.signature(base).parameters else option


def _check_params(name: str, params: Any) -> None:
    if isinstance(params, Optimizer):
        raise TypeError(f"{name}() takes parameters, got {type(params).__name__}: use mechanize(optimizer) instead.")
    if isinstance(params, (type, torch.nn.Module)):
        given = params if isinstance(params, type) else type(params)
        raise TypeError(f"{name}() takes parameters, got {given.__name__}: write model.parameters().")


def not_built(cls: type) -> str:
    """The error message for a class given in place of an optimizer."""
    name = cls.__name__
    return f"got the class {name} instead of an optimizer: build it, as {name}(model.parameters())."


def _made(base: type[Optimizer], parent: type, **entries: Any) -> Any:
    """Makes a class in the base's module: transformers looks for "bitsandbytes" in a class's repr."""
    if issubclass(base, MechanicOptimizer):
        raise ValueError(f"{base.__name__} is mechanized already: mechanize() it once.")
    name = f"Mechanic{base.__name__}"
    doc = f"{base.__name__} with the scale of its learning rate learned by Mechanic."
    own = {"__module__": base.__module__, "__qualname__": name, "__doc__": doc, **entries}
    return OptimizerClass(own["__qualname__"], (parent,), own)
