"""Runs tests/interpreted in processes of their own: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
LONG = [file for file in FILES if file.stem == "test_trained_by_kernels"]
HALVES = {"training": LONG, "the others": [file for file in FILES if file not in LONG]}
"""Of about the same time, one for each worker: every process imports torch and Triton first."""


@pytest.mark.slow
@pytest.mark.parametrize("half", [pytest.param(h, marks=pytest.mark.xdist_group(f"kernels, {h}")) for h in HALVES])
def test_gpu_kernels_by_the_interpreter(half: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, HALVES[half])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
