"""Runs examples/train_fsdp2.py with rank 1 killed twice: in the middle of a step and, once restarted, of a save.

torchrun's agent restarts the ranks. It forks them, since six new interpreters would take most of the time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_fsdp2

KILLED_STEP = 16


def dies(function: Callable[..., Any], *, in_call: int) -> Callable[..., Any]:
    """Wraps the function so that rank 1 is killed in its `in_call`-th call."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == in_call and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return called


def rank() -> None:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0:
        train_fsdp2.train_step = dies(train_fsdp2.train_step, in_call=KILLED_STEP)
    elif restarts == 1:
        FileSystemWriter.write_data = dies(FileSystemWriter.write_data, in_call=1)  # type: ignore[method-assign]
    if os.environ["RANK"] == "0":
        folder = train_fsdp2.parse(None).out / "checkpoints"
        print(f"start {restarts} finds {sorted(path.name for path in folder.glob('*'))}", flush=True)  # noqa: T201
    train_fsdp2.main()


def launch() -> None:
    elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            max_restarts=2,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="fork",
        ),
        rank,
    )()
