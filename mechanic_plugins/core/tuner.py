"""The tuner: one function of plain floats that turns a step's sums into the next scale.

`decide` determines whether the step is made, clips, and has the rule choose the next scale S. The default rule
(`mechanic_plugins.core.relative`) moves the weights to x + S * u, where u is the base's update; a published rule
(`mechanic_plugins.core.published`) moves them to x_ref + S * Delta, where Delta is the sum of all updates.
`mechanic_plugins.kernels.triton_tuner` is the default rule on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.core import published, relative
from mechanic_plugins.core.row import Products, Row
from mechanic_plugins.core.settings import Settings

__all__ = ["CLIP_EPS", "SUMS", "Decision", "clip_factor", "decide"]

SUMS = Products._fields
"""The inner products that a step needs for each tuner, in this order. The number of gradients follows all of them."""
CLIP_EPS = 1e-6
"""Added to the norm before clipping, as in torch.nn.utils.clip_grad_norm_."""


class Decision(NamedTuple):
    """What a step will do: floats, or tensors if a GPU has decided.

    `skipped` distinguishes a step that is skipped because of its gradients from one without any. `befores` and `afters`
    are the scales before and after the step, one per tuner; `clip` is the factor on the gradients.
    """

    applied: bool | Tensor
    skipped: bool
    clip: float | Tensor
    befores: Sequence[float]
    afters: Sequence[float] | Tensor
    scales: Tensor | None = None
    """If a GPU has decided, one row per tuner: its scale, whether the step is made, and `clip`."""

    @classmethod
    def on_device(cls, scales: Tensor) -> Decision:
        """From the result of `gpu_tuner.launch`."""
        return cls(scales[0, 1], False, scales[0, 2], (), scales[:, 0], scales)

    def on_host(self) -> Decision:
        """The decision in floats. Waits for the device if that has decided."""
        if self.scales is None:
            return self
        rows = self.scales.tolist()
        afters = [after for after, _, _ in rows]
        return Decision(bool(rows[0][1]), False, rows[0][2], afters, afters)

    def table(self, device: torch.device) -> Tensor:
        """The decision as the rows that a GPU would have written."""
        if self.scales is not None:
            return self.scales
        rows = [[after, float(self.applied), self.clip] for after in self.afters]
        return torch.tensor(rows, dtype=torch.float64, device=device)


def decide(
    rows: Sequence[Row],
    sums: Sequence[float],
    lrs: Sequence[float],
    settings: Settings,
    *,
    hold: bool = False,
    max_grad_norm: float | None = None,
) -> Decision:
    """Advances the tuners by one step.

    A step is skipped if a sum is not finite or a gradient is an outlier. A step without any gradient is not made.

    Args:
        rows: The tuners, changed in place.
        sums: Over all parameters of all ranks.
        lrs: The base's learning rate in this step, for each tuner.
        settings: The constants, in the units of the scale in force.
        hold: Leave the scale as it is.
        max_grad_norm: Clip the gradients to this norm.
    """
    befores = [row.played for row in rows]
    is_finite = all(map(math.isfinite, sums))
    if not is_finite or sums[-1] == 0:
        return Decision(False, not is_finite, 1.0, befores, befores)
    clip = clip_factor(sums, max_grad_norm)
    each = zip(*[iter(sums[:-1])] * len(SUMS), strict=True)
    products = [Products(clip * dg, clip * clip * gg, *others) for dg, gg, *others in each]
    if settings.rule == "relative" and _has_outlier(rows, products):
        return Decision(False, True, 1.0, befores, befores)
    for row, sums_of_row, lr in zip(rows, products, lrs, strict=True):
        _step(row, sums_of_row, lr, settings, hold)
    return Decision(True, False, clip, befores, [row.played for row in rows])


def clip_factor(sums: Sequence[float], max_grad_norm: float | None) -> float:
    """The factor that `torch.nn.utils.clip_grad_norm_` would apply."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (math.sqrt(sum(sums[1:-1:6])) + CLIP_EPS))


def _has_outlier(rows: Sequence[Row], products: Sequence[Products]) -> bool:
    """Whether any tuner's gradient is an outlier. Also updates the longest norms."""
    found = False
    for row, sums in zip(rows, products, strict=True):
        norm = math.sqrt(sums.gg)
        if 0 < relative.OUTLIER * row.longest < norm:
            found, norm = True, relative.OUTLIER * row.longest
        row.longest = max(row.longest, norm)
    return found


def _step(row: Row, sums: Products, lr: float, settings: Settings, hold: bool) -> None:
    before, row.lr = row.played, max(row.lr, lr)
    if not hold:
        if settings.rule == "relative":
            relative.advance(row, sums, lr)
        else:
            published.advance(row, sums, settings)
        total = sum(row.s)
        if settings.max_scale is not None and total > settings.max_scale:
            row.s = [s * (settings.max_scale / total) for s in row.s]
        row.played = sum(row.s)
    relative.walk(row, before, lr)
    row.travelled, row.elapsed = row.travelled + row.played * lr, row.elapsed + (lr if row.played > 0 else 0.0)
