"""Runs tests/kernels/interpreted in its own process, as Triton decides at import whether to interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_gpu_kernels_by_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
