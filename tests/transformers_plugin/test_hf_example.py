from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_transformers.py"


def command(folder: Path, *arguments: object) -> list[str]:
    fixed = ["--output_dir", folder / "out", "--use_cpu", True, "--disable_tqdm", True, "--save_strategy", "no"]
    return [str(word) for word in (SCRIPT, *fixed, *arguments)]


def assert_learned(said: str, *, at_least: float) -> None:
    before, after = map(float, re.findall(r"held-out text: ([\d.]+) -> ([\d.]+)", said)[0])
    assert after < before - at_least


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, *command(tmp_path, "--max_steps", 80, "--warmup_steps", 0, "--length", 32)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned(done.stdout, at_least=0.5)
    assert "mechanic/scale" in done.stdout


def test_the_example_goes_on_from_a_pretrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_script import build_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz .,\n?")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    build_model(dtype="float32").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    given = ("--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--length", 12, "--max_steps", 80)
    monkeypatch.setattr(sys, "argv", command(tmp_path, *given))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert_learned(capsys.readouterr().out, at_least=0.2)
