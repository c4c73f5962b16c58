"""What a tuner knows: plain floats, which a step copies, changes, and keeps once the weights have moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from mechanic_plugins.rule.settings import Settings
    from mechanic_plugins.rule.sums import Sums

__all__ = ["AHEAD", "Tuner"]

AHEAD = 40.0
"""A learning rate that rises is taken to go on rising for this many steps."""


@dataclass
class Tuner:
    """The numbers that both rules have. Each rule adds its own, and `observe`."""

    scale: float = 0.0
    """The factor on the base's updates that produced the current weights."""
    signal: float = 0.0
    """The last step's h: how the loss changes with the scale."""
    unit: float = 0.0
    """The base's peak lr when the run began, for which a published rule's constants are stated; 0 before that."""
    top_lr: float = 0.0
    """The base's highest lr so far, or announced."""
    gradients: float = 0.0
    """The number of nonzero gradients."""
    longest: float = 0.0
    """The largest norm among them."""
    sum_scale_lr: float = 0.0
    sum_lr: float = 0.0
    """The sums of scale * lr and of lr. Their ratio is the mean scale."""
    full_steps: float = 0.0
    """The steps at a scale, as the sum of lr / whole_lr(lr): at half the highest lr, a step counts as half of one."""
    steps: float = 0.0
    skipped: float = 0.0
    """How many steps were made, and skipped because of their gradients. All tuners of an optimizer agree."""

    def observe(self, sums: Sums, lr: float, whole_lr: float, settings: Settings) -> float:
        """Takes in one step's sums and returns the next scale. `lr` is the base's own in this step."""
        raise NotImplementedError

    def whole_lr(self, lr: float) -> float:
        """The lr of a whole step: the peak, of which a step at `lr` is a part.

        That is the highest lr so far, or announced. In a warm-up that a loop sets by hand, each lr is the highest so
        far. The peak is then taken to lie where the rise would be after `AHEAD` more steps.
        """
        return lr + AHEAD * (lr - self.top_lr) if lr > self.top_lr > 0 else max(lr, self.top_lr)

    def limit(self, scale: float) -> None:
        """Lowers the next scale to this one."""
        self.scale = scale

    def copy(self) -> Self:
        """A copy to change: lists are replaced, never changed in place."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        return twin

    @classmethod
    def width(cls, n: int) -> int:
        """How many numbers `numbers` returns with `n` betas."""
        return len(cls.floats()) + n * len(cls.lists())

    @classmethod
    def floats(cls) -> list[str]:
        """The names of the fields that are one number."""
        return [field.name for field in fields(cls) if field.type == "float"]

    @classmethod
    def lists(cls) -> list[str]:
        """The names of the fields that have one number per beta."""
        return [field.name for field in fields(cls) if field.type != "float"]

    def numbers(self) -> list[float]:
        """All fields as one list, the lists last: how a GPU holds them."""
        one = [getattr(self, name) for name in self.floats()]
        return one + [number for name in self.lists() for number in getattr(self, name)]

    @classmethod
    def of(cls, numbers: Sequence[float], n: int) -> Self:
        """The inverse of `numbers`, with `n` betas."""
        names = cls.floats()
        tuner = cls(**dict(zip(names, numbers, strict=False)))
        for index, name in enumerate(cls.lists()):
            at = len(names) + index * n
            setattr(tuner, name, list(numbers[at : at + n]))
        return tuner
