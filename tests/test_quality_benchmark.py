"""The benchmark of tuning quality: every family in small, and the page that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parent.parent / "examples" / "benchmarks" / "quality"


def started(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, FOLDER / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "results.jsonl"
    started("run.py", "--size", "smoke", "--seeds", "1", "--methods", "mechanic", "--out", path)
    sweep = ("--methods", "sweep", "mechanic, other lrs", "--only", "convex: iris", "streams")
    started("run.py", "--size", "smoke", "--seeds", "2", *sweep, "--out", path)
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_family_trains(results: Path) -> None:
    ours = [record for record in records(results) if record["method"] == "mechanic"]
    language = {"language", "language, 500 steps", "language, 1000 steps"}
    families = {"convex", "images", "fine-tuning", "streams", "warm-ups", "trends"} | language
    assert {record["family"] for record in ours} == families
    for record in ours:
        assert record["train_loss"] < record["losses"][0], record["problem"]


@pytest.mark.slow
def test_what_is_done_is_not_done_again(results: Path) -> None:
    before = results.read_text()
    out = started("run.py", "--size", "smoke", "--seeds", "1", "--methods", "mechanic", "--out", results)
    assert "0 jobs to run" in out
    assert results.read_text() == before


@pytest.mark.slow
def test_the_base_learning_rate_does_not_matter(results: Path) -> None:
    found: dict[tuple[str, int], list[float]] = {}
    for record in records(results):
        if record["method"].startswith("mechanic"):
            found.setdefault((record["problem"], record["seed"]), []).append(record["train_loss"])
    compared = [losses for losses in found.values() if len(losses) > 2]
    assert compared
    for losses in compared:
        assert max(losses) <= 1.005 * min(losses)


@pytest.mark.slow
def test_the_page(results: Path, tmp_path: Path) -> None:
    started("report.py", results, "--out", tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| convex | adamw | 1 |" in page
    assert "runs of Mechanic's defaults" in page
    for picture in ("ratios.png", "learning_rates.png"):
        assert picture in page
        assert (tmp_path / picture).stat().st_size > 10_000


def record(method: str, seed: int, loss: float, *, lr: float = 1.0) -> dict[str, Any]:
    about = {"problem": "p", "family": "convex", "base": "sgd", "method": method, "lr": lr, "seed": seed}
    return {**about, "train_loss": loss, "accuracy": 0.5}


def test_ratios_are_taken_on_the_seeds_that_both_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1 is harder for everybody: a method that was not run on it must look no better for that."""
    monkeypatch.syspath_prepend(FOLDER)
    import report  # type: ignore[import-not-found]

    sweep = [record("sweep", 0, 1.0, lr=0.1), record("sweep", 1, 3.0, lr=0.1), record("sweep", 0, 9.0, lr=1.0)]
    ours = [record("mechanic", 0, 1.1), record("mechanic", 1, 3.0)]
    changed = [record("mechanic but hindsight 1", 0, 1.2)]
    results = report.Results([*sweep, *ours, *changed])
    assert results.ratio("p", "mechanic") == pytest.approx(4.1 / 4.0)
    assert results.methods() == ["mechanic"]
    assert report.ablation_table(results).splitlines() == [
        "| problem | default | hindsight 1 |",
        "| --- | --- | --- |",
        "| p | 1.100 | 1.200 |",
    ]
