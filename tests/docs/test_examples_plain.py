from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import differences

SCRIPT = Path(__file__).parents[2] / "examples" / "train_plain.py"
EPOCHS = 12

pytestmark = pytest.mark.slow


def command(folder: Path, *arguments: str) -> list[str]:
    return [str(SCRIPT), "--epochs", str(EPOCHS), "--checkpoint", str(folder / "digits.pt"), *arguments]


def run(folder: Path, *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", command(folder, *arguments))
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return said.getvalue()


def run_until_half_and_kill(folder: Path) -> None:
    with subprocess.Popen([sys.executable, *command(folder)], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        shown = b""
        while not re.search(rb" [4-9]/12 ", shown):
            piece = process.stderr.read(16)
            assert piece, "it ended before half"
            shown += piece
        process.kill()
    assert process.returncode == -9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_the_example_learns_the_digits(whole: tuple[Path, str]) -> None:
    said = re.fullmatch(r"test accuracy (0\.\d+), learned learning rate (\S+)\n", whole[1])
    assert said
    assert float(said[1]) > 0.93
    assert float(said[2]) > 1e-3


def test_a_run_killed_at_half_and_resumed_ends_bit_equal(whole: tuple[Path, str], tmp_path: Path) -> None:
    run_until_half_and_kill(tmp_path)
    half = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert 4 <= half["epoch"] < EPOCHS
    assert run(tmp_path, "--resume", str(tmp_path / "digits.pt")) == whole[1]
    ends = [torch.load(folder / "digits.pt", weights_only=True) for folder in (tmp_path, whole[0])]
    assert ends[0]["epoch"] == EPOCHS
    assert not differences(*ends)
