"""Trainer checkpoints that switch between Mechanic and a plain optimizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import run
from hf_tiny import command_line

import mechanic_plugins.transformers
from mechanic_plugins.transformers import demechanize_checkpoint

HALF, END = 8, 12


def trained(folder: Path, *, steps: int = HALF, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Returns the checkpoint at the last step and the script's result."""
    result = run(command_line(folder, max_steps=END, save_strategy="steps", save_steps=steps, **options))
    return folder / f"checkpoint-{steps}", result


@pytest.fixture(scope="module")
def mechanized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("mechanized"), learning_rate=1e-3)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("learning_rate", [1e-3, 5.0])
def test_a_run_goes_on_without_mechanic_at_the_learned_learning_rate(
    mechanized: tuple[Path, dict[str, Any]], tmp_path: Path, learning_rate: float
) -> None:
    """This holds for any --learning_rate, since a resumed Trainer takes the rate from the checkpoint."""
    source, result = mechanized
    before = contents(source)
    target = tmp_path / "plain" / "checkpoint-8"
    demechanize_checkpoint(source, target)
    assert contents(source) == before
    untouched = {name: data for name, data in before.items() if name not in ("optimizer.pt", "scheduler.pt")}
    assert {name: data for name, data in contents(target).items() if name in untouched} == untouched
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-8"], "no trace of the copying"

    argv = command_line(
        tmp_path, optim="adamw_torch", max_steps=END, learning_rate=learning_rate, resume_from_checkpoint=target
    )
    resumed = run(argv)
    assert resumed["optimizers"] == ["AcceleratedOptimizer", "AdamW"]
    at_half = {entry["step"]: entry for entry in result["logs"]}[HALF]
    scale, logs = at_half["mechanic/scale"], [entry for entry in resumed["logs"] if entry["step"] > HALF]
    unscaled = {entry["step"]: entry["learning_rate"] for entry in result["logs"]}
    assert [entry["step"] for entry in logs] == list(range(HALF + 1, END + 1))
    for entry in logs:
        assert entry["learning_rate"] == pytest.approx(unscaled[entry["step"]] * scale, rel=1e-9)


def test_a_mechanized_checkpoint_in_a_plain_run_is_refused(
    mechanized: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """It used to run without learning, since the restored schedule is the unscaled one."""
    argv = command_line(tmp_path, optim="adamw_torch", max_steps=END, resume_from_checkpoint=mechanized[0])
    with pytest.raises(RuntimeError, match=r"saved with Mechanic.*demechanize_checkpoint"):
        run(argv)


def test_a_plain_checkpoint_in_a_mechanized_run_starts_mechanic_and_says_so(tmp_path: Path) -> None:
    source, _ = trained(tmp_path / "plain", optim="adamw_torch")
    argv = command_line(tmp_path / "mechanized", max_steps=END, resume_from_checkpoint=source)
    with pytest.warns(UserWarning, match="saved without Mechanic: the base's moments are kept"):
        result = run(argv)
    assert result["logs"][-1]["mechanic/scale"] > 0


def test_other_settings_are_named(mechanized: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    argv = command_line(tmp_path, optim_args="max_scale=0.125", max_steps=END, resume_from_checkpoint=mechanized[0])
    with pytest.warns(UserWarning, match="max_scale was .* and is 0.125"):
        run(argv)


def test_what_cannot_be_rewritten_is_refused(mechanized: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    source = mechanized[0]
    with pytest.raises(ValueError, match=r"has no optimizer.pt: give the folder of one checkpoint"):
        demechanize_checkpoint(source.parent, tmp_path / "new")
    with pytest.raises(ValueError, match="already exists"):
        demechanize_checkpoint(source, tmp_path)
    with pytest.raises(ValueError, match="inside"):
        demechanize_checkpoint(source, source / "plain")
    plain = tmp_path / "plain"
    demechanize_checkpoint(source, plain)
    with pytest.raises(ValueError, match="saved without Mechanic: resume from it directly"):
        demechanize_checkpoint(plain, tmp_path / "new")
    shutil.copytree(source, early := tmp_path / "early")
    saved = torch.load(early / "optimizer.pt", weights_only=True)
    for group in saved["param_groups"]:
        entry = json.loads(group["mechanic_tuner"])
        group["mechanic_tuner"] = json.dumps({**entry, "tuner": {**entry["tuner"], "scale": 0.0}})
    torch.save(saved, early / "optimizer.pt")
    with pytest.raises(ValueError, match=r"holds no learned scale.*Train a few steps more"):
        demechanize_checkpoint(early, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failing_copy_leaves_nothing_behind(
    mechanized: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(mechanic_plugins.hf.checkpoint.torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        demechanize_checkpoint(mechanized[0], tmp_path / "plain")
    assert not list(tmp_path.iterdir())
