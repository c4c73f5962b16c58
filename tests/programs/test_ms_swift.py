"""ms-swift's own module under the runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch


def saved(folder: Path) -> Path:
    """A model for swift, which requires a known model type and a tokenizer that has every letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(letters)}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, **sizes, **tokens)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("target", ["swift sft", "-m swift.cli.sft"])
def test_ms_swift(tmp_path: Path, target: str) -> None:
    """The command starts the module in its own process."""
    tiny.installed("swift")
    turns = [[("user", "is cat"), ("assistant", tiny.sentence(i))] for i in range(64)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        **tiny.training_arguments(tmp_path / "out"),
        "model": saved(tmp_path / "model"),
        "model_type": "qwen2",
        "template": "dummy",
        "dataset": tmp_path / "rows.jsonl",
        "split_dataset_ratio": 0,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "optim_args": "scope=all",
        "learning_rate": 1.0,
        "add_version": False,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "mechanic_plugins.run", *target.split(), *words]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [json.loads(line) for line in (tmp_path / "out" / "logging.jsonl").read_text().splitlines()]
    scales = [entry["mechanic/scale"] for entry in logs if "mechanic/scale" in entry]
    assert len(scales) == 12
    assert scales[-1] > 0
    assert "Mechanic learned a learning rate of" in done.stdout + done.stderr
