"""An optimizer around another one, with a tuner beside it.

All that checkpoints, schedulers and frameworks touch; `mechanic_plugins.optimizer.step` adds the step.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal
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
from mechanic_plugins.core.groups import Owner, show_scales
from mechanic_plugins.core.param_state import DELTA, PREFIX, REF
from mechanic_plugins.core.settings import Settings, check_max_grad_norm, checked_delta_dtype
from mechanic_plugins.distributed.sharding import local, with_real_tensors
from mechanic_plugins.optimizer.delegate import Delegate, Group
from mechanic_plugins.optimizer.refusals import refuse_narrow_delta
from mechanic_plugins.optimizer.skips import Skips
from mechanic_plugins.optimizer.units import Units
from mechanic_plugins.passes.planner import Backend, check_backend
from mechanic_plugins.passes.slots import Slots

__all__ = ["StateDict", "Wrapper"]

StateDict = dict[str, Any]

_LIVE = "_mechanic_live"
"""The base's attribute with the settings and the tuner of who mechanized it last."""
_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Wrapper(Delegate):
    """The base, the settings and the tuner. `state_dict()` synchronises with the device."""

    # GradScaler must unscale and decide by itself: a fused base would skip its own update, but not Mechanic's.
    _step_supports_amp_scaling = False
    max_grad_norm: float | None = None
    """Every step clips the gradients to this norm. Not a setting of the tuner's: checkpoints do not hold it."""
    delta_dtype: torch.dtype | None = None
    """What the references are kept in, where that was chosen. Checkpoints hold them as they are."""
    _has_history = True
    """Whether the base had state before Mechanic's first step: made when it was built, or loaded from a plain run."""

    def __init__(
        self,
        base: Optimizer,
        settings: Settings,
        *,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
        max_grad_norm: float | None = None,
        delta_dtype: torch.dtype | Literal["float32", "bfloat16"] | None = None,
    ) -> None:
        known_bases.check_supported(base)
        check_backend(backend)
        self.base = base
        self.settings = settings
        self.group, self.sync_replicas = group, sync_replicas
        self.backend, self.max_grad_norm = backend, max_grad_norm
        self.delta_dtype = checked_delta_dtype(delta_dtype)
        refuse_narrow_delta(settings, self.delta_dtype)
        self._has_history = bool(base.state)
        before = vars(base).get(_LIVE)
        self._start()
        self._continue(before)
        self._hold_tuner()
        self._create_eager_state()

    def _start(self) -> None:
        """Everything that is not state: rebuilt after unpickling."""
        self._held: dict[str, Progress | None] = {}
        vars(self.base)[_LIVE] = self.settings, self._held
        self._units = Units(self.base, self.settings)
        self._slots = Slots(is_default=self.settings.rule == "relative", wanted=self.delta_dtype)
        self._dry_state: object = None
        self._is_plain = False
        self._known_params: list[Tensor] = []
        self._last_lrs: list[Any] | None = None
        self._last: dict[str, Tensor | list[float]] = {}
        """The sums of the last step. In a dict for the same reason as `_live`."""
        self._skips = Skips()
        for name in _HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()
        self._itself: Owner = ref(self)
        """Lightning's and Fabric's proxies run these methods with another `self`."""
        show_scales(self.param_groups, self._itself)

    def add_param_group(self, param_group: Group) -> None:
        """The new parameters start where they are; with `scope="group"` they get a tuner of their own."""
        progress = self._progress
        self.base.add_param_group(param_group)
        show_scales(self.param_groups, self._itself)
        if self.settings.scope == "group":
            progress.add_tuner(self.settings)
        self._write(progress)
        self._create_eager_state()

    # ---------------------------------------------------------------- the tuner and the checkpoint

    @property
    def _live(self) -> Progress | None:
        """In a dict, not on the instance: Lightning's and Fabric's proxies run these methods with another `self`."""
        return self._held.get("progress")

    @_live.setter
    def _live(self, progress: Progress | None) -> None:
        self._held["progress"] = progress

    def reread_groups(self) -> None:
        """Reads the tuner from the param groups at its next use: for engines that replace them."""
        self._live = None

    @property
    def _progress(self) -> Progress:
        """The live tuner, on the parameters' device; read again after a load, or when the model was moved."""
        live, device = self._live, self._device()
        if live is not None and live.tuner.device != device:
            self._write(live)
            live = None
        if live is None or live.row_of(self.param_groups[0]) is None:
            self._live = live = self._read(device)
        return live

    def _read(self, device: torch.device) -> Progress:
        """The groups hold afterwards what is in force, so that nothing is said twice."""
        progress, notice = checkpoint.read(self.param_groups, self.settings, tuners=self._tuners(), device=device)
        if notice is not None:
            warnings.warn(notice, stacklevel=4)
        if not progress.seen:
            self._has_history = bool(self.state)
        if notice is not None or not progress.seen:
            self._write(progress)
        return progress

    def _tuners(self) -> int:
        return len(self.param_groups) if self.settings.scope == "group" else 1

    def _device(self) -> torch.device:
        """The parameters' own, or the CPU where that has no float64 or holds no numbers."""
        for group in self.param_groups:
            if group["params"]:
                device: torch.device = local(group["params"][0]).device
                return torch.device("cpu") if device.type in ("meta", "mps") else device
        return self._live.tuner.device if self._live else torch.device("cpu")  # an engine took the parameters out

    def _continue(self, before: tuple[Settings, dict[str, Progress | None]] | None) -> None:
        """A base that is mechanized again goes on where its tuner is, not where that was last written down."""
        settings, held = before or (self.settings, self._held)
        live = held.get("progress")
        if live is not None and live.row_of(self.param_groups[0]) is not None:
            checkpoint.write(self.param_groups, live, settings, delta_unit=self._units.of_scale(live))

    def _hold_tuner(self) -> None:
        """The groups always hold the tuner's keys: loaders look for them there."""
        if holds_tuner(self.param_groups):  # the base had loaded a mechanized checkpoint
            checkpoint.check_tuner(self.param_groups, self.settings)
            self._write_tuner()
            return
        self._has_history = bool(self.state)
        with with_real_tensors():
            self._write(Progress.new(self.settings, tuners=self._tuners(), device=torch.device("cpu")))

    def _write_tuner(self) -> None:
        self._write(self._progress)

    def _write(self, progress: Progress) -> None:
        if not self._is_plain:
            checkpoint.write(self.param_groups, progress, self.settings, delta_unit=self._units.of_scale(progress))

    @contextmanager
    def loading_plain(self) -> Iterator[None]:
        """Lets torch.distributed.checkpoint load what was saved without Mechanic.

            with opt.loading_plain():
                states = get_optimizer_state_dict(model, opt)
                dcp.load(states, checkpoint_id=folder)
                set_optimizer_state_dict(model, opt, states)

        It refuses a checkpoint that lacks a key of the optimizer's: within, the optimizer has none of Mechanic's. What
        Mechanic had learned is dropped, and it starts afresh from the weights it then finds.
        """
        checkpoint.strip(self.param_groups, self.state)
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False
            self._live = None
            self._hold_tuner()
            self._create_eager_state()

    @contextmanager
    def loading_old(self) -> Iterator[None]:
        """As `loading_plain`, for what version 0.1 saved: within, the optimizer has the keys that 0.1 had.

        The scale that it had learned is kept, and the next step finds the start of the run by it.
        """
        slots, self._slots = self._slots, Slots(is_default=False, wanted=None)
        checkpoint.strip((), self.state)
        self._create_eager_state()
        try:
            yield
        finally:
            self._slots = slots

    def _create_eager_state(self) -> None:
        """Bases that fill their state when built get no dry run: a load would find no place for the references."""
        if checkpoint.is_released(self.param_groups):
            return
        rows = self._progress.tuner.rows if holds_tuner(self.param_groups) else []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if isinstance(state, dict) and state and not {REF, DELTA} & state.keys():
                    self._slots.begin(p, state, has_master=False)
                    if rows and rows[self._progress.tuner_of(group)].played > 0 and self._slots.is_default:
                        self._slots.put(p, state, REF, local(p))

    def _params(self) -> list[Tensor]:
        """The same list as before, as long as they are the same."""
        lists, before = [group["params"] for group in self.param_groups], self._known_params
        if sum(map(len, lists)) != len(before) or not all(map(operator.is_, chain.from_iterable(lists), before)):
            self._known_params = list(chain.from_iterable(lists))
        return self._known_params

    def state_dict(self) -> StateDict:
        """The base's state dict with Mechanic's entries in it. Waits for the device."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._write_tuner()
        if self._is_plain:
            checkpoint.strip((), self.state)  # of what a dry run has put there
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
        checkpoint.merge(dict(zip(ids, self._params(), strict=True)), ours, self.state, self._slots.dtypes)
        self._live = self._dry_state = self._last_lrs = None
        self._last.clear()
        if not holds_tuner(self.param_groups):
            warnings.warn(
                "the loaded state has no Mechanic in it: the base's moments are kept, and the scale is learned again "
                "from the current weights.",
                stacklevel=2,
            )
        self._hold_tuner()
        self._create_eager_state()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks, the `step` that a scheduler plants on an instance, and the group, which has no pickle."""
        self._write_tuner()
        kept = ("base", "settings", "sync_replicas", "backend", "max_grad_norm", "delta_dtype")
        return {name: getattr(self, name) for name in (*kept, "_has_history")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.group = None
        self._start()

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

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_grad_norm":  # may be changed during training
            check_max_grad_norm(value)
        super().__setattr__(name, value)
