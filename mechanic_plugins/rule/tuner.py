"""What a tuner knows: plain floats, which a step copies, changes, and keeps once the weights have moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from mechanic_plugins.rule.settings import Settings
    from mechanic_plugins.rule.sums import Sums

__all__ = ["Tuner"]


@dataclass
class Tuner:
    """The numbers that both rules have. Each rule adds its own, and `observe`."""

    scale: float = 0.0
    """The factor on the base's updates that produced the current weights."""
    signal: float = 0.0
    """The last step's h: how the loss changes with the scale."""
    unit: float = 0.0
    """The base's lr when the run began, 0 before that. A published rule takes the announced peak: its constants are
    stated for that."""
    top_lr: float = 0.0
    """The base's highest lr so far."""
    gradients: float = 0.0
    """The number of nonzero gradients."""
    sum_scale_lr: float = 0.0
    sum_lr: float = 0.0
    """The sums of scale * lr and of lr. Their ratio is the mean scale."""
    steps: float = 0.0
    skipped: float = 0.0
    """How many steps were made, and skipped because of their gradients. All tuners of an optimizer agree."""

    def observe(self, sums: Sums, lr: float, settings: Settings) -> float:
        """Takes in one step's sums and returns the next scale. `lr` is the base's own in this step."""
        raise NotImplementedError

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
