"""The options of `mechanize`: their names and types are said here, their defaults in `Settings` and in `Wrapper`.

What takes them on shows them in its signature by `parameters()` and passes them to `configured()`, so an option that is
added here and in `Settings` is there everywhere.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict, get_type_hints

import torch
import torch.distributed as dist

from mechanic_plugins.core.settings import (
    LEFT_OPEN,
    Preset,
    Rule,
    Scope,
    Settings,
    check_max_grad_norm,
    check_total_steps,
    checked_delta_dtype,
)
from mechanic_plugins.optimizer.interface import Wrapper
from mechanic_plugins.passes.planner import Backend

__all__ = [
    "Options",
    "OptionsBesideBetas",
    "OptionsBesideBoth",
    "OptionsBesideEps",
    "bound",
    "configured",
    "hint",
    "parameters",
]


class _Common(TypedDict, total=False):
    s_init: float | Literal["auto"] | None
    first_move: float | None
    s_decay: float | None
    rule: Rule | None
    preset: Preset | None
    normalize_lr: bool
    smoothing: float | None
    hindsight: float | None
    own_warmup: bool | None
    scope: Scope
    max_scale: float | None
    max_grad_norm: float | None
    total_steps: int | None
    delta_dtype: torch.dtype | Literal["float32", "bfloat16"] | None
    group: dist.ProcessGroup | None
    sync_replicas: bool
    backend: Backend


class _Betas(TypedDict, total=False):
    betas: Sequence[float]


class _Eps(TypedDict, total=False):
    eps: float | None


class _MechanicBetas(TypedDict, total=False):
    mechanic_betas: Sequence[float]


class _MechanicEps(TypedDict, total=False):
    mechanic_eps: float | None


class Options(_Betas, _Eps, _Common, total=False):
    """The keywords of `mechanize`, for those who pass them on."""


class OptionsBesideBetas(_MechanicBetas, _Eps, _Common, total=False):
    """The same for a class whose own arguments have a `betas`."""


class OptionsBesideEps(_Betas, _MechanicEps, _Common, total=False):
    """The same for a class whose own arguments have an `eps`."""


class OptionsBesideBoth(_MechanicBetas, _MechanicEps, _Common, total=False):
    """The same for a class whose own arguments have both."""


@functools.lru_cache(maxsize=1)
def parameters() -> tuple[inspect.Parameter, ...]:
    """Every option as a keyword, with its default and type. None stands for the preset's value, or the rule's."""
    defaults = {name: p.default for name, p in inspect.signature(Wrapper.__init__).parameters.items()}
    defaults |= {field.name: None if field.name in LEFT_OPEN else field.default for field in fields(Settings)}
    defaults["preset"] = None
    kind = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(Options).items()
    return tuple(inspect.Parameter(name, kind, default=defaults[name], annotation=hint) for name, hint in hints)


def configured(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `MechanicOptimizer` takes beside the base, from options whose values are checked here.

    Raises:
        TypeError: There is no such option.
        ValueError: A value is out of range.
    """
    known = [p.name for p in parameters()]
    for name in options:
        if name not in known:
            raise TypeError(f"mechanize() has no option {name!r}{hint(name, known)} It has {', '.join(known)}.")
    beside = ("max_grad_norm", "total_steps", "delta_dtype", "group", "sync_replicas", "backend")
    own = {name: options[name] for name in beside if name in options}
    check_max_grad_norm(own.get("max_grad_norm"))
    check_total_steps(own.get("total_steps"))
    checked_delta_dtype(own.get("delta_dtype"))
    return {"settings": Settings.from_preset(**{k: v for k, v in options.items() if k not in own}), **own}


def bound(name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """Which arguments of the signature were given.

    Raises:
        TypeError: They do not fit it; for an unknown keyword with the one that was probably meant.
    """
    try:
        return set(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        unknown = next((key for key in kwargs if key not in signature.parameters), None)
        end = hint(unknown, signature.parameters) if unknown else "."
        raise TypeError(f"{name}() {error}{end}") from None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not there."""
    by_lower = {each.lower(): each for each in known}
    plain = name.lower().removeprefix("mechanic_")  # the prefix is for names that the base has too
    similar = difflib.get_close_matches(plain, by_lower, n=1, cutoff=0.7)
    return f": did you mean {by_lower[similar[0]]!r}?" if similar else "."
