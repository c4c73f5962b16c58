"""The tuner's settings, validated on construction.

Every error names the value, the reason and what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

__all__ = [
    "LEFT_OPEN",
    "PRESETS",
    "Preset",
    "Rule",
    "Scope",
    "Settings",
    "Steps",
    "check_max_grad_norm",
    "check_total_steps",
    "checked_delta_dtype",
]

Preset = Literal["paper", "0.1"]
Rule = Literal["optimistic", "paper", "experiments", "optax", "theory"]
Scope = Literal["all", "group"]
Steps = Literal["normalised", "growing", "signs"]
"""Of a base: divided by moments or norms, proportional to the gradient, or all of one length."""

_AS_PUBLISHED: dict[str, Any] = {"smoothing": 0.0, "hindsight": 1.0, "own_warmup": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "optimistic": {},
    "paper": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
    "experiments": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-10, **_AS_PUBLISHED},
    "optax": {"s_init": 1e-6, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
    "theory": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
}
"""The constants each rule was published with."""
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"rule": "paper", **PUBLISHED["paper"]},
    "0.1": {
        "rule": "paper",
        "s_init": "auto",
        "first_move": 1e-3,
        "s_decay": 0.0,
        "eps": 1e-8,
        "smoothing": 0.97,
        "hindsight": 0.3,
        "own_warmup": True,
    },
}
"""The paper's constants, and the defaults of version 0.1 of this package."""
FOR_GROWING_STEPS: dict[str, Any] = {"first_move": 5e-4, "hindsight": 0.3}
"""The defaults for a base whose steps grow with the gradient: at too large a scale it diverges within a few steps."""
LEFT_OPEN = tuple(PRESETS["0.1"])
"""Options that may be None: the preset's value is used, or the rule's, or the default."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The tuner's constants, stated for a base learning rate of 1 (see `normalize_lr`)."""

    betas: Sequence[float] = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
    s_init: float | Literal["auto"] = "auto"
    first_move: float = 3e-3
    s_decay: float = 0.0
    eps: float = 0.0
    rule: Rule = "optimistic"
    smoothing: float = 0.97
    hindsight: float = 0.15
    own_warmup: bool = True
    max_scale: float | None = None
    scope: Scope = "all"
    normalize_lr: bool = True
    steps: Steps = field(default="normalised", repr=False)
    """Not an option: what the base's steps are like, which `for_base` notes."""
    haste: float = field(default=1.0, repr=False)
    """Not an option: how much sooner than in a long run the scale may rise, which `settings_for_run` notes."""
    usual_loss: float = field(default=0.3, repr=False)
    """Not an option: what share of the largest |h| a loss may have to count as usual. `settings_for_run` notes it."""
    _chosen: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        _check_betas(self.betas)
        object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
        for name, allowed in _ALLOWED.items():
            allowed.check(name, getattr(self, name))
        for name, value, is_valid, message in _COMBINATIONS.get(self.rule, ()):
            if not is_valid(getattr(self, name)):
                raise ValueError(
                    f"{name} must be {value} with rule={self.rule!r}, got {getattr(self, name)!r}: {message}"
                )

    @classmethod
    def from_preset(cls, preset: str | None = None, **values: Any) -> Settings:
        """The preset's constants, or those the rule was published with; values other than None take precedence."""
        chosen = {name: value for name, value in values.items() if value is not None or name not in LEFT_OPEN}
        if preset is None:
            constants = PUBLISHED.get(chosen.get("rule", "optimistic"), {})
        else:
            _one_of(*PRESETS).check("preset", preset)
            constants = PRESETS[preset]
        settings = cls(**{**constants, **chosen})
        object.__setattr__(settings, "_chosen", frozenset(constants) | frozenset(chosen))
        return settings

    def for_base(self, steps: Steps) -> Settings:
        """With the defaults for a base with such steps, where neither the user nor a preset chose a value."""
        if self.rule != "optimistic":
            return self
        defaults = FOR_GROWING_STEPS if steps == "growing" else {}
        open_ = {name: value for name, value in defaults.items() if self.is_open(name)}
        changed = replace(self, steps=steps, **open_)
        object.__setattr__(changed, "_chosen", self._chosen)
        return changed

    def is_open(self, name: str) -> bool:
        """Whether neither the user nor a preset chose it, nor the kind of base."""
        return name not in self._chosen and getattr(self, name) == getattr(Settings, name)

    def at_lr(self, lr: float) -> Settings:
        """Settings that give the same trajectory for a base whose updates are `lr` times as long."""
        return replace(
            self,
            s_init=self.s_init if isinstance(self.s_init, str) else self.s_init / lr,
            s_decay=self.s_decay * lr,
            eps=self.eps * lr,
        )


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
    """Validates the option, which is not a constant of the tuner: checkpoints do not hold it."""
    _MAX_GRAD_NORM.check("max_grad_norm", value)


def check_total_steps(value: object) -> None:
    """Validates the option, which checkpoints do not hold either: a run may be resumed for longer."""
    _TOTAL_STEPS.check("total_steps", value)


