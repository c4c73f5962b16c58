"""litgpt's pretraining from a config file, stopped and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

EPOCH = 16  # steps: 64 rows, 4 at a time

DATA = '''
import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader


class Loader(DataLoader):
    """litgpt saves it with the rest. Here it is always at the beginning of an epoch."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Counting(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.rows = torch.arange(64)[:, None] + torch.arange(max_seq_length + 1)
        self.batch_size = batch_size

    def train_dataloader(self):
        return Loader(self.rows % 16, batch_size=self.batch_size)

    val_dataloader = train_dataloader
'''

CONFIG = {
    "model_name": "pythia-14m",
    "model_config": {
        **{"name": "tiny", "block_size": 8, "n_layer": 1, "n_embd": 16, "n_head": 2, "padded_vocab_size": 16},
    },
    "precision": "32-true",
    "data": {"class_path": "counting.Counting"},
    "optimizer": {"class_path": "mechanic_plugins.optim.AdamW", "init_args": {"lr": 1.0, "weight_decay": 0.1}},
    "devices": 1,
    "logger_name": "csv",
    "eval": {"interval": 1000, "max_iters": 2},
}


def pretrain(folder: Path, out: str, tokens: int, **more: object) -> str:
    steps = {"global_batch_size": 4, "micro_batch_size": 4, "max_tokens": tokens, "log_interval": 1}
    train = {**steps, "max_norm": 1.0, "min_lr": 0.0, "lr_warmup_steps": 4, "save_interval": EPOCH}
    (folder / "config.yaml").write_text(json.dumps({**CONFIG, "out_dir": out, "train": train, **more}))
    (folder / "counting.py").write_text(DATA)
    command = [sys.executable, "-m", "litgpt", "pretrain", "--config", "config.yaml"]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path}  # compiling takes longer than training
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_litgpt_pretrains_and_resumes(tmp_path: Path) -> None:
    tiny.installed("litgpt")
    said = pretrain(tmp_path, "whole", 3 * EPOCH * 4 * 8)
    losses = [float(line.split("loss train: ")[1].split(",")[0]) for line in said.splitlines() if "loss train" in line]
    assert len(losses) == 3 * EPOCH
    assert losses[-1] < 0.8 * losses[0]
    pretrain(
        tmp_path, "resumed", 3 * EPOCH * 4 * 8, resume=str(tmp_path / "whole" / f"step-{EPOCH:08}" / "lit_model.pth")
    )
    whole, resumed = (torch.load(tmp_path / out / "final" / "lit_model.pth") for out in ("whole", "resumed"))
    group = whole["optimizer"]["param_groups"][0]
    tuner = json.loads(group["mechanic_tuner"])["tuner"]
    assert tuner["steps"] == 3 * EPOCH
    assert tuner["scale"] == json.loads(resumed["optimizer"]["param_groups"][0]["mechanic_tuner"])["tuner"]["scale"] > 0
    assert all(torch.equal(weight, resumed["model"][name]) for name, weight in whole["model"].items())
