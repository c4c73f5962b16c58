"""The example's training, on ranks that are there already. Launchers start others: see test_probe.py."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def train_here(rank: int, steps: int) -> tuple[float, float]:
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed looks for it
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("train_deepspeed")
    mechanic, loss = example.train(str(EXAMPLES / "deepspeed_config.json"), steps)
    return loss, mechanic.learned_lr


def test_the_example_on_two_ranks(engines: Callable[[int], Ranks]) -> None:
    (loss, lr), (other_loss, other_lr) = engines(2)(train_here, 60)
    assert lr == other_lr > 0
    assert max(loss, other_loss) < 0.5 < 1.0986, "three arms: a guess has a loss of log 3"
