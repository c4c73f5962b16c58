"""What to say when a checkpoint was made with other settings than those it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mechanic_plugins.checkpoint_format import Header
from mechanic_plugins.settings import PRESETS, Settings

__all__ = ["ADDED_LATER", "DEFAULTS_OF_0_1", "notice", "portable"]

DEFAULTS_OF_0_1: dict[str, Any] = {
    "betas": [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999],
    "s_init": "auto",
    "first_move": 1e-3,
    "s_decay": 0.0,
    "eps": 1e-8,
    "rule": "paper",
    "smoothing": 0.97,
    "hindsight": 0.3,
    "own_warmup": True,
    "max_scale": None,
    "scope": "all",
    "normalize_lr": True,
}
_OTHER_RULES_OF_0_1 = {"smoothing": 0.0, "hindsight": 1.0, "own_warmup": False}
ADDED_LATER: dict[str, Any] = {}
"""Settings that 0.1 did not have, each with the value at which the tuner does what it did before the setting came."""


def portable(settings: Settings) -> dict[str, Any]:
    """The settings as JSON gives them back."""
    return {**asdict(settings), "betas": list(settings.betas)}


def notice(header: Header, settings: Settings) -> str | None:
    """What the user should know about the settings; None if they are those of the checkpoint."""
    if header.settings is None:
        return _notice_of_changed_defaults(settings)
    ours = portable(settings)
    theirs = {**ADDED_LATER, **header.settings}
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    return (
        f"the checkpoint was made with other settings than this optimizer has: {_listed(changed, ours)}. This "
        f"optimizer's are in force from here on. To continue as before, pass mechanize(..., {_as_call(changed)})."
    )


def _notice_of_changed_defaults(settings: Settings) -> str | None:
    """0.1 saved no settings: speak up only where the value in force is a default that has changed since."""
    ours = portable(settings)
    if all(ours[name] == value for name, value in PRESETS["paper"].items()):
        return None
    now = portable(Settings.from_preset(None, rule=settings.rule))
    then = {**ADDED_LATER, **DEFAULTS_OF_0_1, **({} if settings.rule == "paper" else _OTHER_RULES_OF_0_1)}
    del then["rule"]  # 0.1's files are read by the rule they were made with, or refused
    changed = {name: old for name, old in then.items() if ours[name] == now[name] != old}
    if not changed:
        return None
    return (
        f"the checkpoint is of mechanic-plugins 0.1, which saved no settings, and defaults have changed since: "
        f"{_listed(changed, ours)}. The new ones are in force from here on. If it was trained with the old defaults, "
        f"pass mechanize(..., {_as_call(changed)}) to continue as before."
    )


def _listed(changed: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())


def _as_call(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())
