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
    options = {**asdict(settings), "betas": list(settings.betas)}
    del options["steps"], options["haste"], options["usual_loss"]  # follow from the base and the run
    return options


def notice(header: Header, settings: Settings) -> str | None:
    """A message for the user if the checkpoint's settings differ, else None."""
    if header.settings is None:
        return _notice_of_changed_rule(settings)
    ours = portable(settings)
    theirs = {**ADDED_LATER, **header.settings}
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    return (
        f"the checkpoint was saved with different settings: {_listed(changed, ours)}. This optimizer's settings apply "
        f"from now on. To continue as before, pass mechanize(..., {_as_call(changed)})."
    )


def _notice_of_changed_rule(settings: Settings) -> str | None:
    """Version 0.1 saved no settings, and its default rule was another one. A published rule was chosen explicitly."""
    if settings.rule != "optimistic":
        return None
    return (
        "the checkpoint is from mechanic-plugins 0.1, which saved no settings, and the default rule has changed since. "
        "The new rule applies from now on. If the run used the defaults of 0.1, pass mechanize(..., preset='0.1') to "
        "continue as before."
    )


def _listed(changed: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())


def _as_call(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())
