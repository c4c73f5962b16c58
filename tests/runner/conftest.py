from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import Runner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """`run("--replace", ..., "train.py")` in an empty folder."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **variables}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        command = [sys.executable, "-m", "mechanic_plugins.run", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=280)
        left = [path.name for path in tmp_path.glob("mechanic-run-*")]
        assert not left, f"the runner left {left}"
        return done

    return run
