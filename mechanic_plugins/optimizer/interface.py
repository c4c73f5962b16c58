"""The wrapper around the base: its parts, and everything that checkpoints, schedulers, frameworks and users see.

The wrapped optimizer is `base`; param_groups, state and defaults are the base's own, so that schedulers, GradScaler,
FSDP and checkpoint code find what they expect. `mechanic_plugins.optimizer.step` adds the step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.format import holds_tuner
from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.groups import average, names_of, show_scales
from mechanic_plugins.core.param_state import PREFIX
from mechanic_plugins.core.settings import Settings, check_max_grad_norm
from mechanic_plugins.core.tuner import SUMS, Decision
from mechanic_plugins.core.tuner_state import gradient_norm
from mechanic_plugins.distributed.reduction import Shares
from mechanic_plugins.distributed.sharding import is_fake
from mechanic_plugins.optimizer.keeper import Keeper
from mechanic_plugins.optimizer.recording import Recorder
from mechanic_plugins.optimizer.skips import Skips
from mechanic_plugins.optimizer.tuning import Tuning
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.planner import Backend, Planner
from mechanic_plugins.passes.slots import Slots

__all__ = ["Group", "Wrapper", "of_the_base"]

Group = dict[str, Any]
StateDict = dict[str, Any]

_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def of_the_base(name: str) -> Any:
    """A property that reads and writes the base's attribute."""
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


class Tuner(NamedTuple):
    """The tuner's state in units of the base's learning rate: n-vectors, or one row per param group."""

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor


