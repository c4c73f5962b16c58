from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mechanic_plugins.plot import Series, draw, find_log, main, read

LR = "mechanic/effective_lr"
HISTORY: list[dict[str, Any]] = [
    {"step": 10, "loss": 2.0, "learning_rate": 1e-3, LR: 0.0},
    {"step": 20, "loss": 1.5, "learning_rate": 1e-3, LR: 2e-4},
    {"step": 20, "eval_loss": 1.6, "eval_runtime": 1.0},
    {"step": 30, "loss": 1.2, "learning_rate": 5e-4, LR: 1e-4},
    {"step": 30, "train_loss": 1.4, "train_runtime": 9.0, "mechanic/peak_lr": 2.5e-4},
]


def write_state(path: Path, history: list[dict[str, Any]] = HISTORY) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": history, "global_step": 30}))
    return path


def test_transformers_state(tmp_path: Path) -> None:
    log = write_state(tmp_path / "checkpoint-30" / "trainer_state.json")
    assert find_log(tmp_path) == log
    series = read(log)
    assert series[LR] == [(10, 0.0), (20, 2e-4), (30, 1e-4)]
    lr, loss = draw(series, title="a run").axes
    assert lr.get_title() == "a run: learned lr 0.00025"
    (line,) = lr.get_lines()
    assert list(line.get_ydata()) == [0.0, 2e-4, 1e-4]
    assert [line.get_label() for line in loss.get_lines()] == ["loss"]
    assert (lr.get_yscale(), loss.get_yscale()) == ("log", "log")


def test_the_newest_of_several_runs(tmp_path: Path) -> None:
    for age, name in enumerate(["version_1", "version_0"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"{LR},step,train_loss\n1e-4,0,\n2e-4,9,3\n")
        os.utime(tmp_path / name / "metrics.csv", (1e9 - age, 1e9 - age))
    log = find_log(tmp_path)
    assert log.parent.name == "version_1"
    assert read(log) == {LR: [(0, 1e-4), (9, 2e-4)], "train_loss": [(9, 3)]}


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "runs" / "one") as writer:
        for step, value in ((1, 0.25), (2, 0.5)):
            writer.add_scalar(f"train/{LR}", value, step)
    log = find_log(tmp_path)
    assert log == tmp_path / "runs" / "one"
    assert read(log) == {f"train/{LR}": [(1, 0.25), (2, 0.5)]}
    assert len(draw(read(log), title="").axes) == 1  # no panel without a loss


@pytest.mark.parametrize(
    ("more", "names"),
    [({}, ["lr"]), ({"pg1": 1.0, "pg2": 1.0}, ["lr"]), ({"unet": 1.0, "text": 0.5}, ["unet", "text"])],
)
def test_groups_are_drawn_where_they_differ(more: dict[str, float], names: list[str]) -> None:
    series: Series = {LR: [(1, 1.0), (2, 2.0)]}
    series |= {f"{LR}/{name}": [(1, factor), (2, 2 * factor)] for name, factor in more.items()}
    (axes,) = draw(series, title="").axes
    assert [line.get_label() for line in axes.get_lines()] == names


def test_the_command_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = write_state(tmp_path / "trainer_state.json"), tmp_path / "lr.png"
    main([str(tmp_path), "--out", str(out), "--loss", "eval_loss"])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{log} -> {out}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(([run], f"{run} is or contains no trainer_state.json or ") for run in ("nowhere", "empty", "notes.txt")),
        (["cut"], "cannot be read (JSONDecodeError"),
        (["plain"], f"the log holds no {LR}: was the run made with Mechanic"),
        (["good", "--loss", "los"], "the log holds no 'los'. It has: eval_loss"),
        (["good", "--out", "x.txt"], "Format 'txt' is not supported"),
        (["good", "--out", "missing/x.png"], "No such file or directory: 'missing/x.png'"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    write_state(tmp_path / "cut" / "trainer_state.json").write_text('{"log_history": [')
    write_state(tmp_path / "plain" / "trainer_state.json", [{"step": 1, "loss": 2.0}])
    write_state(tmp_path / "good" / "trainer_state.json")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["matplotlib", "tensorboard"])
def test_a_missing_package_is_named(tmp_path: Path, missing: str) -> None:
    write_state(tmp_path / "state" / "trainer_state.json")
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1").touch()
    program = f"import sys; sys.modules[{missing!r}] = None; from mechanic_plugins.plot import main; main(sys.argv[1:])"
    run = tmp_path / ("state" if missing == "matplotlib" else "board")
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    wanted = "'mechanic-plugins[plot]'" if missing == "matplotlib" else "tensorboard"
    assert f"pip install {wanted}" in done.stderr
