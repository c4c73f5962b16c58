from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import Runner, Warm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """`run("--replace", ..., "train.py")` calls `mechanic-run` in an empty folder."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mechanic_plugins.run", *words]
        env = environment(tmp_path, **variables)
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=280)
        assert_nothing_left(tmp_path)
        return done

    return run


@pytest.fixture
def run_warm(tmp_path: Path, warm: Warm) -> Runner:
    """Like `run`, in a process that has already imported torch."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = warm(words, tmp_path, environment(tmp_path, **variables))
        assert_nothing_left(tmp_path)
        return done

    return run


def environment(folder: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])  # for the package and lean.py
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return env


def assert_nothing_left(folder: Path) -> None:
    left = [path.name for path in folder.glob("mechanic-run-*")]
    assert not left, f"the runner left {left}"
