from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def example(folder: Path, *arguments: object) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    fixed = ["--output_dir", folder / "out", "--use_cpu", True, "--disable_tqdm", True, "--save_strategy", "no"]
    command = [sys.executable, ROOT / "examples" / "train_transformers.py", *fixed, *arguments]
    done = subprocess.run(map(str, command), capture_output=True, text=True, check=False, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    few_steps = ("--max_steps", 80, "--warmup_steps", 0)
    said = example(tmp_path, *few_steps, "--length", 32)
    before, after = map(float, re.findall(r"held-out text: ([\d.]+) -> ([\d.]+)", said)[0])
    assert after < before - 0.5
    assert "mechanic/scale" in said


@pytest.mark.slow
def test_the_example_goes_on_from_a_pretrained_model(tmp_path: Path) -> None:
    from hf_script import build_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz .,\n?")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    build_model(dtype="float32").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    few_steps = ("--max_steps", 80)
    said = example(tmp_path, "--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--length", 12, *few_steps)
    before, after = map(float, re.findall(r"held-out text: ([\d.]+) -> ([\d.]+)", said)[0])
    assert after < before - 0.2
