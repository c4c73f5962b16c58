"""Runs tests/interpreted in processes of their own: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("file", [pytest.param(f, id=f.stem, marks=pytest.mark.xdist_group(f.stem)) for f in FILES])
def test_gpu_kernels_by_the_interpreter(file: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
