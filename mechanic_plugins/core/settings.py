"""What a user may set, checked once, before anything is touched.

Every refusal names the value, the reason and the way out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

__all__ = ["PRESETS", "Preset", "Rule", "Scope", "Settings", "check_max_grad_norm"]

Preset = Literal["paper", "0.1"]
Rule = Literal["optimistic", "paper", "experiments", "optax", "theory"]
Scope = Literal["all", "group"]

_AS_PUBLISHED: dict[str, Any] = {"smoothing": 0.0, "hindsight": 1.0, "own_warmup": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "optimistic": {},
    "paper": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
    "experiments": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-10, **_AS_PUBLISHED},
    "optax": {"s_init": 1e-6, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
    "theory": {"s_init": 1e-8, "s_decay": 0.01, "eps": 1e-8, **_AS_PUBLISHED},
}
"""The constants that each rule was published with."""
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
"""The paper's constants, and what version 0.1 of this package did by default."""
_LEFT_OPEN = ("rule", "s_init", "first_move", "s_decay", "eps", "smoothing", "hindsight", "own_warmup")
"""May be None: the preset's value then, or the rule's, or the default."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The tuner's constants, stated for a base learning rate of 1 (see `normalize_lr`)."""

    betas: Sequence[float] = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
    s_init: float | Literal["auto"] = "auto"
    first_move: float = 1e-3
    s_decay: float = 0.0
    eps: float = 0.0
    rule: Rule = "optimistic"
    smoothing: float = 0.97
    hindsight: float = 0.3
    own_warmup: bool = True
    max_scale: float | None = None
    scope: Scope = "all"
    normalize_lr: bool = True

    def __post_init__(self) -> None:
        _check_betas(self.betas)
        object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
        _check_s_init(self.s_init)
        if not (_is_number(self.first_move) and 0 < self.first_move < 1):
            raise ValueError(
                f"first_move must be a number > 0 and < 1, got {self.first_move!r}: it is the share of the weights' "
                "norm that the first move makes with s_init='auto'. The default is 1e-3."
            )
        _check_number("s_decay", self.s_decay, low=0.0, why="it is the weight of a norm penalty", out="0 turns it off")
        _check_number(
            "eps", self.eps, low=0.0, why="it is added to the divisor sqrt(v)", out="the paper's value is 1e-8"
        )
        _check_number(
            "smoothing",
            self.smoothing,
            low=0.0,
            high=1.0,
            why="it is the weight of the past in a moving average",
            out="0 turns it off, 0.97 averages over about 33 steps",
        )
        if not (_is_number(self.hindsight) and 0 <= self.hindsight <= 1):
            raise ValueError(
                f"hindsight must be a number >= 0 and <= 1, got {self.hindsight!r}: it is the share of a change of "
                "scale that the updates of the past follow. 1 is the paper's, 0 leaves the past alone."
            )
        _check_choice("rule", self.rule, get_args(Rule))
        _check_choice("scope", self.scope, get_args(Scope))
        if self.rule in ("experiments", "optax") and self.eps == 0:
            raise ValueError(
                f"eps must be > 0 with rule={self.rule!r}, got {self.eps!r}: "
                "that rule divides eps by eps in its first step. Use 1e-8, or rule='paper'."
            )
        if self.rule == "theory" and self.hindsight != 1:
            raise ValueError(
                f"hindsight must be 1 with rule='theory', got {self.hindsight!r}: the rule's bound is for weights that "
                "are all played again at the new scale. Use the default rule, or hindsight=1."
            )
        if self.rule == "theory" and self.smoothing:
            raise ValueError(
                f"smoothing must be 0 with rule='theory', got {self.smoothing!r}: a smoothed bet may exceed the wealth "
                "that the rule's bound allows, and the wealth then falls below 0. Use the default rule, or smoothing=0."
            )
        if self.max_scale is not None and not (_is_number(self.max_scale) and 0 < self.max_scale < math.inf):
            raise ValueError(
                f"max_scale must be a finite number > 0, got {self.max_scale!r}: "
                "the scale is capped there and would never leave zero. Leave it None for no cap."
            )
        if self.rule == "theory" and self.own_warmup:
            raise ValueError(
                f"own_warmup must be False with rule='theory', got {self.own_warmup!r}: the rule's bound is for bets "
                "that are never restated. Use the default rule, or own_warmup=False."
            )
        for name in ("normalize_lr", "own_warmup"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")

    @classmethod
    def from_preset(cls, preset: str | None = None, **values: Any) -> Settings:
        """Settings from a preset's constants, or those the rule was published with; a value that is not None wins."""
        chosen = {name: value for name, value in values.items() if value is not None or name not in _LEFT_OPEN}
        if preset is None:
            constants = PUBLISHED.get(chosen.get("rule", "optimistic"), {})
        else:
            _check_choice("preset", preset, tuple(PRESETS))
            constants = PRESETS[preset]
        return cls(**{**constants, **chosen})

    def at_lr(self, lr: float) -> Settings:
        """The same trajectory for a base whose updates are `lr` times as long."""
        return replace(
            self,
            s_init=self.s_init if isinstance(self.s_init, str) else self.s_init / lr,
            s_decay=self.s_decay * lr,
            eps=self.eps * lr,
        )


def check_max_grad_norm(value: object) -> None:
    """Rejects what gradients cannot be clipped to. None clips nothing; no constant of the tuner's."""
    if value is not None and not (_is_number(value) and value > 0):  # type: ignore[operator]
        raise ValueError(
            f"max_grad_norm must be None or a number > 0, got {value!r}: gradients of a longer norm are scaled down to "
            "it. 1.0 is a common choice; None leaves them as they are."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: object, *, low: float, high: float = math.inf, why: str, out: str) -> None:
    if not _is_number(value) or not low <= value < high:  # type: ignore[operator]
        upper = "" if high == math.inf else f" and < {high:g}"
        raise ValueError(f"{name} must be a finite number >= {low:g}{upper}, got {value!r}: {why}; {out}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_betas(betas: Sequence[float]) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) == 0:
        raise ValueError(
            f"betas must be a non-empty tuple or list of numbers, got {betas!r}: each one is the memory of one tuner. "
            "The paper's are (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)."
        )
    for beta in betas:
        if not _is_number(beta) or not 0 < beta <= 1:
            raise ValueError(
                f"betas must be numbers in (0, 1], got {beta!r} among them: it is the share of the past that a tuner "
                "keeps; 1 keeps all of it."
            )


def _check_s_init(s_init: object) -> None:
    if s_init == "auto":
        return
    if not _is_number(s_init) or not 0 < s_init < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"s_init must be 'auto' or a finite number > 0, got {s_init!r}: the tuner multiplies its wealth by s_init "
            "and would never leave zero. Use 'auto', or the paper's 1e-8."
        )
