from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mechanic_plugins.run import main, refuse_unknown
from mechanic_plugins.runner.arguments import parse
from mechanic_plugins.runner.plan import Plan, Replacement


def test_options_come_before_the_target_and_the_rest_is_its_own() -> None:
    plan, target, arguments = parse(
        [
            "--local_rank=1",
            "--replace",
            "a.B",
            "--replace=c.D=e.F",
            "--options=scope=group",
            "train.py",
            "--probe",
            "x",
        ],
        usage="",
    )
    assert plan.replace == (Replacement("a.B"), Replacement("c.D", "e.F"))
    assert (plan.options, plan.probe, plan.is_default) == ("scope=group", 0, False)
    assert (target, arguments) == ("train.py", ["--local_rank=1", "--probe", "x"])


def test_a_plan_survives_the_environment() -> None:
    plan = Plan((Replacement("a.B", "c.D"),), options="scope=group", probe=20, events="/tmp/x")
    assert Plan.of(json.loads(plan.to_text())) == plan


def test_a_probe_replaces_torchs_optimizers_unless_told_otherwise() -> None:
    alone, *_ = parse(["--probe", "50", "x.py"], "")
    told, *_ = parse(["--probe", "50", "--replace", "a.B", "x.py"], "")
    assert Replacement("torch.optim.SGD") in alone.replace
    assert told.replace == (Replacement("a.B"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--replace", "argument --replace: expected one argument"),
        ("--replace AdamW x.py", "argument --replace: needs a class's dotted name, as torch.optim.AdamW"),
        ("--replace a.B= x.py", "as prodigyopt.Prodigy=torch.optim.AdamW; got 'a.B='"),
        ("--replace a.B --replace a.B x.py", "--replace a.B is given more than once"),
        ("--replace nowhere.B x.py", "no package 'nowhere' found"),
        ("--replace torch.optim.AdamW=nowhere.B x.py", "no package 'nowhere' found"),
        ("--probe few x.py", "argument --probe: needs at least 16 optimizer steps, got 'few'. Try 200."),
        ("--probe 3 x.py", "at least 16 optimizer steps, got '3'"),
        ("--options scope=group x.py", "--options is for --replace: add --replace"),
        ("--replace torch.optim.AdamW", "no script given."),
        ("", "--probe STEPS      train this many steps"),
        (
            "--replaces torch.optim.AdamW x.py",
            "unrecognized arguments: --replaces",
        ),
    ],
)
def test_what_is_refused_before_anything_runs(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_package_in_the_scripts_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "their_optimizers.py").touch()
    monkeypatch.chdir(tmp_path)
    plan = Plan((Replacement("their_optimizers.B"),))
    refuse_unknown(plan, ["torchrun", "scripts/train.py"])
    with pytest.raises(SystemExit):
        refuse_unknown(plan, ["torchrun", "train.py"])
