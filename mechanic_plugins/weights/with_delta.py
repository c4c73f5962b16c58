"""The move of the published rules, x = x_ref + S * Delta: the scale also multiplies past updates.

Made from where the weights are, x + S_old * u + (S_new - S_old) * Delta, a small move that is rounded only once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mechanic_plugins.kernels.dither import dithered

__all__ = ["move_dithered", "move_plain", "move_rounded"]

_HARDLY = 1e10
"""The update's part of a move is next to nothing if delta's factor is this many times its own."""


def move_plain(
    olds: list[Tensor],
    updates: list[Tensor],
    deltas: list[Tensor],
    old_scale: float,
    new_scale: float,
    *,
    shrink: float = 1.0,
) -> None:
    """Adds shrink * updates to the deltas, and writes the new weights over the updates, which are in their memory.

    The weights before the step, `olds`, are used up. Both parts of the move are added up first, in units of the update,
    because torch's multiplication of a list is slow. Where the update's part is next to nothing, they are added one by
    one.
    """
    torch._foreach_add_(deltas, updates, alpha=shrink)
    of_update, of_delta = shrink * old_scale, new_scale - old_scale
    if abs(of_delta) < _HARDLY * of_update:
        torch._foreach_add_(updates, deltas, alpha=of_delta / of_update)
        torch._foreach_add_(olds, updates, alpha=of_update)
    else:
        torch._foreach_add_(olds, updates, alpha=of_update)
        torch._foreach_add_(olds, deltas, alpha=of_delta)
    torch._foreach_copy_(updates, olds)


def move_dithered(
    old: Tensor, update: Tensor, delta: Tensor, old_scale: float, new_scale: float, *, place: int, step: int
) -> None:
    """The same where delta is bfloat16: it is rounded at random, so that small updates count on average."""
    wide = delta.to(update.dtype).add_(update)
    delta.copy_(dithered(wide, place=place, step=step))
    update.mul_(old_scale).add_(wide, alpha=new_scale - old_scale).add_(old)


def move_rounded(
    x: Tensor, old: Tensor, update: Tensor, delta: Tensor, ref: Tensor, old_scale: float, new_scale: float
) -> None:
    """The same for 16-bit weights, the rounding of ref + S * Delta. If they were changed from outside, so is ref."""
    was, now = (torch.tensor(scale, dtype=torch.float32, device=x.device) for scale in (old_scale, new_scale))
    expected = torch.addcmul(ref.float(), delta, was).to(x.dtype)
    ref.copy_(torch.where(old == expected, ref.float(), old.float() - was * delta))
    delta.add_(update.float())
    x.copy_(torch.addcmul(ref.float(), delta, now))
