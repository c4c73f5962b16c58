"""Parses `--optim_args "k=v,k=v"` into Mechanic's options and the base's arguments."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from mechanic_plugins.options import DEFAULTS, Options, configured, hint

__all__ = ["KEYS", "BaseKeys", "literal", "split_optim_args"]

KEYS = tuple(name for name in DEFAULTS if name not in ("group", "settings"))
"""The options that can be written as text."""

_TRAINERS = {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
"""Arguments that Trainer passes itself, so `optim_args` could not change them."""

_NO_TEXT = ("params", "model", "adamw_params", "args")
"""Arguments that are objects and cannot be written as text."""


@dataclass(frozen=True)
class BaseKeys:
    """The names and defaults of a base's constructor arguments."""

    name: str = "the base"
    defaults: dict[str, Any] = field(default_factory=dict)
    takes_any: bool = False

    @classmethod
    def of(cls, base: type[Optimizer], *more: str) -> BaseKeys:
        """Those of a class, and extra keys that its builder handles."""
        arguments = inspect.signature(base).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        left_out = (*_TRAINERS, *_NO_TEXT)
        own = {p.name: p.default for p in arguments if p.kind not in variable and p.name not in left_out}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments)
        return cls(base.__name__, {**dict.fromkeys(more), **own}, takes_any)

    def parsed(self, key: str, text: str) -> Any:
        """A literal, of the default's type where that is a bool or a float."""
        default, value = self.defaults.get(key), literal(text)
        for kind, wanted in ((bool, "true or false"), (float, "a number")):
            if isinstance(default, kind) and not isinstance(value, (kind, int) if kind is float else kind):
                raise ValueError(f"optim_args has {key}={text!r}, which must be {wanted}.")
        return float(value) if isinstance(default, float) else value


def split_optim_args(text: str | None, base: BaseKeys | None = None) -> tuple[Options, dict[str, str]]:
    """Mechanic's options from `--optim_args "k=v,k=v"`, and the base's arguments, unparsed.

    A key that both have is the base's; Mechanic's then has the prefix `mechanic_`. Colons separate the items of a
    tuple: "betas=0.9:0.95".

    Raises:
        ValueError: Malformed text, an unknown key, or an invalid value.
    """
    base, options, rest = base or BaseKeys(), {}, {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"optim_args must look like 'key=value,key=value', got {pair!r} in {text!r}.")
        if key in _TRAINERS:
            raise ValueError(f"optim_args has {pair}, which the Trainer sets itself: use {_TRAINERS[key]}.")
        option = key.removeprefix("mechanic_")
        if option in KEYS and key not in base.defaults:
            options[option] = literal(value)
        elif key in base.defaults or base.takes_any:
            rest[key] = value
        else:
            known = f"Mechanic's keys are {', '.join(KEYS)}"
            theirs = f", {base.name}'s {', '.join(base.defaults)}" if base.defaults else ""
            similar = hint(key, [*KEYS, *base.defaults])
            raise ValueError(f"optim_args has an unknown key {key!r}{similar} {known}{theirs}.")
    configured(options)
    return options, rest  # type: ignore[return-value]


def literal(text: str) -> Any:
    """A number, true, false, none or a string; colons separate the items of a tuple."""
    if ":" in text:
        return tuple(map(literal, text.split(":")))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
