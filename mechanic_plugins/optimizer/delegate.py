"""An optimizer whose param_groups, state and defaults are another one's.

The wrapped optimizer is held as `base`: schedulers, GradScaler, FSDP and checkpoint code find what they expect.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.core import known_bases

__all__ = ["Delegate", "Group", "hooked"]

Group = dict[str, Any]


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with what torch puts around it, hooks and a mark for profilers, but only where they are in use.

    The mark takes the host longer than the launch of a whole step on a GPU.
    """
    marked = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_seen = torch._C._autograd._profiler_enabled() or known_bases.has_step_hooks(self)
        return (marked if is_seen else step)(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch does not put it around once more
    return wrapper


class Delegate(Optimizer):
    """What it does not have itself is read from the base."""

    base: Optimizer

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[Group]) -> None:
        self.base.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.base.defaults = value

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)