class Wrapper(Optimizer):
    """The base, the settings and the tuner.

    `scale`, `grad_norm` and `tuner` do not synchronise with the device; `effective_lrs`, `metrics()` and `state_dict()`
    do. Attributes that it lacks are read from the base.
    """

    # GradScaler must unscale and decide itself: a fused base would skip its own update, but not Mechanic's.
    _step_supports_amp_scaling = False
    max_grad_norm: float | None = None
    """Every step clips the gradients to this norm. It is not part of the settings, so checkpoints do not contain it."""
    delta_dtype: torch.dtype | None = None
    """The dtype of the references, if one was chosen. Checkpoints hold them as they are."""

    def __init__(
        self,
        base: Optimizer,
        settings: Settings,
        *,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
        max_grad_norm: float | None = None,
        delta_dtype: torch.dtype | None = None,
    ) -> None:
        known_bases.check_supported(base)
        self.base, self.settings = base, settings
        self.group, self.sync_replicas, self.backend = group, sync_replicas, backend
        self.max_grad_norm, self.delta_dtype = max_grad_norm, delta_dtype
        self._start(has_history=bool(base.state))
        self._keeper.begin()

    def _start(self, *, has_history: bool) -> None:
        """Creates the parts, which are not pickled. Lightning's proxies call methods with another `self`."""
        base, settings = self.base, self.settings
        units = Units(base, settings)
        slots = Slots(settings.rule, self.delta_dtype)
        self._keeper = Keeper(base, settings, units, slots, has_history=has_history)
        self._tuning = Tuning(base, settings, units)
        self._planner = Planner(base, self.backend, settings, slots)
        self._recorder = Recorder(self._tuning)
        self._skips = Skips()
        self.shares_by_engine: Callable[[Sequence[Tensor]], Shares] | None = None
        """Set by engines that shard the parameters themselves: how their sums are reduced."""
        self._known_params: list[Tensor] = []
        self._has_data = True
        self._known_shares: tuple[Sequence[Tensor], Shares] | None = None
        self._decision: Decision | None = None
        """The decision that an engine's next steps apply."""
        self._dry_state: object = None
        self._last: dict[str, Any] = {}
        """The sums and the learning rates of the last step."""
        for name in _HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()
        self._itself = ref(self)
        show_scales(self.param_groups, self._itself)

    # ---------------------------------------------------------------- the base's

    param_groups = of_the_base("param_groups")
    state = of_the_base("state")
    defaults = of_the_base("defaults")

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_grad_norm":  # users may change it during training
            check_max_grad_norm(value)
        super().__setattr__(name, value)

    @property
    def _configuration(self) -> dict[str, Any]:
        """The constructor's arguments, without the base."""
        names = ("settings", "group", "sync_replicas", "backend", "max_grad_norm", "delta_dtype")
        return {name: getattr(self, name) for name in names}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """The new parameters start at their current values; with `scope="group"` they get their own tuner."""
        progress = self._keeper.progress
        self.base.add_param_group(param_group)
        show_scales(self.param_groups, self._itself)
        if self.settings.scope == "group":
            progress.add_tuner(self.settings)
        self._keeper.write(progress)
        self._keeper.create_eager_state()

    def _params(self) -> list[Tensor]:
        """All parameters, as the same list object while they are unchanged."""
        params = [p for group in self.base.param_groups for p in group["params"]]
        if list(map(id, params)) != list(map(id, self._known_params)):
            self._known_params, self._has_data = params, not is_fake(params)
        return self._known_params

    # ---------------------------------------------------------------- checkpoints, pickles and copies

    def state_dict(self) -> StateDict:
        """The base's state dict, including Mechanic's entries. Waits for the device."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._keeper.write()
        if self._keeper.is_plain:
            checkpoint.strip((), self.state)  # of what a dry run has added
        state_dict = self.base.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a mechanized optimizer's state dict, or a plain one's: Mechanic then starts at the loaded weights."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        checkpoint.check(state_dict, self.param_groups, self.settings)
        plain, ours = checkpoint.split(state_dict)
        self.base.load_state_dict(plain)
        show_scales(self.param_groups, self._itself)
        ids = (i for group in plain["param_groups"] for i in group["params"])
        checkpoint.merge(dict(zip(ids, self._params(), strict=True)), ours, self.state, self._keeper.slots.dtypes)
        self._dry_state = None
        self._last.clear()
        self._keeper.forget()
        if not holds_tuner(self.param_groups):
            warnings.warn(
                "the loaded state was saved without Mechanic: the base's moments are kept, and the scale is learned "
                "from scratch, starting at the current weights.",
                stacklevel=2,
            )
        self._keeper.hold()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def reread_groups(self) -> None:
        """For engines that replace the param groups: rereads the tuner from them at its next use."""
        self._keeper.forget()

    def loading_plain(self) -> AbstractContextManager[None]:
        """Lets torch.distributed.checkpoint load what was saved without Mechanic.

            with opt.loading_plain():
                states = get_optimizer_state_dict(model, opt)
                dcp.load(states, checkpoint_id=folder)
                set_optimizer_state_dict(model, opt, states)

        DCP refuses a checkpoint that lacks any of the optimizer's keys, so within this context it has none of
        Mechanic's. What it had learned is dropped; Mechanic starts over from the loaded weights.
        """
        return self._keeper.loading_plain()

    def loading_old(self) -> AbstractContextManager[None]:
        """Like `loading_plain`, for checkpoints of version 0.1: within it, the optimizer has the keys that 0.1 had.

        The learned scale is kept, and the next step recovers the run's start from it.
        """
        return self._keeper.loading_old()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out hooks, and the process group, which cannot be pickled."""
        self._keeper.write()
        own = {"base": self.base, "group": None, "_has_history": self._keeper.has_history}
        return {**self._configuration, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {"group": None, **state}
        has_history = state.pop("_has_history")
        self.__dict__.update(state)
        self._start(has_history=has_history)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.group = self.group
        return twin

    def __repr__(self) -> str:
        lines = [f"Mechanic around {type(self.base).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            shown = sorted(k for k in group if k != "params" and not k.startswith(PREFIX))
            lines += [f"    {key}: {group[key]}" for key in shown]
        mine = {**vars(self.settings), "max_grad_norm": self.max_grad_norm}
        lines += [f"Mechanic: {', '.join(f'{key}={value!r}' for key, value in mine.items() if value is not None)}"]
        return "\n".join([*lines, ")"])

    # ---------------------------------------------------------------- what people and loggers read

    @property
    def learned(self) -> Tensor:
        """`learned_lrs` as a tensor on the device."""
        progress = self._keeper.progress
        far, time, top = (progress.tuner.column(name)[:, 0] for name in ("travelled", "elapsed", "lr"))
        peaks = torch.where(time > 0, far / time.clamp(min=1e-300) * top / self._keeper.unit, 0.0)
        owners = [progress.tuner_of(group) for group in self.param_groups]
        first = [progress.lr_refs.get(place, 0.0) for place in range(len(owners))]
        largest = [max(lr for lr, o in zip(first, owners, strict=True) if o == owner) for owner in owners]
        shares = [lr / highest if highest > 0 else 1.0 for lr, highest in zip(first, largest, strict=True)]
        return torch.stack([peaks[owner] * share for owner, share in zip(owners, shares, strict=True)])

    @property
    def learned_lrs(self) -> list[float]:
        """The learned learning rate of each group. Synchronises with the device.

        The peak of the schedule times the mean scale: the fixed peak that would have moved the run as far. This is the
        number to give to a plain optimizer. 0 if nothing has been learned yet.
        """
        numbers: list[float] = self.learned.tolist()
        return numbers

    @property
    def learned_lr(self) -> float:
        """The largest of `learned_lrs`."""
        return max(self.learned_lrs, default=0.0)

    @property
    def scale(self) -> Tensor:
        """The learned factor on the learning rate, as a 0-dim tensor; with `scope="group"`, the largest one."""
        return self.scales.max()

    @property
    def scales(self) -> Tensor:
        """The learned factor of each param group."""
        return (self._keeper.progress.tuner.played / self._keeper.unit).expand(len(self.param_groups))

    @property
    def effective_lrs(self) -> list[float]:
        """Per group, scale times the lr of the last step: what a plain optimizer's lr would be.

        Synchronises with the device.
        """
        return [s * float(lr) for s, lr in zip(self.scales.tolist(), self.lrs, strict=True)]

    def get_avg_learning_rate(self) -> float:
        """The mean of `effective_lrs` over all weights, under the name that ai-toolkit looks for.

        Synchronises with the device.
        """
        return average(self.effective_lrs, self.param_groups)

    @property
    def lrs(self) -> list[float | Tensor]:
        """Per group, the lr of the last step, which a scheduler may have changed since; 1 if the base has none."""
        noted = self._last.get("lrs", [])
        lrs = noted + [group.get("lr") for group in self.param_groups[len(noted) :]]
        return [1.0 if lr is None else lr for lr in lrs]

    @property
    def tuner(self) -> Tuner:
        """The tuner's vectors, in units of the base's own learning rate."""
        state, unit = self._keeper.progress.tuner, self._keeper.unit
        s, r, m, v = (state.column(name) for name in "srmv")
        if self.settings.rule != "relative":
            m, v = m * unit, v * unit**2
        s, r, m, v = (t if self.settings.scope == "group" else t[0] for t in (s / unit, r, m, v))
        return Tuner(s, r.clone(), m.clone(), v.clone(), state.flat[-2].clone())  # a recorded step would overwrite them

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last step, over all ranks and before clipping, as a 0-dim tensor.

        0 before the first step; not finite if the last step was skipped for that reason.
        """
        sums, device = self._last.get("sums", [0.0]), self._keeper.progress.tuner.device
        return gradient_norm(torch.as_tensor(sums, dtype=torch.float64, device=device))

    @property
    def moved(self) -> Tensor:
        """The distance of the weights from their start at the last step, as a fraction of their size: a 0-dim tensor.

        0 before the first move. NaN where it is unknown: between a load and the next step, after
        `freeze(release=True)`, with a published rule, and after loading a checkpoint of one.
        """
        progress, sums = self._keeper.progress, self._last.get("sums")
        tuner = progress.tuner
        if self.settings.rule != "relative" or progress.released:
            return torch.full((), math.nan, dtype=torch.float64, device=tuner.device)
        if sums is None:
            return torch.where(tuner.flat[-2] > 0, math.nan, 0.0)
        size, touched, path = (tuner.column(name)[:, 0] for name in ("size", "touched", "path"))
        whole = torch.where(path < 0, math.nan, size.square() * touched).sum()
        far = torch.as_tensor(sums, dtype=torch.float64, device=tuner.device)[SUMS.index("dd") : -1 : len(SUMS)].sum()
        return torch.where(whole > 0, far / whole, whole).sqrt()

    def metrics(self) -> dict[str, float]:
        """What to log, as Python floats. Synchronises with the device once."""
        progress, groups = self._keeper.progress, len(self.param_groups)
        hs = progress.tuner.column("h")[:, 0] * self._keeper.unit
        last = self.grad_norm.view(1), self.moved.view(1)
        packed = torch.cat([self.scales, hs, progress.tuner.flat[-2:], *last]).tolist()
        scales, h, (steps, skipped, norm, moved) = packed[:groups], packed[groups:-4], packed[-4:]
        lrs = self.effective_lrs
        metrics = {"mechanic/scale": max(scales), "mechanic/effective_lr": max(lrs), "mechanic/h": sum(h)}
        metrics |= {"mechanic/grad_norm": norm} | ({} if math.isnan(moved) else {"mechanic/moved": moved})
        if groups > 1:
            for name, scale, lr in zip(names_of(self.param_groups), scales, lrs, strict=True):
                metrics[f"mechanic/scale/{name}"], metrics[f"mechanic/effective_lr/{name}"] = scale, lr
        if skipped:
            self._warn_of_skips(progress)
        return {**metrics, "mechanic/steps": steps, "mechanic/skipped_steps": skipped}

    def _warn_of_skips(self, progress: Progress) -> None:
        steps, skipped = map(int, progress.tuner.counts)
        text = self._skips.warning(self.param_groups, steps=steps, skipped=skipped)
        if text is not None:
            warnings.warn(text, stacklevel=3)
