"""What happened in the processes of one run: a file that all of them append to."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

__all__ = ["Events", "Kind"]

Kind = str
"""Read by the runner: "built" (a class), "mechanic", "stepped", "idle" and "missed" (a class), "replaced" (a name),
"probed", "reported". "told" and "plain" only keep a process from repeating itself."""


class Events:
    """Notes each event once a process.

    Args:
        path: The file, which exists already.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._noted: set[tuple[Kind, str]] = set()

    @classmethod
    def new(cls) -> Events:
        handle, path = tempfile.mkstemp(prefix="mechanic-run-", suffix=".jsonl")
        os.close(handle)
        return cls(path)

    @property
    def path(self) -> str:
        return str(self._path)

    def note(self, kind: Kind, what: str = "") -> bool:
        """Returns whether it is the first of its kind in this process."""
        if (kind, what) in self._noted:
            return False
        self._noted.add((kind, what))
        # it is on the machine where the runner was started: another node cannot tell, and need not
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.write(handle, f"{json.dumps([kind, what])}\n".encode())  # one short write: ranks do not interleave
            os.close(handle)
        return True

    def of(self, kind: Kind) -> set[str]:
        """What all processes have noted."""
        if not self._path.exists():
            return set()
        lines = map(json.loads, self._path.read_text().splitlines())
        return {what for noted, what in lines if noted == kind}

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
