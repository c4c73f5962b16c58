"""`--optim_args "k=v,k=v"`: Mechanic's options in it, and the base's."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from torch.optim import Optimizer

from mechanic_plugins.api import Options
from mechanic_plugins.core.settings import Preset, Rule, Scope
from mechanic_plugins.passes.planner import Backend

__all__ = ["PARSERS", "BaseKeys", "literal", "split_optim_args"]

_TRAINERS = {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
"""What Trainer passes on its own, in the param groups or beside them: `optim_args` could not change it."""

_NO_TEXT = ("params", "model", "adamw_params", "args")
"""Arguments that are objects."""


@dataclass(frozen=True)
class BaseKeys:
    """What `optim_args` may say to a base: the names and defaults of its constructor's arguments."""

    name: str = "the base"
    defaults: dict[str, Any] = field(default_factory=dict)
    takes_any: bool = False

    @classmethod
    def of(cls, base: type[Optimizer], *more: str) -> BaseKeys:
        """Of a class, and the keys that whoever builds it takes for itself."""
        arguments = inspect.signature(base).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        left_out = (*_TRAINERS, *_NO_TEXT)
        own = {p.name: p.default for p in arguments if p.kind not in variable and p.name not in left_out}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments)
        return cls(base.__name__, {**dict.fromkeys(more), **own}, takes_any)

    def parsed(self, key: str, value: str) -> Any:
        """A flag or a float where the default is one, else whatever the text looks like."""
        default = self.defaults.get(key)
        if isinstance(default, bool):
            return _read(key, value, _FLAG)
        return _read(key, value, _NUMBER) if isinstance(default, float) else literal(value)


def split_optim_args(text: str | None, base: BaseKeys | None = None) -> tuple[Options, dict[str, str]]:
    """Mechanic's options from `--optim_args "k=v,k=v"`, and what is left for the base, unparsed.

    A key that both have needs a prefix: "base.eps=1e-6", "mechanic.eps=1e-9". Lists have colons:
    "mechanic.betas=0.9:0.99".

    Raises:
        ValueError: Not of that form, a key that neither has or that both have, or a value that its key cannot have.
    """
    base = base or BaseKeys()
    options: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"optim_args must look like 'key=value,key=value', got {pair!r} in {text!r}.")
        owner, name = _owner(key, pair, base)
        if owner == "mechanic":
            options[name] = _read(name, value, PARSERS[name])
        else:
            rest[name] = value
    return options, rest  # type: ignore[return-value]


def _owner(key: str, pair: str, base: BaseKeys) -> tuple[str, str]:
    """Whose key it is, and the key without a prefix."""
    owner, _, name = key.rpartition(".")
    if name in _TRAINERS:
        raise ValueError(f"optim_args has {pair}, which the Trainer sets itself: use {_TRAINERS[name]}.")
    owners = [who for who, keys in (("mechanic", PARSERS), ("base", base.defaults)) if name in keys]
    if not owners and base.takes_any:
        owners = ["base"]
    if owner in owners:
        return owner, name
    if owner or not owners:
        raise ValueError(_unknown(name, pair, base))
    if len(owners) > 1:
        raise ValueError(
            f"optim_args has {pair}, and both Mechanic and {base.name} have a key {name}: write base.{pair} for "
            f"{base.name}'s, mechanic.{pair} for Mechanic's."
        )
    return owners[0], name


def _unknown(name: str, pair: str, base: BaseKeys) -> str:
    similar = difflib.get_close_matches(name, [*PARSERS, *base.defaults], n=1, cutoff=0.8)
    hint = f": did you mean {similar[0]!r}?" if similar else "."
    return (
        f"optim_args has {pair}, which is a key of neither Mechanic ({', '.join(PARSERS)}) nor {base.name} "
        f"({', '.join(base.defaults)}){hint}"
    )


def _read(key: str, value: str, parser: tuple[str, Callable[[str], Any]]) -> Any:
    wanted, parse = parser
    try:
        return parse(value)
    except (KeyError, ValueError):
        raise ValueError(f"optim_args has {key}={value!r}, which must be {wanted}.") from None


def _flag(value: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]


def _one_of(*choices: str) -> tuple[str, Callable[[str], str]]:
    return "one of " + ", ".join(choices), lambda value: {choice: choice for choice in choices}[value]


def literal(value: str) -> Any:
    """A base's argument: a number, true, none or a text, and a tuple of them where there are colons."""
    if ":" in value:
        return tuple(map(literal, value.split(":")))
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


_NUMBER: tuple[str, Callable[[str], Any]] = ("a number", float)
_FLAG: tuple[str, Callable[[str], Any]] = ("true or false", _flag)
PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "betas": ("numbers with colons between them, as 0.9:0.99:0.999", lambda v: tuple(map(float, v.split(":")))),
    "s_init": ("a number or auto", lambda v: v if v == "auto" else float(v)),
    "s_decay": _NUMBER,
    "eps": _NUMBER,
    "rule": _one_of(*get_args(Rule)),
    "preset": _one_of(*get_args(Preset)),
    "normalize_lr": _FLAG,
    "first_move": _NUMBER,
    "smoothing": _NUMBER,
    "hindsight": _NUMBER,
    "own_warmup": _FLAG,
    "scope": _one_of(*get_args(Scope)),
    "max_scale": _NUMBER,
    "max_grad_norm": _NUMBER,
    "sync_replicas": _FLAG,
    "backend": _one_of(*get_args(Backend)),
}
"""Every key of `Options` that can be written on a command line: what it takes, and how that is read."""
