"""The decision about a step: whether it is made, how much the gradients are clipped, and the next scale.

The default rule (`mechanic_plugins.rule.default`) moves the weights to x + S * u, where u is the base's update; a
published rule (`mechanic_plugins.rule.published`) moves them to x_ref + S * Delta, where Delta is the sum of all
updates. `mechanic_plugins.kernels.triton_tuner` is the same in a GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from mechanic_plugins.rule.default import CLIP, WINDOW, DefaultTuner
from mechanic_plugins.rule.published import PublishedTuner
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import WIDTH, Sums
from mechanic_plugins.rule.tuner import Tuner

__all__ = ["CLIP_EPS", "Decision", "clip_factor", "decide", "new_tuners"]

CLIP_EPS = 1e-6
"""Added to the norm before clipping, as in torch.nn.utils.clip_grad_norm_."""


class Decision(NamedTuple):
    """What a step will do: in floats, or in tensors if a GPU has decided."""

    tuners: list[Tuner]
    """As they will be once the step is made. Those of a skipped step have only counted it."""
    is_made: bool | Tensor
    clip: float | Tensor
    """The factor on the gradients."""
    old_scales: Sequence[float]
    new_scales: Sequence[float] | Tensor
    flat: Tensor | None = None
    """The tuners' numbers, if a GPU has decided."""
    lrs: Sequence[float] = ()
    """The tuners' learning rates, if the host has decided."""
    table: Tensor | None = None
    """What it has decided, one row per tuner: see `mechanic_plugins.kernels.gpu_tuner.launch`."""

    @classmethod
    def on_device(cls, tuners: list[Tuner], flat: Tensor, table: Tensor) -> Decision:
        """From what the kernel wrote; `tuners` are out of date."""
        return cls(tuners, table[0, 1], table[0, 2], (), table[:, 0], flat=flat, table=table)


def new_tuners(settings: Settings, count: int) -> list[Tuner]:
    """Tuners before the first step."""
    n = settings.n
    if settings.rule == "relative":
        return [DefaultTuner() for _ in range(count)]
    first = settings.s_init if settings.rule in ("experiments", "optax") else 0.0
    zeros = [0.0] * n
    return [PublishedTuner(s=[first] * n, r=zeros, m=zeros, v=zeros, q=zeros, w0=zeros) for _ in range(count)]


def decide(
    tuners: Sequence[Tuner],
    vector: Sequence[float],
    lrs: Sequence[float],
    settings: Settings,
    *,
    hold: bool = False,
    max_grad_norm: float | None = None,
) -> Decision:
    """Advances the tuners by one step.

    A step is skipped if a sum is not finite. A step without any gradient is not made. The default rule shortens
    gradients that are far longer than the last ones.

    Args:
        tuners: Left as they are.
        vector: The sums over all parameters of all ranks.
        lrs: The base's learning rate in this step, for each tuner.
        settings: The constants.
        hold: Leave the scale as it is.
        max_grad_norm: Clip the gradients to this norm.
    """
    scales, new = [tuner.scale for tuner in tuners], [tuner.copy() for tuner in tuners]
    if vector[-1] == 0:
        return Decision(new, False, 1.0, scales, scales)
    is_sound, clip = all(map(math.isfinite, vector)), 1.0
    if is_sound:
        if max_grad_norm is not None:
            clip = clip_factor(vector, max_grad_norm)
        if settings.rule == "relative":
            clip *= _outlier_factor(tuners, vector, clip)
        parts = [Sums(*vector[at : at + WIDTH]) for at in range(0, len(vector) - 1, WIDTH)]
        if clip != 1:
            parts = [sums._replace(dg=clip * sums.dg, gg=clip * clip * sums.gg) for sums in parts]
    if not is_sound:
        for tuner in new:
            tuner.skipped += 1
        return Decision(new, False, 1.0, scales, scales)
    for tuner, sums, lr in zip(new, parts, lrs, strict=True):
        tuner.top_lr = max(tuner.top_lr, lr)
        if isinstance(tuner, DefaultTuner) and sums.gg > 0 and (lr > 0 or not hold):
            tuner.g_squares = (1 - 1 / WINDOW) * tuner.g_squares + sums.gg
            tuner.g_count = (1 - 1 / WINDOW) * tuner.g_count + 1
        if not hold:
            tuner.scale = tuner.observe(sums, lr, settings)
            if settings.max_scale is not None and tuner.scale > settings.max_scale:
                tuner.limit(settings.max_scale)
        tuner.steps += 1
        tuner.sum_scale_lr += tuner.scale * lr
        if tuner.scale > 0:
            tuner.sum_lr += lr
    return Decision(new, True, clip, scales, [tuner.scale for tuner in new], lrs=lrs)


def clip_factor(vector: Sequence[float], max_grad_norm: float) -> float:
    """The factor that `torch.nn.utils.clip_grad_norm_` would apply."""
    return min(1.0, max_grad_norm / (math.sqrt(sum(vector[1:-1:WIDTH])) + CLIP_EPS))


def _outlier_factor(tuners: Sequence[Tuner], vector: Sequence[float], clip: float) -> float:
    """The factor that shortens gradients to `CLIP` times the root mean square of the last ones' norms."""
    usual = 0.0
    for tuner, square in zip(tuners, vector[1:-1:WIDTH], strict=True):
        if isinstance(tuner, DefaultTuner) and tuner.g_count > 0:
            usual += tuner.g_squares / tuner.g_count
        elif square > 0:  # its first gradient
            return 1.0
    norm = clip * math.sqrt(sum(vector[1:-1:WIDTH]))
    return CLIP * math.sqrt(usual) / norm if 0 < CLIP * math.sqrt(usual) < norm else 1.0
