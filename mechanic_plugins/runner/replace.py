"""`--replace torch.optim.AdamW`: calling that class returns a mechanized optimizer.

The class stays where it is, however the program imports it; only its `__new__` is replaced. It returns an instance of a
class made here: a subclass of `MechanicOptimizer` and of the class that was called, under the latter's name, so that
`isinstance` and `type(optimizer).__name__` are what the program expects.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import FrameType, ModuleType
from typing import Any

from mechanic_plugins.hook import after_import
from mechanic_plugins.runner.console import is_first_rank, say, stop
from mechanic_plugins.runner.plan import Events, Plan, Replacement
from mechanic_plugins.runner.watch import MISSED, is_mechanic

__all__ = ["wait_for"]


def wait_for(replacement: Replacement, plan: Plan, events: Events) -> None:
    """Replaces the class when its module has been imported."""

    def act(module: ModuleType) -> None:
        old = _looked_up(replacement.old, module, plan)
        if old is not None:
            _Replaced(old, replacement, plan, events).install()

    after_import(replacement.old.rpartition(".")[0], act)


def _looked_up(name: str, module: ModuleType, plan: Plan) -> Any:
    """The class to replace, or None for a default that this torch lacks."""
    last = name.rpartition(".")[2]
    found = getattr(module, last, None)
    if found is None and plan.is_default:
        return None
    if found is None:
        from mechanic_plugins.options import hint

        classes = [each for each in dir(module) if each[0].isupper()]
        stop(f"--replace {name}: {module.__name__} has no {last}{hint(last, classes)}")
    if not isinstance(found, type) or not any(c.__module__ == "torch.optim.optimizer" for c in found.__mro__):
        stop(f"--replace {name} must be a subclass of torch.optim.Optimizer, got {found!r}.")
    if is_mechanic(found) or found.__module__ == "torch.optim.optimizer":
        stop(f"--replace {name}: name the plain class that the program builds, such as torch.optim.AdamW.")
    return found


class _Replaced:
    """A class whose calls return mechanized optimizers."""

    def __init__(self, old: Any, replacement: Replacement, plan: Plan, events: Events) -> None:
        self.old = old
        self._name = replacement.old
        self._base = replacement.new or _default_base(old)
        self._plan = plan
        self._events = events
        self._plain_new = old.__new__

    def install(self) -> None:
        @functools.wraps(self.old.__init__)
        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  a method, made here
            caller = sys._getframe(1)
            is_meant = self._is_meant(cls) and not _is_ours(caller)
            if is_meant and (args or kwargs):
                return self._mechanized(cls, caller, args, kwargs)
            plain = self._plain(cls, args, kwargs)
            if is_meant and caller.f_code.co_name == "__new__":  # a subclass's, which passed no arguments on
                setattr(plain, MISSED, True)
            return plain

        self.old.__new__ = staticmethod(__new__)

    def _is_meant(self, cls: Any) -> bool:
        """Includes a program's subclasses, but no other class of the same package: torch's AdamW is an Adam."""
        package = self.old.__module__.partition(".")[0]
        own = (parent for parent in cls.__mro__ if parent.__module__.partition(".")[0] == package)
        return next(own) is self.old and not is_mechanic(cls)

    def _plain(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._plain_new is object.__new__:
            return object.__new__(cls)
        return self._plain_new(cls, *args, **kwargs)

    def _mechanized(self, cls: Any, caller: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_owner(cls, caller)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        base, left_out = self._built(cls, args, kwargs)
        kind = class_for(cls, bool(self._base))
        kind.again = staticmethod(lambda *args, **kwargs: (self._built(cls, args, kwargs)[0], self._plan.options))
        try:
            optimizer = object.__new__(kind)
            _wrap(optimizer, kind, base, self._plan.options)
        except ValueError as error:
            raise ValueError(f"{error} With the runner: --replace {self._name}=torch.optim.AdamW") from error
        self._announce(cls, base, where, left_out)
        return optimizer

    def _built(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The base, and the arguments that it does not take."""
        if self._base:
            base, left_out = _built_as(_imported(self._base), cls, args, kwargs)
            _pass_for_prodigy_plus(base, cls)
            return base, left_out
        base = self._plain(cls, args, kwargs)
        base.__init__(*args, **kwargs)
        return base, ""

    def _announce(self, cls: Any, base: Any, where: str, left_out: str) -> None:
        self._events.note("replaced", self._name)
        file = where.rpartition(":")[0]
        if not self._events.note("told", f"{cls.__qualname__} {file}") or not is_first_rank():
            return
        around = "" if type(base) is cls else f", around {type(base).__module__}.{type(base).__qualname__}"
        say(f"{cls.__module__}.{cls.__qualname__} built at {where} is mechanized{around}.")
        if left_out:
            say(f"warning: {left_out} has no meaning for {type(base).__name__} with Mechanic and was dropped.")


