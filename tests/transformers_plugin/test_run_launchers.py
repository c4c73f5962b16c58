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
BIN = Path(sys.executable).parent
RUN = ("-m", "mechanic_plugins.run")

# A rank under torchrun is `python -m mechanic_plugins.run script.py` with a few variables more.
LAUNCHERS: dict[str, list[str]] = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *RUN],
    # accelerate starts several processes on a CPU by mpirun alone; --multi_gpu is its torchrun, wherever it runs
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no", *RUN),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_unmodified_script_by_every_launcher(tmp_path: Path, launcher: str) -> None:
    argv = [str(HERE / "hf_script.py"), *command_line(tmp_path, result=tmp_path / "result")]
    results = launched([*LAUNCHERS[launcher], *argv], tmp_path)
    assert len(results) == 2
    assert_same(results[0], plain_loop(by_step(results)))


def launched(command: list[str], folder: Path) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result.*.json"))]
