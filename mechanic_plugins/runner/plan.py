"""What a command line asks for, and what happened, in forms that all processes of a run share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Events", "Plan", "Replacement"]

VARIABLE = "PYTHON_MECHANIC_RUN"
"""Carries the plan to child processes. DeepSpeed's launcher hands variables that start with PYTHON to other nodes."""


@dataclass(frozen=True)
class Replacement:
    """`--replace old` or `--replace old=new`: classes by their dotted names."""

    old: str
    new: str = ""


@dataclass(frozen=True)
class Plan:
    """What to do in this process and in those it starts.

    Args:
        replace: The classes to mechanize.
        options: Options of `mechanize` for them, as "key=value,key=value".
        probe: Number of steps after which to stop; 0 for never.
        is_default: Whether `replace` is a probe's default.
        events: The file in which processes note what they did.
        prefix: The environment of the runner: another one's python is left alone.
    """

    replace: tuple[Replacement, ...] = ()
    options: str = ""
    probe: int = 0
    is_default: bool = False
    events: str = ""
    prefix: str = sys.prefix

    def to_text(self) -> str:
        """Serialises the plan for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Plan:
        """The inverse of `to_text`, after JSON parsing."""
        return cls(**{**values, "replace": tuple(Replacement(**each) for each in values["replace"])})


class Events:
    """A file that all processes of a run append to; each notes an event once.

    Read by the runner: "torch" (was imported), "gradients" (were computed), "built" (a class), "mechanic", "stepped",
    "bare", "idle", "unused" and "missed" (a class), "replaced" (a name), "probed", "reported". "told" and "plain" only
    keep a process from repeating itself.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._noted: set[tuple[str, str]] = set()

    @classmethod
    def new(cls) -> Events:
        handle, path = tempfile.mkstemp(prefix="mechanic-run-", suffix=".jsonl")
        os.close(handle)
        return cls(path)

    def note(self, kind: str, what: str = "") -> bool:
        """Appends an event. Returns whether it is new in this process."""
        if (kind, what) in self._noted:
            return False
        self._noted.add((kind, what))
        # the file is on the runner's machine; other nodes need not write to it
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            os.write(handle, f"{json.dumps([kind, what])}\n".encode())  # one short write: no interleaving
            os.close(handle)
        return True

    def of(self, kind: str) -> set[str]:
        """What all processes noted under this kind."""
        if not Path(self.path).exists():
            return set()
        lines = map(json.loads, Path(self.path).read_text().splitlines())
        return {what for noted, what in lines if noted == kind}

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)
