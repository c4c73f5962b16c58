"""One tuner as plain floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["SCALARS", "VECTORS", "Products", "Row"]


class Products(NamedTuple):
    """The global inner products of a step: of gradient (g), weights (x), the penalty's gradient (p), and d.

    d is x - x_ref; with a published rule it is delta.
    """

    dg: float
    gg: float
    xx: float
    dx: float
    dd: float
    dp: float


@dataclass(slots=True)
class Row:
    """All that a tuner remembers.

    The lists have the paper's letters, one number for each beta. The default rule has one of each: `s` is the scale;
    `r`, `v` and `m` sum up z, z^2 and the steps. `q` and `w0` serve `rule="theory"` alone.

    `played` is the scale that made the current weights, `h` what the last step saw, `lr` the base's highest lr so far,
    `gradients` the number of those that were not zero, `longest` the norm of the longest. `size`, `touched`, `length`
    and `path` are the default rule's: see `mechanic_plugins.core.relative`. `travelled` is the sum of scale * lr and
    `elapsed` that of lr; their ratio is the mean scale.
    """

    s: list[float]
    r: list[float]
    m: list[float]
    v: list[float]
    q: list[float]
    w0: list[float]
    s_init: float
    played: float
    h: float
    lr: float
    gradients: float
    longest: float
    size: float
    length: float
    path: float
    travelled: float
    elapsed: float
    touched: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Row:
        """From the numbers of `numbers()`."""
        n = (len(numbers) - len(SCALARS)) // len(VECTORS)
        s, r, m, v, q, w0 = (list(numbers[at : at + n]) for at in range(0, n * len(VECTORS), n))
        return cls(s, r, m, v, q, w0, *numbers[n * len(VECTORS) :])

    def copy(self) -> Row:
        """One that can be changed."""
        return Row(
            self.s[:], self.r[:], self.m[:], self.v[:], self.q[:], self.w0[:],
            self.s_init, self.played, self.h, self.lr, self.gradients, self.longest,
            self.size, self.length, self.path, self.travelled, self.elapsed, self.touched,
        )  # fmt: skip

    def numbers(self) -> list[float]:
        """One after the other."""
        vectors = [*self.s, *self.r, *self.m, *self.v, *self.q, *self.w0]
        return vectors + [getattr(self, name) for name in SCALARS]


VECTORS = ("s", "r", "m", "v", "q", "w0")
SCALARS = tuple(name for name in Row.__slots__ if name not in VECTORS)
