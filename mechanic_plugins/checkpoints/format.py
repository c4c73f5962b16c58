"""The format of Mechanic's entries in a checkpoint's param groups, validated before anything is changed.

torch.distributed.checkpoint rejects a checkpoint that lacks a key of the live param groups, so a new key would make
every older sharded checkpoint unreadable. What was added since the first format is therefore stored as JSON in
`mechanic_tuners`: the format, the settings, the unit of the scale, and newer fields of the tuner. A string passes
through torch.save, FSDP, DeepSpeed and flattened state dicts unchanged; nested dicts do not.

To add a field to the tuner, raise FORMAT and enter the field in SINCE; older files then use its initial value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any, NamedTuple

from mechanic_plugins.core.param_state import PREFIX
from mechanic_plugins.core.relative import BEGINNING, PRIOR
from mechanic_plugins.core.row import SCALARS, VECTORS
from mechanic_plugins.core.settings import Settings

__all__ = [
    "FORMAT",
    "HEADER",
    "RELEASED",
    "Header",
    "Record",
    "fields",
    "has_own_key",
    "holds_tuner",
    "notice",
    "parse",
    "parse_header",
    "portable",
]

FORMAT = 5
HEADER = PREFIX + "tuners"
RELEASED = "released"
"""The value of `mechanic_frozen` once no reference is kept any more."""

SINCE: dict[str, int] = dict.fromkeys((*VECTORS, "s_init", "played", "h", "lr"), 1) | {"gradients": 2, "longest": 2}
"""The format that introduced each field; 3 if not listed. Format 4 has references for delta, 5 another `size`."""
_NOT_LISTED = 3
_THEORY_ONLY = ("q", "w0")
_MAY_BE_NEGATIVE = ("s", "r", "q", "h", "path")


class Header(NamedTuple):
    """The content of `mechanic_tuners`."""

    format: int
    tuners: int
    settings: dict[str, Any] | None = None
    delta_unit: float | None = None
    later: dict[str, Any] = {}  # noqa: RUF012  fields of the tuner newer than format 1
    lr_ref: float | None = None
    """The group's first learning rate above 0."""

    def dump(self) -> str:
        return json.dumps(self._asdict())


class Record(NamedTuple):
    """The content of one param group. `numbers` lacks the fields that are newer than its format."""

    header: Header
    numbers: dict[str, list[float]]
    steps: int
    skipped: int
    unit: float
    frozen: bool | str


def fields(settings: Settings) -> tuple[str, ...]:
    """The fields of the tuner that are saved."""
    theory = settings.rule == "theory"
    return tuple(name for name in (*VECTORS, *SCALARS) if theory or name not in _THEORY_ONLY)


def has_own_key(field: str) -> bool:
    """Whether a field has a key of its own in the group, as in format 1, rather than in the header."""
    return SINCE.get(field, _NOT_LISTED) == 1


def holds_tuner(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of these param groups comes from a mechanized optimizer."""
    return any(str(key).startswith(PREFIX) for group in groups for key in group)


def parse(groups: Sequence[Mapping[str, Any]], settings: Settings) -> list[Record]:
    """The param groups' records.

    Raises:
        ValueError: They are damaged, of a newer format, or incompatible with these settings.
    """
    for index, group in enumerate(groups):
        if not holds_tuner([group]):
            raise ValueError(
                f"only some of the checkpoint's param groups hold Mechanic's tuner, group {index} does not: {_DAMAGED}"
            )
    records = [_Reader(index, group, settings).record() for index, group in enumerate(groups)]
    if len({(record.header.format, *record.numbers) for record in records}) > 1:
        raise ValueError(f"the checkpoint's param groups are not all of one format: {_DAMAGED}")
    return records


def parse_header(value: object) -> Header:
    """Reads `mechanic_tuners`.

    Raises:
        ValueError: It is damaged, or of a newer format.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(
            "the checkpoint is older than the first release of mechanic-plugins, and this version cannot read it: go "
            f"on from its weights. {_REMEDY}"
        )
    try:
        loaded = json.loads(value)  # type: ignore[arg-type]
        found = int(loaded["format"])
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint's {HEADER} is {value!r}, which cannot be read: {_DAMAGED}") from error
    if found > FORMAT:
        raise ValueError(
            f"the checkpoint has format {found} of Mechanic's state, this version of mechanic-plugins reads formats up "
            f"to {FORMAT}: pip install --upgrade mechanic-plugins"
        )
    if loaded.keys() != set(Header._fields) or not _is_sound(header := Header(**loaded)):
        raise ValueError(f"the checkpoint's {HEADER} is {value!r}, which is invalid: {_DAMAGED}")
    return header


def _is_sound(header: Header) -> bool:
    numbers: list[object] = [header.format, header.tuners, header.delta_unit]
    numbers += [] if header.lr_ref is None else [header.lr_ref]
    return (
        all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers)
        and isinstance(header.settings, dict)
        and isinstance(header.later, dict)
    )


_REMEDY = (
    f"Load another checkpoint, or remove the keys that start with {PREFIX!r} from its param groups to let Mechanic "
    "start from scratch."
)
_DAMAGED = f"it is damaged. {_REMEDY}"