# -------------------------------------------------------------------- whose call it is


def _is_ours(caller: FrameType) -> bool:
    """Whether this package builds a base, or the program mechanizes the class itself."""
    return str(caller.f_globals.get("__name__")).startswith("mechanic_plugins.")


def _refuse_owner(cls: Any, caller: FrameType) -> None:
    """Rejects building inside ZeroRedundancyOptimizer (one per rank) or optimizer-in-backward (one per parameter)."""
    module = str(caller.f_globals.get("__name__"))
    if module.startswith("torch.distributed.optim."):
        raise ValueError(
            f"{cls.__name__} cannot be mechanized inside {module}: each instance would learn its own scale from "
            "part of the gradient. Shard with fully_shard (FSDP2) instead, or do not --replace it."
        )


# -------------------------------------------------------------------- another base


def _default_base(old: Any) -> str:
    """AdamW for Prodigy, which is AdamW with a learned scale."""
    return "torch.optim.AdamW" if "prodigy" in old.__name__.lower() else ""


def _imported(name: str) -> Any:
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError) as error:
        stop(f"--replace ...={name}: there is no such class ({error}).")


def _built_as(new: Any, old: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    """A base of another class, built from the old one's arguments and defaults, and the arguments it does not take."""
    signature = inspect.signature(old.__init__)
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()
    given = dict(list(bound.arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name))
    known = inspect.signature(new.__init__).parameters
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    left_out = [f"{k}={v!r}" for k, v in given.items() if k not in known and v is not defaults.get(k) != v]
    return new(**{key: value for key, value in given.items() if key in known}), ", ".join(left_out)


def _pass_for_prodigy_plus(base: Any, old: Any) -> None:
    """SimpleTuner moves these entries of ProdigyPlusScheduleFree's groups to the device."""
    import torch

    for group in base.param_groups if old.__module__.startswith("prodigyplus") else ():
        for key in ("running_d_numerator", "running_d_denom"):
            group.setdefault(key, torch.zeros(()))


# -------------------------------------------------------------------- the class that the program gets


def _wrap(optimizer: Any, kind: Any, base: Any, options: str) -> None:
    from mechanic_plugins.options import configured, parsed

    try:
        configuration = configured(parsed(options))
    except (TypeError, ValueError) as error:
        stop(str(error).replace("optim_args", "--options"))
    super(kind, optimizer).__init__(base, **configuration)


@functools.cache
def class_for(old: Any, has_other_base: bool) -> Any:
    """A mechanized class in the guise of the old one. Pickles refer to this function."""
    from mechanic_plugins.optimizer import MechanicOptimizer

    entries: dict[str, Any] = dict((_defaults if has_other_base else _delegated)(old, MechanicOptimizer))
    entries.update(
        __module__=old.__module__,
        __qualname__=old.__qualname__,
        __doc__=old.__doc__,
        __init__=_was_built,
        __reduce_ex__=lambda self, protocol: (_blank, (old, has_other_base), self.__getstate__()),
    )
    return type(old.__name__, (MechanicOptimizer, old), entries)


def _was_built(self: Any, *args: Any, **kwargs: Any) -> None:
    """The `__init__` that Python calls on the result of `__new__`, which is already built.

    It is not built if the program creates it from this class and a param group of another instance, as PyKEEN does.
    """
    if "base" not in vars(self) and (args or kwargs):
        from mechanic_plugins.weights.slots import PREFIX

        own = {key: value for key, value in kwargs.items() if not key.startswith(PREFIX)}
        _wrap(self, type(self), *type(self).again(*args, **own))


def _blank(old: Any, has_other_base: bool) -> Any:
    return object.__new__(class_for(old, has_other_base))


def _defaults(old: Any, ours: type) -> list[tuple[str, Any]]:
    """The old class's arguments, which it usually keeps as attributes."""
    own = inspect.signature(old.__init__).parameters.values()
    return [(p.name, p.default) for p in own if p.default is not p.empty and not hasattr(ours, p.name)]


def _delegated(old: Any, ours: type) -> list[tuple[str, Any]]:
    """The old class's own methods and attributes, delegated to the base, which holds the state."""
    from mechanic_plugins.optimizer.wrapper import of_the_base

    above = old.__mro__[: next(i for i, c in enumerate(old.__mro__) if c.__module__ == "torch.optim.optimizer")]
    names = {name for parent in above for name in vars(parent) if not name.startswith("__") and not hasattr(ours, name)}
    return [(name, of_the_base(name)) for name in sorted(names)]