def checked_delta_dtype(value: object) -> torch.dtype | None:
    """The option as a dtype; configs and command lines have its name. Checkpoints hold delta as it is."""
    found = getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value
    _DELTA_DTYPE.check("delta_dtype", found)
    return found if isinstance(found, torch.dtype) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(*choices: str) -> _Allowed:
    return _Allowed(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)


_FLAG = _Allowed("True or False", lambda value: isinstance(value, bool))
_ALLOWED: dict[str, _Allowed] = {
    "s_init": _Allowed(
        "'auto' or a finite number > 0",
        lambda x: x == "auto" or (_is_number(x) and 0 < x < math.inf),
        "the tuner multiplies its wealth by s_init and would never leave zero. Use 'auto', or the paper's 1e-8.",
    ),
    "first_move": _Allowed(
        "a number > 0 and < 1",
        lambda x: _is_number(x) and 0 < x < 1,
        "with s_init='auto' it is the length of the first move relative to the norm of the weights. The default is "
        "3e-3.",
    ),
    "s_decay": _Allowed(
        "a finite number >= 0",
        lambda x: _is_number(x) and 0 <= x < math.inf,
        "it is the weight of a norm penalty; 0 turns it off.",
    ),
    "eps": _Allowed(
        "a finite number >= 0",
        lambda x: _is_number(x) and 0 <= x < math.inf,
        "it is added to the divisor sqrt(v); the paper's value is 1e-8.",
    ),
    "smoothing": _Allowed(
        "a finite number >= 0 and < 1",
        lambda x: _is_number(x) and 0 <= x < 1,
        "it is the decay of a moving average; 0 turns it off, 0.97 averages over about 33 steps.",
    ),
    "hindsight": _Allowed(
        "a number >= 0 and <= 1",
        lambda x: _is_number(x) and 0 <= x <= 1,
        "it is the fraction of a change of scale that is applied to past updates. 1 is the paper's value, 0 leaves "
        "past updates alone.",
    ),
    "rule": _one_of(*get_args(Rule)),
    "scope": _one_of(*get_args(Scope)),
    "max_scale": _Allowed(
        "a finite number > 0",
        lambda x: x is None or (_is_number(x) and 0 < x < math.inf),
        "the scale is capped there and would never leave zero. Leave it None for no cap.",
    ),
    "normalize_lr": _FLAG,
    "own_warmup": _FLAG,
}
_MAX_GRAD_NORM = _Allowed(
    "None or a number > 0",
    lambda x: x is None or (_is_number(x) and x > 0),
    "gradients with a larger norm are scaled down to it. 1.0 is a common choice; None does not clip.",
)
_TOTAL_STEPS = _Allowed(
    "None or a whole number > 0",
    lambda x: x is None or (isinstance(x, int) and not isinstance(x, bool) and x > 0),
    "it is the number of optimizer steps in the run. Leave it None if that is not known.",
)
_DELTA_DTYPE = _Allowed(
    "None, torch.float32 or torch.bfloat16",
    lambda x: x is None or x in (torch.float32, torch.bfloat16),
    "it is what the sum of updates is kept in. bfloat16 halves its memory; None is float32, or wider.",
)

_EPS_ABOVE_ZERO = (
    "eps",
    "> 0",
    lambda eps: eps > 0,
    "the rule divides eps by eps in its first step. Use 1e-8, or rule='paper'.",
)
_COMBINATIONS: dict[str, tuple[tuple[str, str, Callable[[Any], bool], str], ...]] = {
    "experiments": (_EPS_ABOVE_ZERO,),
    "optax": (_EPS_ABOVE_ZERO,),
    "theory": (
        (
            "hindsight",
            "1",
            lambda hindsight: hindsight == 1,
            "the rule's bound assumes that all past updates are re-applied at the new scale. Use the default rule, or "
            "hindsight=1.",
        ),
        (
            "smoothing",
            "0",
            lambda smoothing: smoothing == 0,
            "a smoothed bet may exceed the wealth that the rule's bound allows, which makes the wealth negative. Use "
            "the default rule, or smoothing=0.",
        ),
        (
            "own_warmup",
            "False",
            lambda own_warmup: not own_warmup,
            "the rule's bound assumes that bets are never rescaled. Use the default rule, or own_warmup=False.",
        ),
    ),
}
"""By rule: an option, the value it needs, the test for that value, and the rest of the message."""


def _check_betas(betas: object) -> None:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) == 0:  # OmegaConf's are no lists
        raise ValueError(
            f"betas must be a non-empty tuple or list of numbers, got {betas!r}: each one is the discount factor of "
            "one tuner. The paper's are (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)."
        )
    for beta in betas:
        if not _is_number(beta) or not 0 < beta <= 1:
            raise ValueError(
                f"betas must be numbers in (0, 1], got {beta!r}: a beta is the discount factor of past gradients; 1 "
                "keeps all of them."
            )
