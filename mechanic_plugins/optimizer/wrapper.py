"""The wrapper around the base: everything that checkpoints, schedulers and frameworks see.

The wrapped optimizer is `base`; param_groups, state and defaults are the base's own, so that schedulers, GradScaler,
FSDP and checkpoint code find what they expect. `mechanic_plugins.optimizer.step` adds the step.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from mechanic_plugins.distributed.layout import Layout
from mechanic_plugins.distributed.reduction import Shares
from mechanic_plugins.distributed.sharding import is_fake, local
from mechanic_plugins.optimizer import saving
from mechanic_plugins.optimizer.learned import Learned
from mechanic_plugins.optimizer.readings import Readings
from mechanic_plugins.optimizer.skips import Skips
from mechanic_plugins.rule.decide import Decision
from mechanic_plugins.rule.settings import Settings, check_max_grad_norm
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.plan import Group, Plan
from mechanic_plugins.weights.slots import DELTA, PREFIX, REF, Slots

__all__ = ["Backend", "Wrapper", "check_backend", "of_the_base"]

Backend = Literal["auto", "fused", "triton", "foreach"]
StateDict = dict[str, Any]

_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
IN_USE = ""
"""A group's entry while the tuner is ahead of what was last written."""
_LIVE = "_mechanic_live"
"""The base's attribute that holds what was learned, for another wrapper around it."""


def of_the_base(name: str) -> Any:
    """A property that reads and writes the base's attribute."""
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


def check_backend(backend: str) -> None:
    """Rejects unknown backends."""
    if backend not in get_args(Backend):
        choices = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {choices}, got {backend!r}: 'auto' takes the fastest that works.")


