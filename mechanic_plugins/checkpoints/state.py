"""Reading and writing Mechanic's state in the base's param groups and state.

The tuner is stored in every param group as Python numbers, lists of numbers and one string, under keys that start with
`mechanic_` (see `checkpoints.format`): the one place that survives torch.save, torch.distributed.checkpoint (flattened
or not) and FSDP1. Tensors of a parameter's shape (`mechanic_delta`, and `mechanic_ref` for low-precision weights) are
stored beside the base's moments, so that they are sharded and resharded like them. Everything loads with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.checkpoints.format import (
    FORMAT,
    HEADER,
    RELEASED,
    STEPS,
    Header,
    Record,
    fields,
    has_own_key,
    holds_tuner,
    parse,
)
from mechanic_plugins.checkpoints.settings import notice, portable
from mechanic_plugins.core.param_state import DELTA, PREFIX, REF, needs_reference
from mechanic_plugins.core.param_state import delta_dtype as dtype_of_delta
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import SCALARS, TunerState, initial_state
from mechanic_plugins.distributed.sharding import local

__all__ = ["Progress", "check", "check_tuner", "is_released", "merge", "read", "split", "strip", "write"]

StateDict = dict[str, Any]


@dataclass
class Progress:
    """The tuner's state and counters. The counters are device tensors, updated without synchronisation."""

    tuner: TunerState
    steps: Tensor
    skipped: Tensor
    unit: float = 0.0
    """The base learning rate that delta is measured in; 0 before the first step with a learning rate above 0."""
    unit_since: Tensor | None = field(default=None, repr=False)
    """The step count when the unit was set; None after a step with that unit."""
    frozen: bool = False
    released: bool = False
    """Frozen for good: nothing of a parameter's shape is kept."""
    lr_refs: dict[int, float] = field(default_factory=dict)
    """Each param group's first learning rate above 0, by index: the reference of its schedule."""
    seen: tuple[object, ...] = field(default=(), repr=False)
    """The lists that `write` put into the groups. A different object means that state was loaded since."""

    @classmethod
    def new(cls, settings: Settings, *, tuners: int, device: torch.device) -> Progress:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(initial_state(settings, tuners=tuners, device=device), zero, zero.clone())

    def row_of(self, group: dict[str, Any]) -> int | None:
        """The group's index among those that the tuner was read from or written to."""
        mine = group.get(PREFIX + "s")
        return next((index for index, other in enumerate(self.seen) if other is mine), None)

    def tuner_of(self, group: dict[str, Any]) -> int:
        """Which tuner the group belongs to. An engine may have left only some of the groups in place."""
        return (self.row_of(group) or 0) if len(self.tuner) > 1 else 0

    def add_tuner(self, settings: Settings) -> None:
        """Adds a tuner for a new param group."""
        new = initial_state(settings, tuners=1, device=self.tuner.device)
        self.tuner = TunerState(torch.cat([self.tuner.table, new.table]), new.n)


def write(groups: Sequence[dict[str, Any]], progress: Progress, settings: Settings, *, delta_unit: float) -> None:
    """Writes the tuner into every param group. Synchronises with the device once."""
    names = fields(settings)
    parts = [progress.tuner.column(name) for name in names]
    counters = torch.stack([progress.steps, progress.skipped]).expand(parts[0].shape[0], 2)
    rows = torch.cat([*parts, counters], dim=1).tolist()
    about = Header(FORMAT, len(rows), portable(settings), delta_unit)
    for index, group in enumerate(groups):
        numbers = iter(rows[index if len(rows) > 1 else 0])
        later: dict[str, Any] = {}
        for name, part in zip(names, parts, strict=True):
            values = [next(numbers) for _ in range(part.shape[1])]
            home = group if has_own_key(name) else later
            home[PREFIX + name] = values if name not in SCALARS else values[0]
        group[STEPS], group[PREFIX + "skipped"] = int(next(numbers)), int(next(numbers))
        group[PREFIX + "unit"] = progress.unit
        group[PREFIX + "frozen"] = RELEASED if progress.released else progress.frozen
        group[HEADER] = about._replace(later=later, lr_ref=progress.lr_refs.get(index)).dump()
    progress.seen = tuple(group[PREFIX + "s"] for group in groups)


def read(
    groups: Sequence[dict[str, Any]], settings: Settings, *, tuners: int, device: torch.device
) -> tuple[Progress, str | None]:
    """The tuner in the param groups, or a new one, and a message for the user."""
    progress = Progress.new(settings, tuners=tuners, device=device)
    if not holds_tuner(groups):
        return progress, None
    records = parse(groups, settings)
    first = records[0]
    progress.tuner = _tuner(records[:tuners], progress.tuner)
    progress.steps, progress.skipped = progress.steps + first.steps, progress.skipped + first.skipped
    progress.unit, progress.frozen, progress.released = first.unit, bool(first.frozen), first.frozen == RELEASED
    progress.lr_refs = {index: ref for index, record in enumerate(records) if (ref := record.header.lr_ref)}
    progress.seen = tuple(group[PREFIX + "s"] for group in groups)
    return progress, notice(first.header, settings)


