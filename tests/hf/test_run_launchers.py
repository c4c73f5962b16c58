from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_tiny import assert_same, by_step, command_line, plain_loop

HERE = Path(__file__).parent
# on a CPU accelerate starts several processes only by mpirun; --multi_gpu is its torchrun, even without a GPU
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
LAUNCH += ["--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no", "-m", "mechanic_plugins.run"]


@pytest.mark.slow
def test_an_unmodified_script_by_a_launcher(tmp_path: Path) -> None:
    """Uses accelerate, which is torchrun with some more variables; torchrun itself starts runners in test_probe.py."""
    argv = [str(HERE / "hf_script.py"), *command_line(tmp_path, result=tmp_path / "result")]
    results = launched([*LAUNCH, *argv], tmp_path)
    assert len(results) == 2
    assert_same(results[0], plain_loop(by_step(results)))


def launched(command: list[str], folder: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "helpers")])  # for the package and lean.py
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result.*.json"))]
