"""An optimizer whose param_groups, state and defaults are another one's.

The wrapped optimizer is held as `base`: schedulers, GradScaler, FSDP and checkpoint code find what they expect.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Delegate", "Group"]

Group = dict[str, Any]


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
