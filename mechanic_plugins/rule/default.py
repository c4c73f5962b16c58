"""The default rule: a step should change the layers' maps by `TARGET`, corrected slowly by the run's evidence.

A good step changes the matrix of a typical layer by one to three per cent of its spectral norm, for SGD, Adam, Lion and
Muon alike. At some steps of a run (`is_due`) the change of every layer is measured; its mean over the run, per unit of
the learning rate, is A. With each gradient, z = <x_ref - x, g> tells whether the loss would now be lower had the run
moved further (z > 0) or less far. In full:

    f  = min(1, t / RAMP)                           # t: the number of gradients; the run's own warm-up
    w  = f * lr / highest lr so far                 # the weight of a step; n is the sum of w
    q  = z / rms(z) over the last WINDOW steps, at most 1 and at least -1
    while lr is at its highest:
        E += w * (q + TOP) / (n + PATIENCE)         # the evidence
        B  = 0
    while it is below:
        E += w * q / (n + PATIENCE)
        B += w * FALL / (n + PATIENCE)
    S  = TARGET * f / (A * highest lr) * exp(E + B)

The evidence moves the scale by a power law of time: noise averages out, and what is consistent adds up. A schedule that
falls takes the harm of the steps' bouncing away by itself, so evidence against the steps then counts for less: B. At a
constant rate that harm stays.

A is the root mean square over the run of the median layer's change, the larger one of two medians: over the matrices in
the spectral norm, and over the vectors in the Euclidean one. Between two measurements, updates are taken to grow as the
gradients do, once these are longer than at the measurements. A gradient longer than `CLIP` times the last ones is
shortened to that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import Sums
from mechanic_plugins.rule.tuner import Tuner

__all__ = [
    "BEGINNING",
    "CLIP",
    "FALL",
    "FALLEN",
    "PATIENCE",
    "RAMP",
    "TARGET",
    "TOO_LONG",
    "TOP",
    "WINDOW",
    "DefaultTuner",
    "is_due",
]

TARGET = 0.02
"""How much a step at the highest lr should change the median layer, as a share of its norm."""
RAMP = 20.0
"""The first steps grow until this one."""
WINDOW = 40.0
"""The number of steps by which z and the gradients' norms are judged."""
PATIENCE = 60.0
"""Evidence counts as if this many steps had been undecided before the first."""
TOP = -0.1
"""What is added to the evidence of each step while the schedule is at its top."""
FALL = 0.6
"""What each step below the schedule's top adds to the bonus, where evidence adds at most 1."""
CLIP = 5.0
"""Gradients this many times as long as the last ones are shortened to that."""
TOO_LONG = 10.0
"""A measured step this many times as long as the scale took it to be is taken back."""
BEGINNING = 10
"""The number of steps at the beginning that are all measured."""
_EVERY = 200
FALLEN = 1 - 1e-4
"""A schedule has begun to fall below this part of its top: rounding is no fall."""


def is_due(step: int) -> bool:
    """Whether this step is measured, counted from 1: the first ten, those at powers of two, and every 200th."""
    return step <= BEGINNING or step & (step - 1) == 0 or step % _EVERY == 0


@dataclass
class DefaultTuner(Tuner):
    """The default rule's tuner."""

    change_square: float = 0.0
    """A^2: how much a step changes the median layer, per unit of scale * lr."""
    norm_square: float = 0.0
    """The mean squared norm of the gradients when that was measured."""
    measured: float = 0.0
    """The part of `full_steps` that is in these means."""
    full_steps: float = 0.0
    """n, the sum of the steps' weights."""
    evidence: float = 0.0
    """E."""
    bonus: float = 0.0
    """B."""
    z_squares: float = 0.0
    z_count: float = 0.0
    """The moving sums of z^2 and of the steps' weights."""
    g_squares: float = 0.0
    g_count: float = 0.0
    """The moving sums of the squared norms of the gradients, and of their number."""

    def observe(self, sums: Sums, lr: float, settings: Settings) -> float:
        """Takes in one step's sums and returns the next scale."""
        slope = sums.dg + sums.dp
        self.signal = slope / (self.scale or 1.0)
        if sums.gg == 0 or self.top_lr == 0:
            return self.scale
        self.gradients += 1
        ramp = min(1.0, self.gradients / RAMP)
        weight = ramp * lr / self.top_lr
        if self.scale > 0:
            share, decay = weight / (self.full_steps + PATIENCE), 1 - weight / WINDOW
            self.z_squares = decay * self.z_squares + weight * slope * slope
            self.z_count = decay * self.z_count + weight
            has_fallen = lr < FALLEN * self.top_lr
            if self.z_squares > 0:
                q = -slope * math.sqrt(self.z_count / self.z_squares)
                self.evidence += share * (max(-1.0, min(1.0, q)) + (0.0 if has_fallen else TOP))
            self.bonus = self.bonus + share * FALL if has_fallen else 0.0
        if self.change_square == 0:
            return self.scale
        self.full_steps += weight
        growth = self.g_squares / self.g_count / self.norm_square if self.norm_square > 0 else 1.0
        change = math.sqrt(self.change_square * max(1.0, growth))
        return TARGET * ramp / (change * self.top_lr) * math.exp(self.evidence + self.bonus)

    @property
    def waits_for_measurement(self) -> bool:
        """Whether its weights have gradients and a learning rate, but no step of them was measured yet.

        A param group may get its first gradient, or leave lr 0, long after the others.
        """
        return self.change_square == 0 and self.g_count > 0 and self.top_lr > 0

    def take_measurement(self, change: float) -> bool:
        """Takes in how much the last step changed the median layer, per unit of scale * lr; 0 if none was changed.

        Returns whether the step may stay: it may not if it was absurdly long.
        """
        if not 0 < change < math.inf or self.g_count == 0:  # without a gradient there is weight decay at most
            return True
        square, norm_square = change * change, self.g_squares / self.g_count
        expected = self.change_square * max(1.0, norm_square / self.norm_square if self.norm_square > 0 else 1.0)
        may_stay = self.full_steps == 0 or square <= TOO_LONG**2 * expected
        if self.measured == 0 or self.full_steps == 0 or not may_stay:
            self.change_square, self.norm_square = square, norm_square
            if not may_stay:  # the scales so far were for updates of another length
                self.sum_scale_lr = self.sum_lr = 0.0
        else:
            old, new = self.measured, self.full_steps - self.measured
            self.change_square = (old * self.change_square + new * square) / (old + new)
            self.norm_square = (old * self.norm_square + new * norm_square) / (old + new)
        self.measured = self.full_steps
        return may_stay

    def restart(self) -> None:
        """Starts over from the present weights, because layers are trained that were not before."""
        self.gradients = self.full_steps = self.measured = self.evidence = self.bonus = 0.0
        self.sum_scale_lr = self.sum_lr = 0.0