def _path_of_squares(numbers: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Format 3 had the sum of scale * lr in place of the sum of its squares. Assumes that all steps were alike."""
    path, lr, elapsed = (numbers.get(name, [0.0])[0] for name in ("path", "lr", "elapsed"))
    steps = max(elapsed / lr, 1.0) if lr > 0 else 1.0
    return {"path": [path**2 / steps]} if path > 0 else {}


class _Reader:
    """Reads one param group; every error names the group and the key."""

    def __init__(self, index: int, group: Mapping[str, Any], settings: Settings) -> None:
        self.index, self.settings = index, settings
        self.values = dict(group)
        self.header = parse_header(self._value("tuners"))
        self.values |= self.header.later

    def record(self) -> Record:
        self._check_kind()
        if self._was_rule() == self.settings.rule:
            since = {name: SINCE.get(name, _NOT_LISTED) for name in fields(self.settings)}
            numbers = {name: self._field(name) for name in since if since[name] <= self.header.format}
            if self.header.format < 4:
                numbers |= _path_of_squares(numbers)
            if self.header.format < 5 and "size" in numbers:  # a root mean square, and PRIOR was 0.2
                numbers["size"] = [0.2 / PRIOR * numbers["size"][0]]
        else:
            numbers = self._adopted()
        frozen = self._value("frozen")
        if not isinstance(frozen, bool) and frozen != RELEASED:
            raise self._damaged("frozen", frozen, f"True, False or {RELEASED!r}")
        steps, skipped = self._whole_number("steps"), self._whole_number("skipped")
        return Record(self.header, numbers, steps, skipped, self._finite("unit", self._value("unit")), frozen)

    def _was_rule(self) -> str:
        return str((self.header.settings or {}).get("rule"))

    def _check_kind(self) -> None:
        """Rejects another number of betas or another rule, which is no damage, but a published rule cannot continue."""
        rule, was = self.settings.rule, self._was_rule()
        if rule == was and len(found := self._list("s")) != self.settings.n:
            raise ValueError(
                f"the checkpoint was saved with {len(found)} betas, this optimizer has {self.settings.n}: "
                "pass the same betas in settings=Settings(...)."
            )
        if rule not in ("relative", was):
            raise ValueError(
                f"the checkpoint was saved with rule={was!r}, and rule={rule!r} cannot go on from it: pass the same "
                "rule to mechanize(), or none for the default."
            )

    def _adopted(self) -> dict[str, list[float]]:
        """Takes over the scale that another rule learned. The default rule then starts without evidence."""
        played, lr = (self._finite(name, self._value(name)) for name in ("played", "lr"))
        if not played or not lr:
            return {}
        numbers = {"s": played, "played": played, "lr": lr, "gradients": float(BEGINNING), "size": played * lr / PRIOR}
        numbers |= {"length": 1.0, "path": -1.0, "touched": 1.0, "travelled": played * lr, "elapsed": lr}
        return {name: [number] for name, number in numbers.items()}

    def _field(self, name: str) -> list[float]:
        values = [self._value(name)] if name in SCALARS else self._list(name)
        wanted = 1 if name in SCALARS else self.settings.n
        if len(values) != wanted:
            raise self._damaged(name, values, f"a list of {wanted} numbers")
        return [self._finite(name, value) for value in values]

    def _value(self, name: str) -> Any:
        if PREFIX + name not in self.values:
            raise ValueError(f"the checkpoint's param group {self.index} lacks {PREFIX}{name}: {_DAMAGED}")
        return self.values[PREFIX + name]

    def _list(self, name: str) -> Sequence[Any]:
        value = self._value(name)
        if not isinstance(value, (list, tuple)):
            raise self._damaged(name, value, "a list of numbers")
        return value

    def _finite(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise self._damaged(name, value, "a finite number")
        if value < 0 and name not in _MAY_BE_NEGATIVE:
            raise self._damaged(name, value, "a number >= 0")
        return float(value)

    def _whole_number(self, name: str) -> int:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise self._damaged(name, value, "a whole number >= 0")
        return int(value)

    def _damaged(self, name: str, value: object, wanted: str) -> ValueError:
        found = f"the checkpoint's {PREFIX}{name} has {value!r} in param group {self.index}"
        return ValueError(f"{found}, expected {wanted}: {_DAMAGED}")


# -------------------------------------------------------------------- settings that differ


def portable(settings: Settings) -> dict[str, Any]:
    """The settings as they are after a round trip through JSON."""
    return {**asdict(settings), "betas": settings.betas and list(settings.betas)}


def notice(header: Header, settings: Settings) -> str | None:
    """A message for the user if the checkpoint's settings differ, else None."""
    ours, theirs = portable(settings), header.settings or {}
    if theirs.get("rule") != settings.rule:
        return (
            f"the checkpoint was saved with rule={theirs.get('rule')!r}. Its learned scale is kept, and the default "
            "rule goes on from there."
        )
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    listed = ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())
    as_call = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return (
        f"the checkpoint was saved with different settings: {listed}. This optimizer's settings apply from now on. To "
        f"continue as before, pass settings=Settings({as_call})."
    )
