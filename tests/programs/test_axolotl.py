"""axolotl's own command, under the runner and with the plugin from the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"

CONFIG = {
    "sequence_len": 32,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 12,
    "logging_steps": 1,
    "val_set_size": 0,
    "bf16": False,
    "optimizer": "mechanic_adamw",
    "learning_rate": 1.0,
    "lr_scheduler": "cosine",
    "optim_args": {"scope": "all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("door", ["runner", "plugin"])
def test_axolotl(tmp_path: Path, door: str) -> None:
    """Its command starts accelerate, which starts the training process."""
    tiny.installed("axolotl")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": tiny.sentence(i)}) for i in range(64)))
    dataset = {"path": "rows.jsonl", "ds_type": "json", "type": "completion", "field": "text"}
    model = tiny.saved(tmp_path / "model", positions=128)  # it pads to a multiple of 64
    config = {**CONFIG, "base_model": str(model), "datasets": [dataset], "output_dir": "out"}
    runner = [sys.executable, "-m", "mechanic_plugins.run"]
    if door == "plugin":
        runner, config["plugins"] = [], ["mechanic_axolotl.Mechanic"]
        (plugin,) = re.findall(r"```python\n(# mechanic_axolotl.py.*?)```", PAGE.read_text(), flags=re.DOTALL)
        (tmp_path / "mechanic_axolotl.py").write_text(plugin)
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is valid YAML
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = [*runner, "axolotl", "train", "config.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = json.loads((tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    scales = [entry["mechanic/scale"] for entry in logs if "mechanic/scale" in entry]
    assert len(scales) == 12
    assert scales[-1] > 0
