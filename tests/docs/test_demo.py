"""The demo keeps its promises with few steps, too."""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
demo: Any = importlib.import_module("demo")
sys.path.pop(0)

PNG = b"\x89PNG\r\n\x1a\n"


def a_run(*, lr: float, loss: float) -> Any:
    return demo.Run(lr, losses=[loss] * 10, lrs=[lr] * 10, test_loss=loss, test_accuracy=0.5)


def test_it_ends_in_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new folder" / "digits.png"
    demo.main(["--steps", "30", "--lrs", "1e-2", "1e-4", "--out", str(out)])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("fixed")] == ["1.0e-04", "1.0e-02"]
    assert [sum(line.startswith(f"{rule}   ") for line in lines) for rule in demo.RULES] == [1, 1]
    assert [line.split()[-1] for line in lines if line.startswith("best of 2 fixed")] == ["1.0e-02"]
    assert str(out) in printed.out
    assert out.read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.parametrize("base", demo.BASES)
def test_mechanic_learns_and_the_base_lr_does_not_matter(base: str) -> None:
    tiny, huge = (demo.learn("relative", base, base_lr=lr, steps=200, seed=0) for lr in (1e-6, 10.0))
    assert tiny.final_loss < 1.2 < tiny.losses[0]
    assert tiny.test_accuracy > 0.8
    assert huge.losses == pytest.approx(tiny.losses, rel=0.05)
    assert huge.lr == pytest.approx(tiny.lr, rel=0.05)


def test_all_runs_start_alike_and_follow_one_schedule() -> None:
    runs = [each for _, each in demo.compare("adamw", lrs=[1e-4, 1e-2], base_lr=1.0, steps=20, seed=3)]
    default, paper, low, high = runs
    assert default.losses[0] == paper.losses[0] == low.losses[0] == high.losses[0]
    assert [100 * lr for lr in low.lrs] == pytest.approx(high.lrs)
    assert (low.lr, high.lr) == (1e-4, 1e-2)
    assert max(high.lrs) == pytest.approx(1e-2)


def test_a_diverged_run_is_never_the_best() -> None:
    sweep = [a_run(lr=1e-3, loss=0.5), a_run(lr=1e-1, loss=math.nan), a_run(lr=1.0, loss=math.inf)]
    assert demo.best_of(reversed(sweep)) is sweep[0]


def test_table_and_star_show_one_learned_lr_also_beside_diverged_runs(tmp_path: Path) -> None:
    """Table and star used to show 1.6e-2 while the curve peaked at 9.5e-3."""
    mechanic = demo.learn("relative", "adamw", base_lr=1.0, steps=40, seed=0)
    assert f"{mechanic.lr:.1e}" in mechanic.row("Mechanic")
    assert min(lr for lr in mechanic.lrs if lr > 0) < mechanic.lr < 2 * max(mechanic.lrs)
    sweep = [a_run(lr=1e-3, loss=math.nan), a_run(lr=1.0, loss=math.inf)]
    picture = demo.picture({"default rule": mechanic}, sweep=sweep, title="")
    picture.savefig(tmp_path / "picture.svg")
    (star,) = [line for line in picture.axes[0].get_lines() if line.get_marker() == "*"]
    assert star.get_xdata()[0] == mechanic.lr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps", "0"], "at least 20, got 0"),
        (["--lrs", "1e-3", "-1"], "must be above 0, got --lrs [0.001, -1.0]"),
        (["--lrs", "1e-3,1e-2"], "invalid float value: '1e-3,1e-2'"),
        (["--base-lr", "nan"], "--base-lr nan"),
        (["--out", "picture.txt"], "must end in .png, .pdf, .svg, got picture.txt"),
        (["--out", f"{__file__}/picture.png"], "choose another folder"),
        (["--optimizer", "rprop"], "invalid choice: 'rprop'"),
    ],
)
def test_bad_arguments_are_refused_before_any_training(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["matplotlib.figure", "sklearn.datasets"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}: pip install '\.\[demo\]'"):
        runpy.run_path(demo.__file__)