def _tuner(records: Sequence[Record], blank: TunerState) -> TunerState:
    """Fields newer than the checkpoint's format keep their initial value."""
    for name in records[0].numbers:
        rows = [record.numbers[name] for record in records]
        blank.column(name).copy_(torch.tensor(rows, dtype=torch.float64))
    return blank


def strip(groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Removes all of Mechanic's entries."""
    for entries in (*groups, *(entry for entry in state.values() if isinstance(entry, dict))):
        for key in [k for k in entries if str(k).startswith(PREFIX)]:
            del entries[key]


def split(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, Tensor]]]:
    """A copy for the base's own `load_state_dict`, and Mechanic's tensors by parameter id.

    torch casts every floating-point tensor it loads to the parameter's dtype, which would round the float32 delta of
    bf16 weights. The inner dicts may be an optimizer's live state: they are copied, never changed.
    """
    plain, ours = {}, {}
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, dict):
            plain[key] = entries
            continue
        ours[key] = {k: v for k, v in entries.items() if str(k).startswith(PREFIX) and isinstance(v, Tensor)}
        if rest := {k: v for k, v in entries.items() if not str(k).startswith(PREFIX)}:
            plain[key] = rest
    return {**state_dict, "state": plain}, ours


def merge(
    params: Mapping[Any, Any],
    ours: Mapping[Any, dict[str, Tensor]],
    state: dict[Any, dict[str, Any]],
    delta_dtype: torch.dtype | None,
) -> None:
    """Adds Mechanic's tensors (by parameter id) to the base's state, on the parameter's device, in their own dtype."""
    for key, entries in ours.items():
        p = params.get(key)
        if p is None:
            continue
        kept = {DELTA: dtype_of_delta(p.dtype, delta_dtype), **({REF: p.dtype} if needs_reference(p.dtype) else {})}
        for name in entries.keys() & kept.keys():
            value = entries[name].detach().clone().to(device=p.device, dtype=kept[name])
            state.setdefault(p, {})[name] = value


def check(state_dict: StateDict, groups: Sequence[dict[str, Any]], settings: Settings) -> None:
    """Validates a state dict before anything is changed.

    Raises:
        ValueError: This optimizer cannot continue from it.
    """
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return  # the base rejects it before changing anything
    if not holds_tuner(saved):
        return
    steps = check_tuner(saved, settings)
    ids = [i for g in saved for i in g["params"]]
    params = dict(zip(ids, (p for g in groups for p in g["params"]), strict=True))
    entries = {i: e for i, e in state_dict["state"].items() if isinstance(e, dict) and i in params}
    deltas = {i: e[DELTA] for i, e in entries.items() if isinstance(e.get(DELTA), Tensor)}
    for i, delta in deltas.items():
        if not delta.is_meta and not local(delta).isfinite().all():
            raise ValueError(
                f"the checkpoint's {DELTA} of parameter {i} is not finite, so every step would be skipped: it is "
                "damaged. Load another checkpoint."
            )
        if delta.shape != params[i].shape:
            raise ValueError(
                f"the checkpoint's {DELTA} has shape {tuple(delta.shape)} where the parameter has "
                f"{tuple(params[i].shape)}: it was saved from another model, or with the parameters in another order."
            )
    if steps and entries and not deltas and not is_released(saved):
        raise ValueError(
            f"the checkpoint has Mechanic's tuner but no {DELTA}: without the sum of the base's updates the learned "
            f"scale is meaningless. Remove the keys that start with {PREFIX!r} from its param groups to start from "
            "scratch."
        )


def is_released(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether these param groups come from an optimizer that has given its delta back."""
    return all(group.get(PREFIX + "frozen") == RELEASED for group in groups)


def check_tuner(saved: Sequence[dict[str, Any]], settings: Settings) -> int:
    """Validates the tuner in the param groups.

    Returns:
        The tuner's steps so far.

    Raises:
        ValueError: The groups are damaged or incompatible with these settings.
    """
    first, *_ = parse(saved, settings)
    tuners, other = (len(saved), "all") if settings.scope == "group" else (1, "group")
    if first.header.tuners != tuners:
        raise ValueError(
            f"the checkpoint was saved with scope={other!r}, this optimizer has scope={settings.scope!r}: "
            f"pass scope={other!r} to mechanize()."
        )
    return first.steps
