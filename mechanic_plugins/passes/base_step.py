"""One step of the base with other learning rates than its param groups', on clipped gradients."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import PREFIX, is_16_bit
from mechanic_plugins.distributed.sharding import is_dtensor, local
from mechanic_plugins.passes.plan import Closure

__all__ = ["BaseStep", "is_discarded", "is_observed", "warn_of_own_iterates"]


class BaseStep:
    """Steps one base. `may_fuse`: use torch's fused CPU kernels if the base leaves the choice open."""

    def __init__(self, base: Any, params: Sequence[Tensor], *, may_fuse: bool) -> None:
        self.base, self._params = base, params
        is_sharded = any(map(is_dtensor, params))
        self._may_fuse = may_fuse and not is_sharded and known_bases.can_fuse_on_cpu(base)
        self._is_in_float32 = all(p.dtype == torch.float32 for group in base.param_groups for p in group["params"])

    def __call__(
        self,
        lrs: Sequence[Any],
        clip: float | Tensor = 1.0,
        *,
        applied: bool | Tensor = True,
        closure: Closure | None = None,
    ) -> Any:
        """If `applied` is a tensor, it tells a fused base on the device whether to skip this step."""
        base, groups = self.base, self.base.param_groups
        fuses = self._may_fuse and self._have_rows()
        factors = self._factors(clip, applied, fuses)
        before = [dict.get(group, "lr") for group in groups]
        try:
            for group, lr in zip(groups, lrs, strict=bool(lrs)):
                group["lr"] = lr
                if fuses:
                    group["fused"] = True
            if factors:
                vars(base).update(factors)
            step = _step_of(base)
            return step() if closure is None else step(closure)
        finally:
            for group, lr in zip(groups, before, strict=True):
                if lr is not None:
                    group["lr"] = lr
                if fuses:
                    group["fused"] = None
            for name in factors:
                vars(base).pop(name, None)

    def _factors(self, clip: float | Tensor, applied: bool | Tensor, fuses: bool) -> dict[str, Tensor]:
        """What a fused base takes with its step, as from a grad scaler. For other bases, clips the gradients here."""
        if isinstance(clip, Tensor):
            assert isinstance(applied, Tensor)
            return {"grad_scale": (1 / clip).float(), "found_inf": (1 - applied).float()}
        if clip >= 1:
            return {}
        if fuses and self._is_in_float32:  # the dtype of the kernels' own factor
            return {"grad_scale": torch.tensor(1 / clip, dtype=torch.float32)}
        grads = [local(p.grad) for group in self.base.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(grads, clip)  # in place, as torch.nn.utils.clip_grad_norm_ does
        return {}

    def _have_rows(self) -> bool:
        """Whether the gradients are contiguous and of the weights' dtype. The plan has checked everything else."""
        grads = [p.grad for p in self._params if p.grad is not None]
        have_dtypes = False not in [p.grad.dtype == p.dtype for p in self._params if p.grad is not None]
        return have_dtypes and all(map(Tensor.is_contiguous, grads))


def is_observed(optimizer: Optimizer) -> Any:
    """Whether hooks on the step, or the profiler, are in use."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    has_hooks = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return has_hooks or torch._C._autograd._profiler_enabled()


def _step_of(base: Any) -> Any:
    """The base's step, without torch's wrapper for hooks and profiling unless in use: that takes 20 microseconds."""
    wrapper = type(base).step
    if "step" in vars(base) or getattr(wrapper, "hooked", False) is not True or is_observed(base):
        return base.step
    return functools.partial(wrapper.__wrapped__, base)


def is_discarded(base: Optimizer, p: Tensor) -> bool:
    """Whether to drop the first update of 16-bit weights under an unrecognised base.

    That step has to run on the weights themselves, because only the base knows the dtypes of the state it creates, and
    the weights' rounding would decide how much of the update is left.
    """
    return is_16_bit(p.dtype) and not known_bases.is_torchs_own(base) and not base.state.get(p)


def warn_of_own_iterates(base: Optimizer, params: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    """Warns in a parameter's first step if the base keeps a copy of the weights. `olds` are the weights before it."""
    if known_bases.is_torchs_own(base):
        return
    for p, old in zip(params, olds, strict=True):
        state = base.state.get(p)
        if not isinstance(state, dict) or any(str(name).startswith(PREFIX) for name in state):
            continue
        known = {name: local(value) for name, value in state.items()}
        if name := known_bases.own_iterate(known, local(p.grad), old, local(p)):
            warnings.warn(
                f"{type(base).__name__} keeps a copy of the weights in its state ({name!r}). If its steps start from "
                "there (Lookahead, averaged iterates), Mechanic moves the weights from under it, and training goes "
                "wrong: mechanize the plain optimizer that it is built on, such as AdamW.",
                stacklevel=2,
            )
            return
