"""LLaMA-Factory's own command under the runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"finetuning_type": "lora", "lora_target": "c_attn", "loraplus_lr_ratio": 16}])
def test_llama_factory(tmp_path: Path, more: dict[str, object]) -> None:
    """Its LoRA+ makes four groups, of which two are empty here. It trains in a process started by torchrun."""
    tiny.installed("llamafactory")
    rows = [{"instruction": "is cat", "input": "", "output": tiny.sentence(i)} for i in range(64)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "rows.json"}}))
    config = {
        **tiny.training_arguments(tmp_path / "out"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": str(tiny.saved(tmp_path / "model")),
        "dataset": "tiny",
        "dataset_dir": str(tmp_path),
        "template": "empty",
        "cutoff_len": 24,
        "optim_args": "scope=all",
        **more,
    }
    (tmp_path / "train.yaml").write_text(json.dumps(config))  # JSON is valid YAML
    torchrun = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **(torchrun if more else {})}
    command = [sys.executable, "-m", "mechanic_plugins.run", "llamafactory-cli", "train", "train.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    scales = [entry["mechanic/scale"] for entry in logs if "mechanic/scale" in entry]
    assert len(scales) == 12
    assert scales[-1] > 0
