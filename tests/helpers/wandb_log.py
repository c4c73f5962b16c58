"""What W&B wrote, offline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["count"]


def count(folder: Path, names: Sequence[str], *, within_s: float = 30) -> list[int]:
    """How often each name is in the one run below `folder`: `finish()` returns before its service has written."""
    (log,) = folder.rglob("*.wandb")
    until = time.monotonic() + within_s
    while True:
        written = log.read_bytes()
        found = [written.count(name.encode()) for name in names]
        if all(found) or time.monotonic() > until:
            return found
        time.sleep(0.05)
