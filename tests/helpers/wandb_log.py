"""Reads what W&B wrote offline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["count"]


def count(folder: Path, names: Sequence[str], *, within_s: float = 30) -> list[int]:
    """Counts each name in the only run below `folder`. Waits, as `finish()` returns before W&B's service is done."""
    (log,) = folder.rglob("*.wandb")
    until = time.monotonic() + within_s
    while True:
        written = log.read_bytes()
        found = [written.count(name.encode()) for name in names]
        if all(found) or time.monotonic() > until:
            return found
        time.sleep(0.05)
