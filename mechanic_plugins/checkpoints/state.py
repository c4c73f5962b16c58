"""Reading and writing Mechanic's state in the base's param groups and state.

The tuner is stored in every param group as Python numbers, lists of numbers and one string, under keys that start with
`mechanic_` (see `checkpoints.format`): the one place that survives torch.save, torch.distributed.checkpoint (flattened
or not) and FSDP1. Tensors of a parameter's shape (see `mechanic_plugins.core.param_state`) are stored beside the base's
moments, so that they are sharded and resharded like them. Everything loads with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.checkpoints.format import (
    FORMAT,
    HEADER,
    RELEASED,
    Header,
    Record,
    fields,
    has_own_key,
    holds_tuner,
    notice,
    parse,
    portable,
)
from mechanic_plugins.core.param_state import DELTA, PREFIX, REF
from mechanic_plugins.core.row import SCALARS, Row
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import TunerState, initial_state
from mechanic_plugins.distributed.sharding import local

__all__ = ["Progress", "check", "check_tuner", "is_released", "merge", "read", "split", "strip", "write"]

StateDict = dict[str, Any]
_S = PREFIX + "s"


@dataclass
class Progress:
    """The tuner, and what it knows of the base's learning rates."""

    tuner: TunerState
    unit: float = 0.0
    """The base learning rate that a scale of 1 stands for; 0 before the first step with a learning rate above 0."""
    frozen: bool = False
    released: bool = False
    """Frozen for good: nothing of a parameter's shape is kept."""
    lr_refs: dict[int, float] = field(default_factory=dict)
    """Each param group's first learning rate above 0, by index: the reference of its schedule."""
    begun: set[int] = field(default_factory=set, repr=False)
    """The tuners that a GPU may advance by itself."""
    seen: tuple[object, ...] = field(default=(), repr=False)
    """The lists that `write` put into the groups. A different object means that state was loaded since."""

    def row_of(self, group: dict[str, Any]) -> int | None:
        """The group's index among those that the tuner was read from or written to."""
        mine = dict.get(group, _S)
        for index, other in enumerate(self.seen):
            if other is mine:
                return index
        return None

    def tuner_of(self, group: dict[str, Any]) -> int:
        """Which tuner the group belongs to. An engine may have left only some of the groups in place."""
        return (self.row_of(group) or 0) if len(self.tuner) > 1 else 0

    def add_tuner(self, settings: Settings) -> None:
        """Adds a tuner for a new param group."""
        new = initial_state(settings, tuners=1, device=self.tuner.device)
        self.tuner = self.tuner.with_rows([*self.tuner.rows, *new.rows])


def write(groups: Sequence[dict[str, Any]], progress: Progress, settings: Settings, *, delta_unit: float) -> None:
    """Writes the tuner into every param group. Synchronises with the device once."""
    names = fields(settings)
    rows, (steps, skipped) = progress.tuner.rows, progress.tuner.counts
    about = Header(FORMAT, len(rows), portable(settings), delta_unit)
    for index, group in enumerate(groups):
        row, later = rows[index if len(rows) > 1 else 0], dict[str, Any]()
        for name in names:
            value = getattr(row, name)
            home = group if has_own_key(name) else later
            home[PREFIX + name] = value if name in SCALARS else list(value)
        group[PREFIX + "steps"], group[PREFIX + "skipped"] = int(steps), int(skipped)
        group[PREFIX + "unit"] = progress.unit
        group[PREFIX + "frozen"] = RELEASED if progress.released else progress.frozen
        group[HEADER] = about._replace(later=later, lr_ref=progress.lr_refs.get(index)).dump()
    progress.seen = tuple(group[_S] for group in groups)


def read(
    groups: Sequence[dict[str, Any]], settings: Settings, *, tuners: int, device: torch.device
) -> tuple[Progress, str | None]:
    """The tuner in the param groups, or a new one, and a message for the user."""
    progress = Progress(initial_state(settings, tuners=tuners, device=device))
    if not holds_tuner(groups):
        return progress, None
    records = parse(groups, settings)
    first = records[0]
    rows = [_row(*each) for each in zip(records, progress.tuner.rows, strict=False)]
    progress.tuner = progress.tuner.with_rows(rows, (float(first.steps), float(first.skipped)))
    progress.unit, progress.frozen, progress.released = first.unit, bool(first.frozen), first.frozen == RELEASED
    progress.lr_refs = {index: ref for index, record in enumerate(records) if (ref := record.header.lr_ref)}
    progress.seen = tuple(group[_S] for group in groups)
    return progress, notice(first.header, settings)


def _row(record: Record, blank: Row) -> Row:
    """Fields newer than the checkpoint's format keep their initial value."""
    for name, numbers in record.numbers.items():
        setattr(blank, name, numbers[0] if name in SCALARS else list(numbers))
    return blank


def strip(groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Removes all of Mechanic's entries."""
    for entries in (*groups, *(entry for entry in state.values() if isinstance(entry, dict))):
        for key in [k for k in entries if str(k).startswith(PREFIX)]:
            del entries[key]


def split(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, Tensor]]]:
    """A copy for the base's own `load_state_dict`, and Mechanic's tensors by parameter id.

    torch casts every floating-point tensor it loads to the parameter's dtype, which would round the float32 masters
    of bf16 weights. The inner dicts may be an optimizer's live state: they are copied, never changed.
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
    dtypes: Callable[[Tensor], dict[str, torch.dtype]],
) -> None:
    """Adds Mechanic's tensors (by parameter id) to the base's state, on the parameter's device.

    `dtypes` gives the slots of a parameter. Delta, which an older format has in place of the reference, is kept too.
    """
    for key, entries in ours.items():
        p = params.get(key)
        if p is None:
            continue
        kept = dtypes(p)
        for name, value in entries.items():
            if name in kept or name == DELTA:
                dtype = kept.get(name, value.dtype)
                state.setdefault(p, {})[name] = value.detach().clone().to(device=p.device, dtype=dtype)


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
    found = [(i, name, e[name]) for i, e in entries.items() for name in (REF, DELTA) if isinstance(e.get(name), Tensor)]
    for i, name, kept in found:
        if not kept.is_meta and not local(kept).isfinite().all():
            raise ValueError(
                f"the checkpoint's {name} of parameter {i} is not finite, so every step would be skipped: it is "
                "damaged. Load another checkpoint."
            )
        if kept.shape != params[i].shape:
            raise ValueError(
                f"the checkpoint's {name} has shape {tuple(kept.shape)} where the parameter has "
                f"{tuple(params[i].shape)}: it was saved from another model, or with the parameters in another order."
            )
    if steps and entries and not found and not is_released(saved):
        wanted = REF if settings.rule == "relative" else DELTA
        raise ValueError(
            f"the checkpoint has Mechanic's tuner but no {wanted}: without it the learned scale is meaningless. Remove "
            f"the keys that start with {PREFIX!r} from its param groups to start from scratch."
        )


def is_released(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether these param groups come from an optimizer after `freeze(release=True)`."""
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
