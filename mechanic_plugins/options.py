"""The options of `mechanize`. Every entry point takes these names and passes them to `configured`."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast, get_type_hints

import torch
import torch.distributed as dist

from mechanic_plugins.optimizer.wrapper import Backend, check_backend
from mechanic_plugins.rule.settings import (
    Rule,
    Scope,
    Settings,
    check_max_grad_norm,
    checked_kept_dtype,
    is_number,
)

__all__ = ["DEFAULTS", "Options", "configured", "hint", "literal", "parameters", "parsed"]


class Options(TypedDict, total=False):
    """The keywords of `mechanize`."""

    rule: Rule | None
    scope: Scope
    max_scale: float | None
    max_grad_norm: float | None
    kept_dtype: torch.dtype | Literal["float32", "bfloat16"] | None
    group: dist.ProcessGroup | None
    sync_replicas: bool
    backend: Backend
    s_init: float | None
    s_decay: float | None
    tuner_betas: Sequence[float] | float | None
    tuner_eps: float | None
    settings: Settings | None


_GIVEN: Options = {"scope": "all", "sync_replicas": False, "backend": "auto"}
DEFAULTS = cast(Options, dict.fromkeys(Options.__annotations__) | _GIVEN)
_TUNING = {name: name for name in ("rule", "scope", "max_scale", "s_init", "s_decay")} | {
    "tuner_betas": "betas",
    "tuner_eps": "eps",
}
"""The options that make up the settings, and their names there. Most bases have betas and an eps of their own."""


def parameters() -> list[inspect.Parameter]:
    """The options as keyword-only parameters, with defaults and types."""
    hints, kind = get_type_hints(Options), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, kind, default=value, annotation=hints[name]) for name, value in DEFAULTS.items()]


def configured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validates options and returns the keywords that `MechanicOptimizer` takes besides the base.

    Raises:
        TypeError: Unknown option, or a value of the wrong type.
        ValueError: A value is out of range, or `settings` is combined with an option that it contains.
    """
    for name in options:
        if name not in DEFAULTS:
            end = f" It has {', '.join(DEFAULTS)}."
            if f"tuner_{name}" in DEFAULTS:
                end += f" The tuner's {name} is the option tuner_{name}; the base's is the base's own argument."
            elif name in Settings.__dataclass_fields__:
                end += f" {name} can be set in Python alone, by mechanize(..., settings=Settings({name}=...))."
            raise TypeError(f"mechanize() has no option {name!r}{hint(name, DEFAULTS)}{end}")
    values: dict[str, Any] = {**DEFAULTS, **options}
    settings, tuning = values.pop("settings"), {name: values.pop(name) for name in _TUNING}
    check_max_grad_norm(values["max_grad_norm"])
    if values["max_grad_norm"] is not None:
        values["max_grad_norm"] = float(values["max_grad_norm"])
    values["kept_dtype"] = checked_kept_dtype(values["kept_dtype"])
    if not isinstance(values["backend"], str):
        raise TypeError(f"backend must be a string such as 'auto', got {values['backend']!r}.")
    check_backend(values["backend"])
    if not isinstance(values["sync_replicas"], bool):
        raise TypeError(f"sync_replicas must be True or False, got {values['sync_replicas']!r}.")
    if values["group"] is not None and not isinstance(values["group"], dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed ProcessGroup or None, got {values['group']!r}: create one with "
            "torch.distributed.new_group(ranks)."
        )
    settings = _settings(settings, tuning)
    return {"settings": settings, **values}


def _settings(settings: Any, tuning: dict[str, Any]) -> Settings:
    if settings is None:
        given = {_TUNING[name]: value for name, value in tuning.items() if name == "scope" or value is not None}
        if is_number(given.get("betas")):  # one learner: text cannot say that it is a tuple of one
            given["betas"] = (given["betas"],)
        try:
            made = Settings(**given)
        except ValueError as error:
            raise ValueError(re.sub(r"^(betas|eps)\b", r"tuner_\1", str(error))) from error
        return made
    if not isinstance(settings, Settings):
        raise TypeError(
            f"settings must be a mechanic_plugins.Settings object, got {settings!r}: Python code alone can write one. "
            "In text, give its constants one by one, as rule=paper,s_decay=0.1."
        )
    if beside := [name for name, value in tuning.items() if value is not None and (name, value) != ("scope", "all")]:
        names = ", ".join(f"{_TUNING[name]}=..." for name in beside)
        raise ValueError(f"{' and '.join(beside)} cannot be combined with settings=: write settings=Settings({names}).")
    return settings


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name, suggesting the most similar known one."""
    by_lower = {each.lower(): each for each in known}
    plain = name.lower().removeprefix("mechanic_")  # the prefix marks names that the base has as well
    similar = difflib.get_close_matches(plain, by_lower, n=1, cutoff=0.7)
    return f": did you mean {by_lower[similar[0]]!r}?" if similar else "."


def parsed(text: str | None) -> dict[str, Any]:
    """The keywords in "key=value,key=value", as of `--optim_args` and the runner's `--options`.

    Raises:
        ValueError: Malformed text.
    """
    found = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        key, _, value = pair.partition("=")
        if not (key and value):
            raise ValueError(f"optim_args must look like 'key=value,key=value', got {pair!r} in {text!r}.")
        found[key] = literal(value)
    return found


def literal(text: str) -> Any:
    """Parses a number, true, false, none or a string. Colons separate the items of a tuple."""
    if ":" in text:
        return tuple(map(literal, text.split(":")))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
