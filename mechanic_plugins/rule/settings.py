"""The tuner's settings, validated on construction.

Every error names the value, the reason and what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch

__all__ = [
    "PUBLISHED",
    "Rule",
    "Scope",
    "Settings",
    "check_max_grad_norm",
    "checked_kept_dtype",
    "is_number",
]

Rule = Literal["relative", "paper", "experiments", "optax", "theory"]
Scope = Literal["all", "group"]

_BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
PUBLISHED: dict[str, dict[str, Any]] = {
    "paper": {"betas": _BETAS, "s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8},
    "experiments": {"betas": _BETAS, "s_init": 1e-8, "s_decay": 0.01, "eps": 1e-10},
    "optax": {"betas": _BETAS, "s_init": 1e-6, "s_decay": 0.01, "eps": 1e-8},
    "theory": {"betas": _BETAS, "s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8},
}
"""The constants that each rule was published with."""
_UNSET: Any = None
"""Stands for the rule's own constant. The default rule has none of these."""
_SMALLEST, _LARGEST = 1e-30, 1e20
"""Between them nothing overflows once it is multiplied by a learning rate and squared."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The tuner's constants. Those of the published rules are stated for a base learning rate of 1.

    Args:
        rule: "relative" is this package's own; "paper", "experiments", "optax" and "theory" are the published ones.
        scope: "all" learns one scale, "group" one per param group.
        max_scale: Upper bound on the scale.
        betas: Memory lengths of a published rule's learners.
        s_init: A published rule's first scale.
        s_decay: The paper's lambda.
        eps: Added to a published rule's divisor.
        normalize_lr: Make the result independent of the base's lr; constants are for lr=1.
    """

    rule: Rule = "relative"
    scope: Scope = "all"
    max_scale: float | None = None
    betas: Sequence[float] = _UNSET
    s_init: float = _UNSET
    s_decay: float = _UNSET
    eps: float = _UNSET
    normalize_lr: bool = True

    def __post_init__(self) -> None:
        for name in ("rule", "scope", "max_scale", "normalize_lr"):
            _ALLOWED[name].check(name, getattr(self, name))
        constants = PUBLISHED.get(self.rule, {})
        for name in PUBLISHED["paper"]:
            value = getattr(self, name)
            if self.rule == "relative" and value is not None:
                raise ValueError(
                    f"{name} belongs to the published rules, got {value!r} with the default one: choose one of them, "
                    "as rule='paper', or leave it out."
                )
            if value is None and constants:
                object.__setattr__(self, name, constants[name])
        if constants:
            _check_betas(self.betas)
            object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
            for name in ("s_init", "s_decay", "eps"):
                _ALLOWED[name].check(name, getattr(self, name))
            if self.rule in ("experiments", "optax") and self.eps == 0:
                raise ValueError(
                    f"eps must be > 0 with rule={self.rule!r}, got 0: the rule divides eps by eps in its first step. "
                    "Use 1e-8, or rule='paper'."
                )
        for name in ("max_scale", "s_init", "s_decay", "eps"):
            value = getattr(self, name)
            if value is not None:  # numpy's floats could not be loaded with weights_only
                value = float(value)
                object.__setattr__(self, name, value)
            if value and not _SMALLEST <= value <= _LARGEST:
                raise ValueError(
                    f"{name} must lie between {_SMALLEST:g} and {_LARGEST:g}, got {value!r}: a step would overflow, "
                    "or round it to 0. The paper's constants lie between 1e-8 and 0.01; max_scale=None is no cap."
                )

    @property
    def n(self) -> int:
        """How many learners there are."""
        return len(self.betas or (1.0,))


class _Allowed(NamedTuple):
    """The values an option accepts."""

    description: str
    is_valid: Callable[[Any], bool]
    message: str = ""
    """The reason, and what to write instead."""

    def check(self, name: str, value: object) -> None:
        if not self.is_valid(value):
            end = f": {self.message}" if self.message else "."
            raise ValueError(f"{name} must be {self.description}, got {value!r}{end}")


def check_max_grad_norm(value: object) -> None:
    """Validates the option. It is not one of the tuner's settings, so checkpoints do not contain it."""
    _MAX_GRAD_NORM.check("max_grad_norm", value)


def checked_kept_dtype(value: object) -> torch.dtype | None:
    """The option as a dtype; configs and command lines give its name."""
    found = getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value
    _KEPT_DTYPE.check("kept_dtype", found)
    return found if isinstance(found, torch.dtype) else None


def is_number(value: object) -> bool:
    """Whether this is a real number, one of numpy's included, that fits into a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def _one_of(*choices: str) -> _Allowed:
    described = f"one of {', '.join(map(repr, choices))}"
    return _Allowed(described, lambda value: isinstance(value, str) and value in choices)


_POSITIVE = "a finite number > 0", lambda x: is_number(x) and 0 < x and math.isfinite(x)
_NOT_NEGATIVE = "a finite number >= 0", lambda x: is_number(x) and 0 <= x and math.isfinite(x)
_ALLOWED: dict[str, _Allowed] = {
    "rule": _one_of(*get_args(Rule)),
    "scope": _one_of(*get_args(Scope)),
    "max_scale": _Allowed(
        "a finite number > 0",
        lambda x: x is None or _POSITIVE[1](x),
        "the scale is capped there and would never leave zero. Leave it None for no cap.",
    ),
    "s_init": _Allowed(
        *_POSITIVE, "the tuner multiplies its wealth by s_init and would never leave zero. The paper's is 1e-8."
    ),
    "s_decay": _Allowed(*_NOT_NEGATIVE, "it is the weight of a norm penalty; 0 turns it off."),
    "eps": _Allowed(*_NOT_NEGATIVE, "it is added to the divisor sqrt(v); the paper's value is 1e-8."),
    "normalize_lr": _Allowed("True or False", lambda value: isinstance(value, bool)),
}
_MAX_GRAD_NORM = _Allowed(
    "None or a number > 0",
    lambda x: x is None or (is_number(x) and x > 0),
    "gradients with a larger norm are scaled down to it. 1.0 is a common choice; None does not clip.",
)
_KEPT_DTYPE = _Allowed(
    "None, torch.float32 or torch.bfloat16",
    lambda x: x is None or (isinstance(x, torch.dtype) and x in (torch.float32, torch.bfloat16)),
    "the starting weights are kept in it. bfloat16 halves their memory; None keeps the weights' own dtype.",
)


def _check_betas(betas: object) -> None:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) == 0:  # OmegaConf's are not `list`s
        raise ValueError(
            f"betas must be a non-empty tuple or list of numbers, got {betas!r}: each one is the discount factor of "
            f"one learner. The paper's are {_BETAS}."
        )
    for beta in betas:
        if not is_number(beta) or not 0 < beta <= 1:
            raise ValueError(
                f"betas must be numbers in (0, 1], got {beta!r}: a beta is the discount factor of past gradients; 1 "
                "keeps all of them."
            )
