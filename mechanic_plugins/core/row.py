"""One tuner as plain floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["SCALARS", "VECTORS", "Products", "Row"]


class Products(NamedTuple):
    """The global inner products of a step: gradient (g), weights (x), gradient of the penalty (p), and d.

    d is x - x_ref, or delta with a published rule.
    """

    dg: float
    gg: float
    xx: float
    dx: float
    dd: float
    dp: float


@dataclass(slots=True)
class Row:
    """The state of one tuner.

    The lists have the paper's letters, with one number per beta. The default rule has one of each: `s` is the scale,
    `r`, `v` and `m` are the moving sums of z, z^2 and the steps. Only `rule="theory"` uses `q` and `w0`.

    `played` is the scale that produced the current weights, `h` the signal of the last step, `lr` the base's highest lr
    so far, `gradients` the number of nonzero gradients and `longest` the largest norm among them. `size`, `touched`,
    `length` and `path` belong to the default rule (`mechanic_plugins.core.relative`). `travelled` is the sum of
    scale * lr and `elapsed` that of lr; their ratio is the mean scale.
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
        """The inverse of `numbers`."""
        n = (len(numbers) - len(SCALARS)) // len(VECTORS)
        s, r, m, v, q, w0 = (list(numbers[at : at + n]) for at in range(0, n * len(VECTORS), n))
        return cls(s, r, m, v, q, w0, *numbers[n * len(VECTORS) :])

    def copy(self) -> Row:
        """A copy that shares no lists."""
        return Row(
            self.s[:], self.r[:], self.m[:], self.v[:], self.q[:], self.w0[:],
            self.s_init, self.played, self.h, self.lr, self.gradients, self.longest,
            self.size, self.length, self.path, self.travelled, self.elapsed, self.touched,
        )  # fmt: skip

    def numbers(self) -> list[float]:
        """All fields as one flat list."""
        vectors = [*self.s, *self.r, *self.m, *self.v, *self.q, *self.w0]
        return vectors + [getattr(self, name) for name in SCALARS]


VECTORS = ("s", "r", "m", "v", "q", "w0")
SCALARS = tuple(name for name in Row.__slots__ if name not in VECTORS)
