"""The options of `mechanize`. Every entry point takes these names and passes them to `configured`."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, cast, get_type_hints

import torch
import torch.distributed as dist

from mechanic_plugins.core.settings import Rule, Scope, Settings, check_max_grad_norm, checked_delta_dtype
from mechanic_plugins.passes.planner import Backend, check_backend

__all__ = ["DEFAULTS", "Options", "configured", "hint", "literal", "parameters", "parsed"]


class Options(TypedDict, total=False):
    """The keywords of `mechanize`."""

    rule: Rule | None
    scope: Scope
    max_scale: float | None
    max_grad_norm: float | None
    delta_dtype: torch.dtype | Literal["float32", "bfloat16"] | None
    group: dist.ProcessGroup | None
    sync_replicas: bool
    backend: Backend
    settings: Settings | None


_GIVEN: Options = {"scope": "all", "sync_replicas": False, "backend": "auto"}
DEFAULTS = cast(Options, dict.fromkeys(Options.__annotations__) | _GIVEN)
_TUNING = ("rule", "scope", "max_scale")


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
            if name in Settings.__dataclass_fields__:
                end += f" {name} belongs in settings=Settings({name}=...)."
            raise TypeError(f"mechanize() has no option {name!r}{hint(name, DEFAULTS)}{end}")
    values: dict[str, Any] = {**DEFAULTS, **options}
    settings, tuning = values.pop("settings"), {name: values.pop(name) for name in _TUNING}
    check_max_grad_norm(values["max_grad_norm"])
    values["delta_dtype"] = checked_delta_dtype(values["delta_dtype"])
    check_backend(values["backend"])
    if not isinstance(values["sync_replicas"], bool):
        raise TypeError(f"sync_replicas must be True or False, got {values['sync_replicas']!r}.")
    if values["group"] is not None and not isinstance(values["group"], dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed ProcessGroup or None, got {values['group']!r}: create one with "
            "torch.distributed.new_group(ranks)."
        )
    settings = _settings(settings, tuning)
    if settings.rule != "relative" and values["delta_dtype"] == torch.bfloat16:
        raise ValueError(
            f"delta_dtype=torch.bfloat16 is for the default rule, got rule={settings.rule!r}: a published rule sums "
            "all updates up, and bfloat16 would lose the small ones. Leave delta_dtype out."
        )
    return {"settings": settings, **values}


def _settings(settings: Any, tuning: dict[str, Any]) -> Settings:
    if settings is None:
        return Settings(**{name: value for name, value in tuning.items() if (name, value) != ("rule", None)})
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be a mechanic_plugins.Settings object, got {settings!r}.")
    if given := [name for name, value in tuning.items() if value != DEFAULTS[name]]:  # type: ignore[literal-required]
        raise ValueError(
            f"{' and '.join(given)} cannot be combined with settings=: write settings=Settings({given[0]}=..., ...)."
        )
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
