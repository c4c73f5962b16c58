"""Parses `--optim_args "k=v,k=v"` into Mechanic's options and the base's arguments."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch.optim import Optimizer

from mechanic_plugins.api import Options

__all__ = ["PARSERS", "BaseKeys", "literal", "split_optim_args"]

_TRAINERS = {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
"""Arguments that Trainer passes itself, so `optim_args` could not change them."""

_NO_TEXT = ("params", "model", "adamw_params", "args")
"""Arguments that are objects and cannot be written as text."""

Parser = tuple[str, Callable[[str], Any]]
"""A description of the values, and a function that reads one or raises KeyError or ValueError."""


@dataclass(frozen=True)
class BaseKeys:
    """The names and defaults of a base's constructor arguments."""

    name: str = "the base"
    defaults: dict[str, Any] = field(default_factory=dict)
    takes_any: bool = False

    @classmethod
    def of(cls, base: type[Optimizer], *more: str) -> BaseKeys:
        """Those of a class, and the extra keys that its builder handles."""
        arguments = inspect.signature(base).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        left_out = (*_TRAINERS, *_NO_TEXT)
        own = {p.name: p.default for p in arguments if p.kind not in variable and p.name not in left_out}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments)
        return cls(base.__name__, {**dict.fromkeys(more), **own}, takes_any)

    def parsed(self, key: str, value: str) -> Any:
        """A bool or a float if the default is one, else a literal."""
        default = self.defaults.get(key)
        if isinstance(default, bool):
            return _read(key, value, _FLAG)
        return _read(key, value, _NUMBER) if isinstance(default, float) else literal(value)


def split_optim_args(text: str | None, base: BaseKeys | None = None) -> tuple[Options, dict[str, str]]:
    """Mechanic's options from `--optim_args "k=v,k=v"`, and the base's arguments, unparsed.

    A key that both have needs a prefix: "base.eps=1e-6", "mechanic.eps=1e-9". Lists are separated by colons:
    "mechanic.betas=0.9:0.99".

    Raises:
        ValueError: Malformed text, an unknown or ambiguous key, or an invalid value.
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
    """The key's owner, and the key without its prefix."""
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
    if not base.defaults:
        return f"optim_args has {pair}, which is none of Mechanic's keys ({', '.join(PARSERS)}){hint}"
    return (
        f"optim_args has {pair}, which is a key of neither Mechanic ({', '.join(PARSERS)}) nor {base.name} "
        f"({', '.join(base.defaults)}){hint}"
    )


def _read(key: str, value: str, parser: Parser) -> Any:
    wanted, parse = parser
    try:
        return parse(value)
    except (KeyError, ValueError):
        raise ValueError(f"optim_args has {key}={value!r}, which must be {wanted}.") from None


def _flag(value: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]


def _one_of(*choices: str) -> Parser:
    return "one of " + ", ".join(choices), lambda value: {choice: choice for choice in choices}[value]


def literal(value: str) -> Any:
    """An argument of the base: a number, true, false, none or a string; colons separate the items of a tuple."""
    if ":" in value:
        return tuple(map(literal, value.split(":")))
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


_NUMBER: Parser = ("a number", float)
_FLAG: Parser = ("true or false", _flag)
_SIMPLE: dict[Any, Parser] = {bool: _FLAG, float: _NUMBER, int: ("a whole number", int)}


def _parser(hint: Any) -> Parser | None:
    """For an option of this type; None for types that cannot be written as text."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if get_origin(hint) is Sequence:
        return "numbers separated by colons, as 0.9:0.99:0.999", lambda text: tuple(map(float, text.split(":")))
    if get_origin(hint) is Literal:
        return _one_of(*get_args(hint))
    known = [parser for part in get_args(hint) if (parser := _parser(part)) is not None]
    return functools.reduce(_either, known) if known else None


def _either(first: Parser, second: Parser) -> Parser:
    def parse(text: str) -> Any:
        try:
            return first[1](text)
        except (KeyError, ValueError):
            return second[1](text)

    return f"{first[0]} or {second[0].removeprefix('one of ')}", parse


PARSERS = {name: parser for name, hint in get_type_hints(Options).items() if (parser := _parser(hint)) is not None}
"""Every option that can be written on a command line: the values it takes, and a function that reads them."""
