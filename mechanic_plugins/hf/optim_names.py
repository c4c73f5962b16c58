"""The names added to `--optim`, and their optimizers.

This runs in the middle of transformers' own imports and may use only `transformers.training_args`.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from mechanic_plugins.lion import Lion
from mechanic_plugins.muon import MuonWithAdamW

__all__ = ["BASES", "PREFIX", "add_name", "add_names"]

PREFIX = "mechanic_"

BASES: dict[str, str | type[Optimizer]] = {
    "mechanic_adamw": "adamw_torch_fused",
    "mechanic_adamw_8bit": "adamw_bnb_8bit",
    "mechanic_sgd": "sgd",
    "mechanic_adagrad": "adagrad",
    "mechanic_rmsprop": "rmsprop",
    "mechanic_adafactor": "adafactor",
    "mechanic_lion": Lion,
    "mechanic_muon": MuonWithAdamW,
}
"""Each name's base: one of transformers' own names, or a class."""


def add_names(optimizer_names: Any) -> None:
    """Adds all names to transformers' `OptimizerNames`. Idempotent."""
    for name in BASES:
        add_name(optimizer_names, name)


def add_name(enum: Any, value: str) -> Any:
    """Adds a member to a str-Enum in place: transformers has no registry, and its parser uses the enum."""
    if value in enum._value2member_map_:
        return enum._value2member_map_[value]
    member = str.__new__(enum, value)
    member._name_, member._value_, member.__objclass__ = value.upper(), value, enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(member._name_)
    enum._member_map_[member._name_] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # used by `in` since Python 3.13
        enum._hashable_values_.append(value)
    type.__setattr__(enum, member._name_, member)
    return member
