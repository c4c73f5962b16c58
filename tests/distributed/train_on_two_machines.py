"""Runs examples/train_fsdp2.py by two torchrun agents with one rank each, as on two machines.

They are forked and fork their ranks, since four new interpreters would take most of the time. Each machine's output
is in `machine0.txt` or `machine1.txt` of the output folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_fsdp2


def launch(endpoint: str) -> None:
    """Runs both agents, and fails if either does."""
    other = os.fork()
    with (train_fsdp2.parse(None).out / f"machine{int(other == 0)}.txt").open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    elastic_launch(
        LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=1,
            run_id="two-machines",
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            local_addr="127.0.0.1",
            start_method="fork",
        ),
        train_fsdp2.main,
    )()
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
