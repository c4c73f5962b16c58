"""Runs examples/train_ray.py on two Ray workers."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ray.py"


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    paths = {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": paths}, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.timeout(600)  # Ray Train starts three times, a minute each
def test_a_restored_run_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line(name: str, epochs: int) -> str:
        monkeypatch.setattr(
            sys, "argv", [str(SCRIPT), "--storage", str(tmp_path), "--name", name, f"--epochs={epochs}"]
        )
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out.strip().splitlines()[-1]

    whole = last_line("whole", 4)
    half = last_line("halves", 2)
    assert "mechanic/steps 60.0" in half
    assert last_line("halves", 4) == whole
    assert "mechanic/steps 120.0" in whole
    assert float(whole.partition("accuracy ")[2].partition(",")[0]) > 0.85
