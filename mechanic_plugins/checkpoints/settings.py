"""What to say when a checkpoint was made with other settings than those it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mechanic_plugins.checkpoints.format import Header
from mechanic_plugins.core.settings import Settings

__all__ = ["ADDED_LATER", "notice", "portable"]

ADDED_LATER: dict[str, Any] = {}
"""Settings that format 2 did not have at first, each with the value that leaves the tuner as it was before."""


def portable(settings: Settings) -> dict[str, Any]:
    """The settings as JSON gives them back."""
    return {**asdict(settings), "betas": list(settings.betas)}


def notice(header: Header, settings: Settings) -> str | None:
    """What the user should know about the settings; None if they are those of the checkpoint."""
    if header.settings is None:
        return _notice_of_changed_rule(settings)
    ours = portable(settings)
    theirs = {**ADDED_LATER, **header.settings}
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    return (
        f"the checkpoint was made with other settings than this optimizer has: {_listed(changed, ours)}. This "
        f"optimizer's are in force from here on. To continue as before, pass mechanize(..., {_as_call(changed)})."
    )


def _notice_of_changed_rule(settings: Settings) -> str | None:
    """0.1 saved no settings. A published rule is chosen on purpose; the default is another one now."""
    if settings.rule != "optimistic":
        return None
    return (
        "the checkpoint is of mechanic-plugins 0.1, which saved no settings, and the default rule has changed since. "
        "The new one is in force from here on. If it was trained with the defaults of 0.1, pass "
        "mechanize(..., preset='0.1') to continue as before."
    )


def _listed(changed: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())


def _as_call(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())
