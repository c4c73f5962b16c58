"""The optimizer that learns the scale of its learning rate while it trains.

`MechanicOptimizer.step` reads like the paper's Algorithm 1. It holds the wrapped optimizer as `base` and delegates
param_groups, state and defaults to it, so that schedulers, GradScaler, FSDP and checkpoint code find what they expect.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mechanic_plugins import bases, checkpoint, fused, multi_tensor
from mechanic_plugins.checkpoint import DELTA, PREFIX, REF, Progress
from mechanic_plugins.passes import Backend, Decision, Entry, Passes, check_backend, zeros_like
from mechanic_plugins.settings import Settings
from mechanic_plugins.sharding import Counting, align_gradients, is_dtensor, local, reduction_for, refuse_unattached
from mechanic_plugins.slots import Slot
from mechanic_plugins.tuner import SUMS, Sums, advance, keep_where

__all__ = ["MechanicOptimizer", "Tuner"]

Closure = Callable[[], Any]
Group = dict[str, Any]
StateDict = dict[str, Any]

_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Tuner(NamedTuple):
    """The tuner's state in units of the base's own learning rate: n-vectors, or one row for each param group."""

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor


class MechanicOptimizer(Optimizer):
    """What `mechanize` returns: build it there.

    `scale` and `tuner` do not wait for the device; `effective_lrs`, `metrics()` and `state_dict()` do.
    """

    # GradScaler must unscale and decide by itself: a fused base would skip its own update, but not Mechanic's.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        base: Optimizer,
        settings: Settings,
        *,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
    ) -> None:
        bases.check_supported(base)
        check_backend(backend)
        self.base = base
        self.settings = settings
        self.group = group
        self.sync_replicas = sync_replicas
        self.backend = backend
        self._start()
        self._hold_tuner()
        self._create_eager_state()

    def _start(self) -> None:
        """Everything that is not state: rebuilt after unpickling."""
        self._held: dict[str, Progress | None] = {}
        self._counted: tuple[tuple[int, ...], Counting] | None = None
        self._numbers: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}
        self._passes = Passes(self.base, self.backend)
        self._fused = False
        self._dry_state: object = None
        self._decision: Decision | None = None
        self._last_lrs: list[Any] | None = None
        self._warned_of_skips = False
        self.count: Callable[[Sequence[Tensor]], Counting] | None = None
        for name in _HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()

    # ---------------------------------------------------------------- what belongs to the base

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

    def add_param_group(self, param_group: Group) -> None:
        """The new parameters start with delta = 0; with `scope="group"` they get a tuner of their own."""
        self._write_tuner()
        self.base.add_param_group(param_group)
        first, new = self.param_groups[0], self.param_groups[-1]
        new.update({k: copy.copy(v) for k, v in first.items() if k.startswith(PREFIX)})
        if self.settings.scope == "group":
            blank: Group = {}
            checkpoint.write([blank], Progress.new(self.settings, tuners=1, device=torch.device("cpu")), self.settings)
            new.update({k: v for k, v in blank.items() if k in checkpoint.tuner_keys(self.settings)})
        self._live = None
        self._create_eager_state()

    # ---------------------------------------------------------------- the step

    @_disable_dynamo  # torch.compile leaves the step as it is: the passes are compiled already, or the base's
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Algorithm 1. A step with a gradient that is not finite, or with none at all, changes nothing."""
        closure, loss = _evaluated(closure)
        self._leave_dry_run()
        plan = self._passes.plan(tuple(map(id, self._params())))
        if plan is not None:
            return self._follow(plan, loss)
        entries = self._entries()
        self._fused = self._passes.is_fused(entries)
        if self._decision is not None:
            return self._play(entries, self._decision, closure, loss)
        sums = self._counting().reduction.start(self._summed(entries))()
        if self._is_dry_run(sums):
            return self._make_dry_run(entries)
        with _tuner_restored_on_error(self._progress):
            return self._play(entries, self.decide(sums), closure, loss)

    def _follow(self, plan: fused.Plan, loss: Any) -> Any:
        """The same for a fused step whose parameters and state are where they were in the last one."""
        self._fused = True
        decision = self._decision
        with _tuner_restored_on_error(self._progress):
            if decision is None:
                tuner = self._progress.tuner
                sums = plan.sums(tuners=len(tuner.s), device=tuner.s.device)
                decision = self.decide(self._counting().reduction.start(sums)())
            if decision.moves is not False:
                plan.play(decision.scales(), unit=self._delta_unit())
        return loss

    def decide(self, sums: Tensor) -> Decision:
        """Lets the tuner make its step, given the sums over all parameters of all ranks (see `local_sums`)."""
        if self._passes.workspace is not None and multi_tensor.can_run(sums.device):
            return self._decide_on_gpu(sums)
        moves = self._is_made(sums)
        before = self._progress.tuner.played[:, 0]
        if moves is not False:
            self._note_lrs()
            self._advance_tuner(sums, moves)
        return Decision(moves, before, self._progress.tuner.played[:, 0])

    def _decide_on_gpu(self, sums: Tensor) -> Decision:
        """The same in one launch."""
        progress = self._progress
        hold = not self._resolve_unit() or progress.frozen
        settings = self._constants()
        counters = _counters(progress)
        progress.tuner, counters, scales = multi_tensor.advance(
            progress.tuner,
            sums,
            counters,
            settings=settings,
            betas=self._on_device(settings.betas),
            constants=self._on_device(multi_tensor.tuner_constants(settings)),
            hold=hold,
            in_place=fused.is_capturing(sums.device),
        )
        progress.steps, progress.skipped = counters.unbind()
        before, after, made = scales.unbind(1)
        self._note_lrs()
        return Decision(self._made_known(made[0]), before, after, scales)

    def _made_known(self, moves: Tensor) -> bool | Tensor:
        """Whether the step is made: for a base that cannot be told on the device, by waiting for it."""
        if moves.device.type != "cpu" and self._decides_on_device():
            return moves
        is_made = bool(moves)
        if not is_made and self._progress.skipped > 0:
            self._warn_of_skips()
        return is_made

    def _decides_on_device(self) -> bool:
        return self._fused or bases.skips_on_found_inf(self.base, self._params())

    @contextmanager
    def playing(self, decision: Decision) -> Iterator[None]:
        """Within, `step()` takes this decision and sees only to the weights: for engines that step part by part."""
        self._decision = decision
        try:
            yield
        finally:
            self._decision = None

    def _play(self, entries: Sequence[Entry], decision: Decision, closure: Closure | None, loss: Any) -> Any:
        if decision.moves is False:
            return loss
        result = self._passes.play(entries, decision, unit=self._delta_unit(), closure=closure)
        return result if loss is None else loss

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _entries(self) -> list[Entry]:
        """The parameters with a gradient, and those that had one before: their weights still follow the scale."""
        weights = self._counting().weights if self._decision is None else {}
        align_gradients(self._params())
        entries = []
        for group in self.param_groups:
            row = self._row(group)
            for p in group["params"]:
                known = self.state.get(p, {})
                if p.grad is None and DELTA not in known:
                    continue
                _refuse_sparse(p)
                slot = Slot(local(p), local(p.grad), local(known.get(DELTA)), local(known.get(REF)))
                entries.append(Entry(p, group, slot, row, weights.get(id(p), 1.0)))
        return entries

    def _row(self, group: Group) -> int:
        """Which tuner the group belongs to. An engine may have left only some of the groups here."""
        return (self._progress.row_of(group) or 0) if self.settings.scope == "group" else 0

    def _counting(self) -> Counting:
        params = self._params()
        key = tuple(map(id, params))
        if self._counted is None or self._counted[0] != key:
            _refuse_mixed_groups(self.param_groups)
            self._counted = key, self._count(params)
        return self._counted[1]

    def _count(self, params: Sequence[Tensor]) -> Counting:
        if self.count is not None:  # an engine that has cut the parameters up knows how its pieces add up
            return self.count(params)
        refuse_unattached(self)
        return reduction_for(params, group=self.group, sync_replicas=self.sync_replicas)

    def local_sums(self, parts: Sequence[tuple[Group, Slot]]) -> Tensor:
        """What `decide` wants, of slots that an engine put together, each with its param group and counted once."""
        return self._summed([Entry(slot.x, group, slot, self._row(group), 1.0) for group, slot in parts])

    def _summed(self, entries: Sequence[Entry]) -> Tensor:
        tuner = self._progress.tuner
        return self._passes.sums(entries, tuners=len(tuner.s), device=tuner.s.device)

    def _is_made(self, vector: Tensor) -> bool | Tensor:
        """Whether the step is made: a bool, or a tensor where the base can be told on the device.

        On a GPU with a base that cannot, this waits for the device: the one synchronisation of a step.
        """
        finite = vector.isfinite().all()
        progress = self._progress
        progress.skipped = progress.skipped + ~finite
        return self._made_known(finite & (vector[-1] > 0))

    def _advance_tuner(self, vector: Tensor, moves: bool | Tensor) -> None:
        progress = self._progress
        progress.steps = progress.steps + moves
        if self._resolve_unit() and not progress.frozen:
            sums, settings = Sums.of(vector[:-1].view(-1, len(SUMS))), self._constants()
            new = advance(progress.tuner, sums, settings=settings, betas=self._on_device(settings.betas))
            progress.tuner = keep_where(moves, new, progress.tuner) if isinstance(moves, Tensor) else new

    # ---------------------------------------------------------------- units

    def _resolve_unit(self) -> bool:
        """Fixes the learning rate that delta is measured in, at the first step that has one above 0."""
        progress = self._progress
        if progress.unit == 0:
            progress.unit = max(map(_peak_lr, self.param_groups)) if self.settings.normalize_lr else 1.0
        return progress.unit > 0

    def _delta_unit(self) -> float:
        """What one unit of delta is worth in the base's own updates."""
        return (self._progress.unit or 1.0) if bases.is_linear_in_lr(self.base) else 1.0

    def _constants(self) -> Settings:
        """The settings, which are stated for a base lr of 1, in the units of delta."""
        settings, unit = self.settings, self._delta_unit()
        if unit != self._progress.unit:
            settings = settings.at_lr(self._progress.unit)
        return settings if settings.max_scale is None else replace(settings, max_scale=settings.max_scale * unit)

    def _on_device(self, numbers: Sequence[float]) -> Tensor:
        """Constants beside the tuner, copied there once."""
        key = tuple(numbers), self._progress.tuner.s.device
        if key not in self._numbers:
            self._numbers[key] = torch.tensor(key[0], dtype=torch.float64, device=key[1])
        return self._numbers[key]

    def _note_lrs(self) -> None:
        """A scheduler may change the lr before somebody asks for the effective one."""
        lrs = (group.get("lr") for group in self.param_groups)
        self._last_lrs = [lr.detach().clone() if isinstance(lr, Tensor) else lr for lr in lrs]

    # ---------------------------------------------------------------- the dry run of torch.distributed.checkpoint

    def _is_dry_run(self, vector: Tensor) -> bool:
        """DCP fills an empty state by a step with zero gradients at lr 0. It must leave no trace."""
        if self.state or not self._has_lr_zero():
            return False
        return bool(vector[-1] > 0) and not vector[:-1].view(-1, len(SUMS))[:, 1].any()

    def _has_lr_zero(self) -> bool:
        lrs = [group["lr"] for group in self.param_groups if group.get("lr") is not None]
        return bool(lrs) and all(float(lr) == 0 for lr in lrs)

    def _make_dry_run(self, entries: Sequence[Entry]) -> None:
        self.base.step()
        for entry in entries:
            self._passes.completed(entry, entry.slot.x)
        self._dry_state = self.state

    def _leave_dry_run(self) -> None:
        """No state was loaded after the dry run: forget what it made (Adam would count it as a step)."""
        if self._dry_state is not None and self._dry_state is self.state:
            self.state.clear()
        self._dry_state = None

    def _create_eager_state(self) -> None:
        """Bases that fill their state when built get no dry run: a load would find no place for delta."""
        for p in list(self.state):
            if self.state[p] and DELTA not in self.state[p]:
                self.state[p][DELTA] = zeros_like(p)

    # ---------------------------------------------------------------- the tuner and the checkpoint

    @property
    def _live(self) -> Progress | None:
        """In a dict, not on the instance: Lightning's and Fabric's proxies run these methods with another `self`."""
        return self._held.get("progress")

    @_live.setter
    def _live(self, progress: Progress | None) -> None:
        self._held["progress"] = progress

    @property
    def _progress(self) -> Progress:
        """The live tuner, on the parameters' device; read anew where somebody has loaded state or moved the model."""
        live, device = self._live, self._device()
        if live is not None and live.tuner.s.device != device:
            checkpoint.write(self.param_groups, live, self.settings)
            live = None
        if live is None or live.row_of(self.param_groups[0]) is None:
            self._live = live = checkpoint.read(self.param_groups, self.settings, tuners=self._tuners(), device=device)
            if not live.seen:
                checkpoint.write(self.param_groups, live, self.settings)
        return live

    def _tuners(self) -> int:
        return len(self.param_groups) if self.settings.scope == "group" else 1

    def _device(self) -> torch.device:
        """The parameters' own, or the CPU where that has no float64."""
        first = next((p for group in self.param_groups for p in group["params"]), None)
        if first is None:  # an engine took the parameters out for a while
            return self._live.tuner.s.device if self._live else torch.device("cpu")
        device: torch.device = local(first).device
        return torch.device("cpu") if device.type == "mps" else device

    def _hold_tuner(self) -> None:
        """The groups always hold the tuner's keys: loaders look for them there."""
        if PREFIX + "s" in self.param_groups[0]:  # the base had loaded a mechanized checkpoint
            checkpoint.check_tuner(self.param_groups, self.settings)
            return
        progress = Progress.new(self.settings, tuners=self._tuners(), device=torch.device("cpu"))
        checkpoint.write(self.param_groups, progress, self.settings)

    def _write_tuner(self) -> None:
        checkpoint.write(self.param_groups, self._progress, self.settings)

    def state_dict(self) -> StateDict:
        """The base's state dict with Mechanic's entries in it. Waits for the device."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._write_tuner()
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
        ids = (i for group in plain["param_groups"] for i in group["params"])
        checkpoint.merge(dict(zip(ids, self._params(), strict=True)), ours, self.state)
        self._live = self._dry_state = self._last_lrs = None
        if PREFIX + "s" not in self.param_groups[0]:
            warnings.warn(
                "the loaded state has no Mechanic in it: the base's moments are kept, and the scale is learned anew "
                "from the current weights.",
                stacklevel=2,
            )
        self._hold_tuner()
        self._create_eager_state()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks, as torch's optimizers.

        And without `step`, which a scheduler plants on the instance, and the process group, which has no pickle.
        """
        self._write_tuner()
        kept = ("base", "settings", "sync_replicas", "backend")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.group = None
        self._start()

    def __deepcopy__(self, memo: dict[int, Any]) -> MechanicOptimizer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.group = self.group
        return twin

    # ---------------------------------------------------------------- what a person looks at

    @property
    def scale(self) -> Tensor:
        """The learned factor on the learning rate, a 0-dim tensor; with `scope="group"` the largest group's."""
        return self.scales.max()

    @property
    def scales(self) -> Tensor:
        """The learned factor of each param group."""
        played = self._progress.tuner.played[:, 0] / self._delta_unit()
        return played.expand(len(self.param_groups))

    @property
    def effective_lrs(self) -> list[float]:
        """For each group, scale times the lr of the last step: what a plain optimizer's lr would be. Waits."""
        return [s * float(lr) for s, lr in zip(self.scales.tolist(), self.lrs, strict=True)]

    @property
    def lrs(self) -> list[float | Tensor]:
        """For each group the lr of the last step, which a scheduler may have changed since; 1 for a base without."""
        noted = self._last_lrs or []
        lrs = noted + [group.get("lr") for group in self.param_groups[len(noted) :]]
        return [1.0 if lr is None else lr for lr in lrs]

    @property
    def tuner(self) -> Tuner:
        """The tuner's vectors, in units of the base's own learning rate."""
        state, unit = self._progress.tuner, self._delta_unit()
        vectors = (state.s / unit, state.r, state.m * unit, state.v * unit**2)
        s, r, m, v = vectors if self.settings.scope == "group" else (t[0] for t in vectors)
        return Tuner(s, r, m, v, self._progress.steps)

    def metrics(self) -> dict[str, float]:
        """What to log, as python floats. Waits for the device once."""
        progress, unit = self._progress, self._delta_unit()
        hs = progress.tuner.h[:, 0] * unit
        packed = torch.cat([self.scales, hs, torch.stack([progress.steps, progress.skipped])]).tolist()
        scales, h, (steps, skipped) = packed[: len(self.scales)], packed[len(self.scales) : -2], packed[-2:]
        lrs = self.effective_lrs
        metrics = {"mechanic/scale": max(scales), "mechanic/effective_lr": max(lrs), "mechanic/h": sum(h)}
        if len(self.param_groups) > 1:
            for index, group in enumerate(self.param_groups):
                name = group.get("name", f"pg{index + 1}")
                metrics[f"mechanic/scale/{name}"] = scales[index]
                metrics[f"mechanic/effective_lr/{name}"] = lrs[index]
        if skipped:
            self._warn_of_skips()
        return {**metrics, "mechanic/steps": steps, "mechanic/skipped_steps": skipped}

    def _warn_of_skips(self) -> None:
        if not self._warned_of_skips:
            warnings.warn(
                "a gradient was not finite: the step was skipped whole, weights, moments and tuner alike. "
                "metrics()['mechanic/skipped_steps'] counts such steps; this warning comes once.",
                stacklevel=3,
            )
        self._warned_of_skips = True

    def freeze(self) -> None:
        """Holds the scale where it is; training goes on with it."""
        self._progress.frozen = True

    def unfreeze(self) -> None:
        """Tunes again, from where the tuner was."""
        self._progress.frozen = False

    def __repr__(self) -> str:
        lines = [f"Mechanic around {type(self.base).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            shown = sorted(k for k in group if k != "params" and not k.startswith(PREFIX))
            lines += [f"    {key}: {group[key]}" for key in shown]
        return "\n".join([*lines, f"{self.settings}", ")"])


def _evaluated(closure: Closure | None) -> tuple[Closure | None, Any]:
    """The loss, and a closure for the base whose first call returns it instead of computing it again."""
    if closure is None:
        return None, None
    again = torch.enable_grad()(closure)
    loss = again()
    cached = [loss]
    return lambda: cached.pop() if cached else again(), loss


@contextmanager
def _tuner_restored_on_error(progress: Progress) -> Iterator[None]:
    """The weights go back when the base raises: a tuner that had moved on would not fit them."""
    tuner, steps = progress.tuner, progress.steps
    try:
        yield
    except BaseException:
        progress.tuner, progress.steps = tuner, steps
        raise


def _counters(progress: Progress) -> Tensor:
    """Steps and skipped side by side; the GPU's tuner leaves them so."""
    steps, skipped = progress.steps, progress.skipped
    if steps._base is not None and steps._base is skipped._base:
        return steps.as_strided((2,), (1,))
    return torch.stack([steps, skipped])


def _peak_lr(group: Group) -> float:
    lr = group.get("initial_lr", group.get("lr"))
    return 1.0 if lr is None else float(lr)


def _refuse_sparse(p: Tensor) -> None:
    if p.grad is not None and p.grad.layout != torch.strided:
        raise ValueError(
            f"a gradient of shape {tuple(p.shape)} is sparse ({p.grad.layout}): Mechanic moves every weight in every "
            "step. Use sparse=False in the embedding, or p.grad.to_dense() before step()."
        )


def _refuse_mixed_groups(groups: Sequence[Group]) -> None:
    for index, group in enumerate(groups):
        kinds = {is_dtensor(p) for p in group["params"]}
        if len(kinds) > 1 and (group.get("fused") or group.get("foreach")):
            raise ValueError(
                f"param group {index} mixes sharded (DTensor) and plain parameters, which fused and foreach optimizers "
                "cannot step together: put them into two groups."
            )
