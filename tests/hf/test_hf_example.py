from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_transformers.py"


Example = Callable[..., float]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs the script with these arguments and returns how much the loss on held-out text fell."""

    def example(*arguments: object) -> float:
        fixed = ["--output_dir", tmp_path / "out", "--use_cpu", True, "--disable_tqdm", True, "--save_strategy", "no"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in (SCRIPT, *fixed, *arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        said = capsys.readouterr().out
        assert "mechanic/scale" in said
        before, after = map(float, re.findall(r"held-out text: ([\d.]+) -> ([\d.]+)", said)[0])
        return before - after

    return example


def test_the_example_learns(example: Example) -> None:
    assert example("--max_steps", 80, "--warmup_steps", 0, "--length", 32) > 0.5


def test_the_example_goes_on_from_a_pretrained_model(example: Example, tmp_path: Path) -> None:
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
    assert example(*given) > 0.2
