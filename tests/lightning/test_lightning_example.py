"""Runs the example as a user does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from lightning_helpers import QUIET

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_lightning.py"

pytestmark = [*QUIET, pytest.mark.slow]


def test_the_example_trains_logs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by seed_everything()
        monkeypatch.setenv(name, "0")
    spec = importlib.util.spec_from_file_location("train_lightning", EXAMPLE)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_lightning", example)
    spec.loader.exec_module(example)
    metrics = example.main(["--epochs", "8", "--folder", str(tmp_path)])

    assert metrics["accuracy"] > 0.8, "chance is 0.1"
    assert metrics["mechanic/scale"] > 0
    assert (tmp_path / "digits_lr.png").read_bytes().startswith(b"\x89PNG")
    (events,) = (tmp_path / "digits_logs" / "tensorboard").rglob("events.out*")
    logged = EventAccumulator(str(events)).Reload()
    assert {"loss", "mechanic/scale", "mechanic/effective_lr"} <= set(logged.Tags()["scalars"])
    assert len(logged.Scalars("mechanic/scale")) == 8 * 47, "one a step"
