"""The example, as its docstring says to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import build_ops

ROOT = Path(__file__).parents[2]


def test_the_example_on_two_ranks(compiled: None) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a port that is free
    script = ["examples/train_deepspeed.py", "--config", "examples/deepspeed_config.json", "--steps", "60"]
    env = {**os.environ, **build_ops.environment()}
    done = subprocess.run([*launcher, *script], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 2
    assert losses[-1] < 0.5 < 1.0986, "three arms: a guess has a loss of log 3"
