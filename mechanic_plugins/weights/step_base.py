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

from mechanic_plugins.distributed.sharding import is_dtensor, local
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.plan import Closure
from mechanic_plugins.weights.slots import PREFIX, is_16_bit

__all__ = ["StepBase", "is_discarded", "is_observed", "warn_of_own_iterates"]


class StepBase:
    """Steps one base. `may_fuse`: use torch's fused CPU kernels if the base leaves the choice open."""

    def __init__(self, base: Any, params: Sequence[Tensor], *, may_fuse: bool) -> None:
        self.base, self._params = base, params
        is_sharded = any(map(is_dtensor, params))
        self._may_fuse = may_fuse and not is_sharded and facts.can_fuse_on_cpu(base)
        self._is_in_float32 = all(p.dtype == torch.float32 for group in base.param_groups for p in group["params"])

    def __call__(
        self,
        lrs: Sequence[Any],
        clip: float | Tensor = 1.0,
        *,
        is_made: bool | Tensor = True,
        closure: Closure | None = None,
    ) -> Any:
        """If `clip` and `is_made` are tensors, they tell a fused base on the device what to do."""
        base, groups, factors = self.base, self.base.param_groups, {}
        fuses = self._may_fuse and False not in [
            p.grad is None or (p.grad.dtype == p.dtype and p.grad.is_contiguous()) for p in self._params
        ]
        if isinstance(clip, Tensor):
            assert isinstance(is_made, Tensor)
            factors = {"grad_scale": (1 / clip).float(), "found_inf": (1 - is_made).float()}
        elif clip < 1 and fuses and self._is_in_float32:  # the dtype of the kernels' own factor
            factors = {"grad_scale": torch.tensor(1 / clip, dtype=torch.float32)}
        elif clip < 1:
            grads = [local(p.grad) for group in groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(grads, clip)  # in place, as torch.nn.utils.clip_grad_norm_ does
        before = [group.get("lr") for group in groups]
        try:
            for group, lr in zip(groups, lrs, strict=bool(lrs)):
                group["lr"] = lr
                if fuses:
                    group["fused"] = True
            vars(base).update(factors)
            step, wrapper = base.step, type(base).step
            if "step" not in vars(base) and getattr(wrapper, "hooked", False) is True and not is_observed(base):
                # without torch's wrapper for hooks and profiling, which takes 20 microseconds
                step = functools.partial(wrapper.__wrapped__, base)
            return step() if closure is None else step(closure)
        finally:
            for group, lr in zip(groups, before, strict=True):
                if lr is not None:
                    group["lr"] = lr
                if fuses:
                    group["fused"] = None
            for name in factors:
                vars(base).pop(name, None)


def is_observed(optimizer: Optimizer) -> Any:
    """Whether hooks on the step, or the profiler, are in use."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    has_hooks = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return has_hooks or torch._C._autograd._profiler_enabled()


def is_discarded(base: Optimizer, p: Tensor) -> bool:
    """Whether to drop the first update of 16-bit weights under an unrecognised base.

    That step has to run on the weights themselves, because only the base knows the dtypes of the state it creates, and
    the weights' rounding would decide how much of the update is left.
    """
    return is_16_bit(p.dtype) and not facts.is_torchs_own(base) and not base.state.get(p)


def warn_of_own_iterates(base: Optimizer, params: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    """Warns in a parameter's first step if the base keeps a copy of the weights. `olds` are the weights before it."""
    if facts.is_torchs_own(base):
        return
    for p, old in zip(params, olds, strict=True):
        state = base.state.get(p)
        if not isinstance(state, dict) or any(str(name).startswith(PREFIX) for name in state):
            continue
        known = {name: local(value) for name, value in state.items()}
        if name := facts.own_iterate(known, local(p.grad), old, local(p)):
            warnings.warn(
                f"{type(base).__name__} keeps a copy of the weights in its state ({name!r}). If its steps start from "
                "there (Lookahead, averaged iterates), Mechanic moves the weights from under it, and training goes "
                "wrong: mechanize the plain optimizer that it is built on, such as AdamW.",
                stacklevel=2,
            )
            return
