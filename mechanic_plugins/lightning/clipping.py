"""`gradient_clip_val` without a pass of its own: Mechanic's step knows the norm and clips by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mechanic_plugins.api import find
from mechanic_plugins.core import known_bases
from mechanic_plugins.optimizer import MechanicOptimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["clip_in_the_step", "leave_clipping_to_lightning"]

_PLANTED = "clip_grad_by_norm"
_HOOKS = ("configure_gradient_clipping", "clip_gradients", "optimizer_step")
"""A module that overrides one of them may look at clipped gradients, or clip in some steps only."""


def clip_in_the_step(trainer: Trainer, module: LightningModule) -> None:
    """Has the step clip where Lightning would clip by the norm in every step, right before the step. Idempotent.

    Lightning still clips by value, for modules that clip by themselves, with precision plugins and strategies that do
    it their own way (FSDP1, DeepSpeed), and for bases that may evaluate the closure more than once.
    """
    precision: Any = trainer.precision_plugin
    if _PLANTED not in vars(precision) and _is_lightnings(type(precision)) and _is_automatic(module):
        setattr(precision, _PLANTED, _StepClips(precision))


def leave_clipping_to_lightning(trainer: Trainer) -> None:
    """Undoes `clip_in_the_step`."""
    planted: _StepClips | None = vars(trainer.precision_plugin).pop(_PLANTED, None)
    if planted is not None:
        planted.restore()


class _StepClips:
    """In the place of a precision plugin's `clip_grad_by_norm`, which Lightning calls right before the step."""

    def __init__(self, precision: Any) -> None:
        self.precision = precision
        self._own_norms: dict[MechanicOptimizer, float | None] = {}

    def __call__(self, optimizer: Any, clip_val: int | float) -> None:
        mechanic = find(optimizer)
        if mechanic is None or not known_bases.is_torchs_own(mechanic.base):
            type(self.precision).clip_grad_by_norm(self.precision, optimizer, clip_val)
            return
        own = self._own_norms.setdefault(mechanic, mechanic.max_grad_norm)
        mechanic.max_grad_norm = clip_val if own is None else min(own, clip_val)

    def restore(self) -> None:
        for mechanic, own in self._own_norms.items():
            mechanic.max_grad_norm = own


def _is_lightnings(kind: type) -> bool:
    """Whether the plugin clips as all do by default: clip_grad_norm_ over the optimizer's parameters."""
    owner = next(parent for parent in kind.__mro__ if _PLANTED in vars(parent))
    names = ("main_params", "clip_gradients")
    owners = [next(parent for parent in kind.__mro__ if name in vars(parent)) for name in names]
    return owner.__name__ == "Precision" and all(o.__name__ in ("Precision", "MixedPrecision") for o in owners)


def _is_automatic(module: LightningModule) -> bool:
    overridden = [name for name in _HOOKS for parent in type(module).__mro__ if name in vars(parent)]
    return module.automatic_optimization and sorted(overridden) == sorted(_HOOKS)
