"""`--optim_args "k=v,k=v"`: Mechanic's options in it, and the base's."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from typing import Any, get_args

from mechanic_plugins.api import Options
from mechanic_plugins.passes import Backend
from mechanic_plugins.settings import Preset, Rule, Scope

__all__ = ["PARSERS", "literal", "split_optim_args"]


def split_optim_args(text: str | None) -> tuple[Options, dict[str, str]]:
    """Mechanic's options from `--optim_args "k=v,k=v"`, and what is left for the base, unparsed.

    `base.` before a key sends it to the base where both have it: "base.eps=1e-6". Lists have colons:
    "betas=0.9:0.99".

    Raises:
        ValueError: Not of that form, or a value that its key cannot have.
    """
    options: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"optim_args must look like 'key=value,key=value', got {pair!r} in {text!r}.")
        if key in PARSERS:
            options[key] = _parsed(key, value)
        else:
            rest[_base_key(key)] = value
    return options, rest  # type: ignore[return-value]


def _base_key(key: str) -> str:
    if key.startswith("base."):
        return key.removeprefix("base.")
    if similar := difflib.get_close_matches(key, PARSERS, n=1, cutoff=0.8):
        raise ValueError(
            f"optim_args has the key {key!r}, which Mechanic does not know: did you mean {similar[0]!r}? "
            f"If it is the base optimizer's, write 'base.{key}'."
        )
    return key


def _parsed(key: str, value: str) -> Any:
    wanted, parse = PARSERS[key]
    try:
        return parse(value)
    except (KeyError, ValueError):
        raise ValueError(f"optim_args has {key}={value!r}, which must be {wanted}.") from None


def _flag(value: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]


def _one_of(*choices: str) -> tuple[str, Callable[[str], str]]:
    return "one of " + ", ".join(choices), lambda value: {choice: choice for choice in choices}[value]


def literal(value: str) -> Any:
    """A base's argument: a number, True, None or a text, and a tuple of them where there are colons."""
    if ":" in value:
        return tuple(map(literal, value.split(":")))
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
    "sync_replicas": _FLAG,
    "backend": _one_of(*get_args(Backend)),
}
"""Every key of `Options` that can be written on a command line: what it takes, and how that is read."""
