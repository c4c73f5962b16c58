"""The runner's messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

__all__ = ["IDLE", "LOST", "NOTHING", "STOPPED", "USAGE", "is_first_rank", "say", "stop"]

USAGE = 2
"""Exit status: the command line cannot be carried out."""
LOST = 3
"""Exit status: an optimizer that was to be mechanized trained without Mechanic."""
NOTHING = 4
"""Exit status: nothing was replaced, or nothing was probed."""
STOPPED = 5
"""Exit status of a process that multiprocessing started, after a probe; the runner's own is then 0."""
IDLE = 6
"""Exit status: a mechanized optimizer made no step in a program that trained."""

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")


def say(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"mechanic_plugins.run: {message}\n")
    sys.stderr.flush()


def stop(message: str, status: int = USAGE) -> NoReturn:
    """Says why, and exits."""
    say(message)
    sys.exit(status)


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"
