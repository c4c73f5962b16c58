"""The default rule: n steps should move the weights by PRIOR * sqrt(n) of their size, corrected by the run's evidence.

n steps of length a whose directions are mostly unrelated move the weights by a * sqrt(n). The distance from the start
therefore tells how long the base's updates are, U, and the scale follows from U. The evidence of the run corrects it:
with each gradient, z = <x_ref - x, g> tells whether the loss would now be lower had the run moved further (z > 0,
favourable) or less far (z < 0, adverse). In full:

    size = mean(|x| ** (1 / 3)) ** 3 of the nonzero weights at the start; at least |x - x_ref| / sqrt(N) / FAR
    U    = |x - x_ref| / sqrt(sum((S * lr)^2)), as a root mean square over the run; START * |u| at first
    rho  = sum(z) / sqrt(sum(z^2) * WINDOW), -1 < rho < 1
    S    = PRIOR * size * N ** POWER / (highest lr * U) * exp(GAIN * rho), with N the number of trained weights

The norm of all weights grows like the square root of N, a good step more slowly: the larger the network, the smaller
the fraction of it that one step may change. The sums of z are moving sums over the last `WINDOW` steps; early on they
hold fewer, and count for less. A step is weighted by its learning rate relative to the highest one. Where the scale is
below the run's mean, its evidence is also weighted by that ratio: steps that hardly move say little. While the lr rises
to new heights, in a warm-up that a loop sets by hand, the highest one is where it would be `AHEAD` steps later.

The cube roots tell how large a typical weight is; a root mean square would be that of an embedding or of the norms'
gains, a geometric mean that of filters that died. A weight above 1, such as an output bias, counts as 1. If all start
close to 0, their distance from there says more. N counts the weights with a gradient in one of the first `BEGINNING`
steps: layers behind a layer of zeros get none in the first one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import Sizes, Sums
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["BEGINNING", "FAR", "GAIN", "OUTLIER", "POWER", "PRIOR", "START", "WINDOW", "DefaultTuner"]

PRIOR = 0.35
"""How far a step should move the weights, as a share of their size."""
POWER = 0.375
"""How the size grows with the number of weights: 1/2 would make it grow like their norm."""
_OF_ZEROS = 0.5
"""The size of a typical weight if all of them are 0."""
START = 2.0
"""The first update counts as this many times its length, because the next ones point the same way."""
GAIN = 3.0
"""How far the evidence can move the scale: by a factor of exp(3) = 20 up or down."""
WINDOW = 40.0
"""The number of steps that serve as evidence. While there are fewer, the missing ones count as undecided."""
BEGINNING = 3
"""The number of gradients from which the trained weights are counted."""
OUTLIER = 100.0
"""Gradients this many times longer than any before are skipped. Each skip raises the limit by the same factor, so that
gradients that really have grown are skipped only once or twice."""
FAR = math.exp(GAIN)
"""By how much an early update may be too long, or the weights too small at first: the evidence corrects no more."""


@dataclass
class DefaultTuner(Tuner):
    """The default rule's tuner."""

    size: float = 0.0
    """How large a typical weight is."""
    trained: float = 0.0
    """N, the number of trained weights."""
    length: float = 0.0
    """U, the length of the base's updates."""
    path: float = 0.0
    """The sum of (scale * lr)^2."""
    z_sum: float = 0.0
    z_squares: float = 0.0
    z_count: float = 0.0
    """The moving sums of z, of z^2 and of the steps."""

    def observe(self, sums: Sums, lr: float, whole_lr: float, settings: Settings) -> float:
        """Takes in one step's sums and returns the next scale."""
        slope = sums.dg + sums.dp
        self.signal = slope / (self.scale or 1.0)
        if sums.gg == 0:
            return self.scale
        if self.gradients < BEGINNING:
            self.trained = max(self.trained, sums.sizes().trained)
        if self.gradients == 0:  # nothing has moved yet: these sums are sizes
            self.size, self.signal = _typical_size(sums.sizes()), 0.0
        elif self.scale > 0:
            z, weight, steps_so_far = -slope, lr / whole_lr, self.sum_lr / whole_lr
            share = min(1.0, self.scale * self.sum_lr / self.sum_scale_lr) if self.sum_scale_lr > 0 else 1.0
            evidence = weight * share
            decay = 1 - evidence / WINDOW
            self.z_sum = decay * self.z_sum + evidence * z
            self.z_squares = decay * self.z_squares + evidence * z * z
            self.z_count = decay * self.z_count + evidence
            if self.path > 0:
                square = steps_so_far * self.length**2 + weight * sums.dd / self.path
                self.length = math.sqrt(square / (steps_so_far + weight))
        elif self.path > 0:
            self.length = START * math.sqrt(sums.dd / self.path)
        self.gradients += 1
        if self.length == 0 or whole_lr == 0:
            return self.scale
        moved = math.sqrt(sums.dd / self.trained) if self.scale > 0 and self.path > 0 else 0.0
        prior: float = PRIOR * max(self.size, moved / FAR) * self.trained**POWER / (whole_lr * self.length)
        energy = self.z_squares * WINDOW
        rho = self.z_sum / math.sqrt(energy) if energy > 0 else 0.0
        return prior * math.exp(GAIN * rho)

    def extend_path(self, old_scale: float, lr: float) -> None:
        """Adds a step to the path, unless its update was only measured."""
        if old_scale == 0 and (self.scale > 0 or lr > 0):
            self.path = 0.0
        self.path += ((self.scale or 1.0) * lr) ** 2

    def restart(self, dd: float) -> bool:
        """Starts over with the new update length if the last step was absurdly long. Returns whether it was."""
        if not 0 < (FAR * self.length) ** 2 * self.path < dd or self.scale == 0:
            return False
        self.length = min(math.sqrt(dd / self.path), OUTLIER**2 * self.length)
        self.z_sum = self.z_squares = self.z_count = 0.0
        self.path = self.sum_scale_lr = self.sum_lr = self.full_steps = 0.0
        return True


def _typical_size(sizes: Sizes) -> float:
    return (sizes.roots / sizes.nonzero) ** 3 if sizes.nonzero else _OF_ZEROS
