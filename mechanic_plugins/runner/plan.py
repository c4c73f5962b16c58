"""What a command line asks for, in a form that child processes can be told."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["VARIABLE", "Plan", "Replacement"]

VARIABLE = "PYTHON_MECHANIC_RUN"
"""Carries the plan to child processes. DeepSpeed's launcher hands variables that start with PYTHON to other nodes."""


@dataclass(frozen=True)
class Replacement:
    """`--replace old` or `--replace old=new`: classes by their dotted names."""

    old: str
    new: str = ""

    @property
    def module(self) -> str:
        """Where the class is looked up."""
        return self.old.rpartition(".")[0]


@dataclass(frozen=True)
class Plan:
    """What to do in this process and in those it starts.

    Args:
        replace: The classes to mechanize.
        options: Keywords of `mechanize` for them, as "key=value,key=value".
        probe: After how many steps to stop; 0 for never.
        is_default: Whether `replace` was not asked for, but is what a probe does without it.
        events: The file in which processes note what they did.
        prefix: The environment the runner belongs to: another one's python is left alone.
    """

    replace: tuple[Replacement, ...] = ()
    options: str = ""
    probe: int = 0
    is_default: bool = False
    events: str = ""
    prefix: str = sys.prefix

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Plan:
        """From what `to_text` wrote."""
        return cls(**{**values, "replace": tuple(Replacement(**each) for each in values["replace"])})
