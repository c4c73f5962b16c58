"""Runs the example on two existing ranks. For runs by launchers see test_probe.py."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_here(rank: int) -> str:
    os.environ["LOCAL_RANK"] = str(rank)  # read by DeepSpeed
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["train_deepspeed.py", "--config", str(EXAMPLES / "deepspeed_config.json"), "--steps", "90"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        importlib.import_module("train_deepspeed").main()
    return said.getvalue()


def test_the_example_on_two_ranks(engines: Callable[[int], Ranks]) -> None:
    ranks = engines(2)
    said, silent = ranks(run_here)
    ranks.stop()  # the example has destroyed their process group
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)]
    assert len(losses) == 2
    assert losses[-1] < 0.5 < 1.0986, "three arms: a guess has a loss of log 3"
    assert "loss" not in silent
