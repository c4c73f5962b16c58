"""Converting checkpoints of transformers' Trainer from Mechanic to a plain optimizer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from mechanic_plugins.optimizer.saving import holds_tuner, strip
from mechanic_plugins.optimizer.to_plain import filled, rescale, scales_in

__all__ = ["demechanize_checkpoint", "refuse_unscaled_resume"]

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def demechanize_checkpoint(source: str | Path, target: str | Path) -> None:
    """Writes a copy of a Trainer's checkpoint folder from which a Trainer without Mechanic can resume.

        demechanize_checkpoint("out/checkpoint-500", "plain/checkpoint-500")
        # python train.py --optim adamw_torch --resume_from_checkpoint plain/checkpoint-500

    Weights and moments are kept; the learning rates of optimizer and schedule are multiplied by the learned scale and
    override --learning_rate. The source is unchanged, and the target appears only when it is complete. Only for
    checkpoints whose optimizer is one file, optimizer.pt, so not for those of DeepSpeed or FSDP. Checkpoints of version
    0.1 are assumed to come from a base that is linear in lr, as all built-in ones are.

    Raises:
        ValueError: The folder holds no learned scale, or the target exists.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    _check_folders(source, target)
    optimizer = torch.load(source / _OPTIMIZER, map_location="cpu", weights_only=True)
    scales = _learned(optimizer, source)
    strip(optimizer["param_groups"], optimizer["state"])
    rescale(optimizer, scales)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        copy = Path(folder) / target.name
        shutil.copytree(source, copy)
        torch.save(optimizer, copy / _OPTIMIZER)
        if (copy / _SCHEDULER).exists():
            schedule = torch.load(copy / _SCHEDULER, map_location="cpu", weights_only=True)
            rescale(schedule, scales)
            torch.save(schedule, copy / _SCHEDULER)
        copy.rename(target)


def _check_folders(source: Path, target: Path) -> None:
    if not (source / _OPTIMIZER).is_file():
        raise ValueError(
            f"{source} has no {_OPTIMIZER}: give the folder of one checkpoint, such as out/checkpoint-500. Checkpoints "
            "of DeepSpeed and FSDP cannot be rewritten; load them with Mechanic and call demechanize()."
        )
    if target.exists() or source in target.parents:
        raise ValueError(f"{target} already exists or is inside {source}: name a new folder.")


def _learned(optimizer: dict[str, Any], source: Path) -> list[float]:
    groups = optimizer["param_groups"]
    if not holds_tuner(groups):
        raise ValueError(f"{source} was saved without Mechanic: resume from it directly.")
    scales = scales_in(groups)
    try:
        return filled(scales)
    except ValueError as error:
        raise ValueError(f"{source} holds no learned scale: {error}. Train a few steps more.") from error


def refuse_unscaled_resume(optimizer: Any) -> None:
    """Rejects a plain optimizer that has loaded a mechanized one's checkpoint: its lr lacks the learned scale.

    Raises:
        RuntimeError: The optimizer's param groups hold Mechanic's tuner.
    """
    if holds_tuner(getattr(optimizer, "param_groups", ())):
        raise RuntimeError(
            "this checkpoint was saved with Mechanic, but the optimizer is plain: it would train at a learning rate "
            "without the learned scale. Resume with the same --optim mechanic_... as before, or convert the checkpoint "
            "first: mechanic_plugins.transformers.demechanize_checkpoint('checkpoint-500', 'plain/checkpoint-500')."
        )
