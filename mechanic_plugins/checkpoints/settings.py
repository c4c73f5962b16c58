"""The notice for a checkpoint that was saved with different settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mechanic_plugins.checkpoints.format import Header
from mechanic_plugins.core.settings import Settings

__all__ = ["ADDED_LATER", "notice", "portable"]

ADDED_LATER: dict[str, Any] = {}
"""Settings added to format 2 later, each with the value that reproduces the previous behaviour."""


def portable(settings: Settings) -> dict[str, Any]:
    """The settings as they are after a round trip through JSON."""
    return {**asdict(settings), "betas": settings.betas and list(settings.betas)}


def notice(header: Header, settings: Settings) -> str | None:
    """A message for the user if the checkpoint's settings differ, else None."""
    ours, theirs = portable(settings), {**ADDED_LATER, **(header.settings or {})}
    if theirs.get("rule") != settings.rule:
        return (
            f"the checkpoint was saved with rule={theirs.get('rule')!r}. Its learned scale is kept, and the default "
            "rule goes on from there."
        )
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    return (
        f"the checkpoint was saved with different settings: {_listed(changed, ours)}. This optimizer's settings apply "
        f"from now on. To continue as before, pass settings=Settings({_as_call(changed)})."
    )


def _listed(changed: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())


def _as_call(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())
