"""Options as text: `--optim_args "scope=group,betas=0.9:0.95"`, and the runner's `--options`."""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["literal", "parse"]


def parse(text: str | None) -> dict[str, Any]:
    """The keywords in "key=value,key=value". Colons separate the items of a tuple.

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