class Wrapper(Readings, Optimizer):
    """The base, the settings and what was learned. Attributes that it lacks are read from the base."""

    # GradScaler must unscale and decide itself: a fused base would skip its own update, but not Mechanic's.
    _step_supports_amp_scaling = False
    kept_dtype: torch.dtype | None = None
    """The dtype of what is kept for each weight, if one was chosen. Checkpoints hold it as it is."""

    def __init__(
        self,
        base: Optimizer,
        settings: Settings,
        *,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
        max_grad_norm: float | None = None,
        kept_dtype: torch.dtype | None = None,
    ) -> None:
        facts.check_supported(base)
        self.base, self.settings = base, settings
        self.group, self.sync_replicas, self.backend = group, sync_replicas, backend
        self.max_grad_norm, self.kept_dtype = max_grad_norm, kept_dtype
        self._start(has_history=bool(base.state))
        live = vars(base).get(_LIVE)
        if live is not None and base.param_groups[0].get(saving.KEY) == IN_USE:  # another wrapper has left off there
            self._write(live)
        self._read_groups()

    def _start(self, *, has_history: bool) -> None:
        """Creates what is not pickled."""
        self._slots = Slots(self.settings.rule, self.kept_dtype)
        self._ignores_schedule = facts.ignores_a_schedule(self.base)
        self._has_history = has_history
        """Whether the base had state before Mechanic's first step, from its constructor or a plain run."""
        self._owners: dict[int, tuple[Group, int]] = {}
        self._the_learned = Learned(self.settings, [])
        """Read it by `_learned`. Always the same object, since Lightning's proxies call methods with another self."""
        self._is_plain = False
        """Whether Mechanic's keys are hidden for now: see `loading_plain`."""
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._begun: set[int] = set()
        """The tuners that a GPU may advance by itself."""
        self._skips = Skips()
        self.shares_by_engine: Callable[[Sequence[Tensor]], Shares] | None = None
        """Set by engines that shard the parameters themselves: how their sums are reduced."""
        self.layout_by_engine: Callable[[], Layout] | None = None
        """Set by engines that lay parameters end to end: where those are in what the optimizer steps."""
        self._known_params: list[Tensor] = []
        self._has_data = True
        self._known_shares: tuple[Sequence[Tensor], Shares] | None = None
        self._layout: Layout | None = None
        self._given: Decision | None = None
        """The decision that an engine's next steps apply."""
        self._odd_lrs = set[str]()
        """The kinds of learning rates at which no step could be made, and that were warned of."""
        self._dry_state: object = None
        for name in _HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()

    # ---------------------------------------------------------------- the base's

    param_groups: list[Group] = of_the_base("param_groups")
    state: defaultdict[Tensor, Any] = of_the_base("state")
    defaults: dict[str, Any] = of_the_base("defaults")

    if not TYPE_CHECKING:  # or mypy accepts any name

        def __getattr__(self, name: str) -> Any:
            if name == "base" or name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.base, name)

    @property
    def max_grad_norm(self) -> float | None:
        """Every step clips the gradients to this norm. Not one of the settings, so checkpoints do not contain it."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(value)
        self._max_grad_norm = value

    @property
    def _configuration(self) -> dict[str, Any]:
        """The constructor's arguments, without the base."""
        names = ("settings", "group", "sync_replicas", "backend", "max_grad_norm", "kept_dtype")
        return {name: getattr(self, name) for name in names}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """The new parameters start at their current values; with `scope="group"` they get their own tuner."""
        learned = self._learned
        self.base.add_param_group(param_group)
        if self.settings.scope == "group":
            learned.add_tuner()
        self.write_tuner()
        self._create_eager_state()

    def _params(self) -> list[Tensor]:
        """All parameters, as the same list object while they are unchanged."""
        params = [p for group in self.base.param_groups for p in group["params"]]
        if list(map(id, params)) != list(map(id, self._known_params)):
            self._known_params, self._has_data = params, not is_fake(params)
        return self._known_params

    # ---------------------------------------------------------------- what was learned

    @property
    def _learned(self) -> Learned:
        """The one copy. Read from the param groups if something has loaded state into them."""
        groups, learned = self.base.param_groups, self._the_learned
        if groups and groups[0].get(saving.KEY) is not learned.entry:
            self._read_groups()
        return learned

    def _read_groups(self) -> None:
        groups, notice = self.base.param_groups, None
        if saving.holds_tuner(groups):
            found, notice = saving.read(groups, self.settings)
        else:
            self._has_history = bool(self.base.state)
            count = len(groups) if self.settings.scope == "group" else 1
            found = Learned.nothing(self.settings, count)
        vars(self._the_learned).update(vars(found) | {"last_lrs": self._the_learned.last_lrs})
        vars(self.base)[_LIVE] = self._the_learned
        self._owners.clear()
        self._begun.clear()
        if notice is not None:
            warnings.warn(notice, stacklevel=4)
        self._write(self._the_learned)
        self._create_eager_state()

    def write_tuner(self) -> None:
        """Writes the tuner into the param groups, from where checkpoints take it. Waits for the device.

        `state_dict()` calls it. Only programs that save the param groups by themselves need to.
        """
        self._write(self._learned)

    def _write(self, learned: Learned) -> None:
        groups = self.base.param_groups
        if self._is_plain:
            return
        if len(groups) >= len(self._owners):
            self._owners.clear()
            self._owners.update({id(group): (group, index) for index, group in enumerate(groups)})
        texts = saving.texts(learned, len(self._owners))
        for group in groups:
            group[saving.KEY] = texts[self._place_of(group)]
        self._the_learned.entry = groups[0][saving.KEY] if groups else None

    def _mark_in_use(self) -> None:
        """Called when the tuner gets ahead of what was written."""
        for group in self.base.param_groups:
            if saving.KEY in group:
                group[saving.KEY] = IN_USE
                self._the_learned.entry = IN_USE

    def _place_of(self, group: Group) -> int:
        """The group's index when the tuner was last written. An engine may have left only some groups in place."""
        known = self._owners.get(id(group))
        if known is not None:
            return known[1]
        return next((index for index, each in enumerate(self.base.param_groups) if each is group), 0)

    def _tuner_of(self, group: Group) -> int:
        """The index of the tuner that the group belongs to."""
        return self._place_of(group) if len(self._learned.tuners) > 1 else 0

    def reread_groups(self) -> None:
        """For engines that replace the param groups: rereads the tuner from them at its next use."""
        self._the_learned.entry = "unread"
        self._owners.clear()
        self._plans.clear()

    def _create_eager_state(self) -> None:
        """For bases that fill their state when built: without DCP's dry run, a load would find no slots."""
        learned, groups = self._the_learned, self.base.param_groups
        if learned.released or self._is_plain:
            return
        for group in groups:
            for p in group["params"]:
                state = self.base.state.get(p)
                if isinstance(state, dict) and state and not {REF, DELTA} & state.keys():
                    self._slots.begin(p, state, has_master=False)
                    if self._slots.is_default and learned.wait_for_tuners()[self._tuner_of(group)].scale > 0:
                        self._slots.put(p, state, REF, local(p))

    # ---------------------------------------------------------------- checkpoints, pickles and copies

    def state_dict(self) -> StateDict:
        """The base's state dict, including Mechanic's entries. Waits for the device."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._is_plain:
            saving.strip((), self.state)  # of what a dry run has added
        else:
            self.write_tuner()
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
        saved = state_dict["param_groups"]
        is_alike = [len(g["params"]) for g in saved] == [len(g["params"]) for g in self.param_groups]
        if is_alike and saving.holds_tuner(saved):  # else the base rejects it before changing anything
            learned, _ = saving.read(saved, self.settings)
            saving.check_tensors(state_dict, self.param_groups, learned)
        elif is_alike:
            warnings.warn(
                "the loaded state was saved without Mechanic: the base's moments are kept, and the scale is learned "
                "from scratch, starting at the current weights.",
                stacklevel=2,
            )
        plain, ours = saving.split(state_dict)
        self.base.load_state_dict(plain)
        params = dict(zip((i for group in saved for i in group["params"]), self._params(), strict=True))
        saving.merge(params, ours, self.state, self._slots.dtypes)
        if saving.holds_tuner(saved):
            saving.restore_float32(params, plain["state"], self.state)
        self._dry_state, self._the_learned.last_lrs = None, []
        if not self._is_plain:
            self._read_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @contextmanager
    def loading_plain(self) -> Iterator[None]:
        """Lets torch.distributed.checkpoint load what was saved without Mechanic.

            with opt.loading_plain():
                states = get_optimizer_state_dict(model, opt)
                dcp.load(states, checkpoint_id=folder)
                set_optimizer_state_dict(model, opt, states)

        DCP refuses a checkpoint that lacks any of the optimizer's keys, so within this context it has none of
        Mechanic's. What it had learned is dropped; Mechanic starts over from the loaded weights.
        """
        saving.strip(self.base.param_groups, self.base.state)
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False
            self._read_groups()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out hooks, and the process group, which cannot be pickled."""
        self.write_tuner()
        own = {"base": self.base, "group": None, "_has_history": self._has_history}
        return {**self._configuration, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {"group": None, **state}
        has_history = state.pop("_has_history")
        for name, value in state.items():
            setattr(self, name, value)
        self._start(has_history=has_history)
        self._read_groups()
        self._has_history = has_history

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
