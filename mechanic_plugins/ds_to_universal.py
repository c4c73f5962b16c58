"""DeepSpeed's converter to universal checkpoints, carrying what Mechanic keeps for each weight.

    python -m mechanic_plugins.ds_to_universal --input_folder ckpt/global_step100 --output_folder ckpt/universal

DeepSpeed's own converter exports three tensors per parameter by name: the weights and Adam's two moments. This one runs
it twice, the second time with Mechanic's tensor in place of the weights, so that it is split and merged like them.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

try:
    from deepspeed.checkpoint import ds_to_universal
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.ds_to_universal cannot import deepspeed ({error}): pip install 'mechanic-plugins[deepspeed]'"
    ) from error
import torch

from mechanic_plugins.weights.slots import DELTA, REF

__all__ = ["convert"]


def convert(args: argparse.Namespace) -> None:
    """Converts a checkpoint folder. Takes the arguments of DeepSpeed's converter."""
    ds_to_universal.main(args)
    with tempfile.TemporaryDirectory(dir=Path(args.output_folder).parent) as folder:
        posing, converted = Path(folder) / "in", Path(folder) / "out"
        slot = _pose_as_weights(Path(args.input_folder), posing)
        if slot is None:
            return
        again = copy.copy(args)
        again.input_folder, again.output_folder = str(posing), str(converted)
        ds_to_universal.main(again)
        _collect(slot, converted / "zero", Path(args.output_folder) / "zero")


def _pose_as_weights(source: Path, target: Path) -> str | None:
    """Writes a copy of the checkpoint with Mechanic's tensor, whose name is returned, in place of the weights."""
    target.mkdir()
    slot = None
    for path in source.iterdir():
        if not path.name.endswith("_optim_states.pt"):
            (target / path.name).symlink_to(path.resolve())
            continue
        # DeepSpeed has just unpickled this file, which holds classes of its own: weights_only would not protect
        saved = torch.load(path, map_location="cpu", weights_only=False)
        slot = _replace_weights(saved["optimizer_state_dict"])
        if slot is None:
            return None
        torch.save(saved, target / path.name)
    return slot


def _replace_weights(saved: dict[str, Any]) -> str | None:
    stage3 = "fp32_flat_groups" in saved
    state = saved["optimizer_state_dict" if stage3 else "base_optimizer_state"]["state"]
    slot = next((name for name in (REF, DELTA) if all(name in entries for entries in state.values())), None)
    if slot is None:
        return None
    for entries in state.values():
        entries.update(dict.fromkeys(("exp_avg", "exp_avg_sq"), entries[slot]))  # one tensor: saved once
    kept = [state[index][slot] for index in range(len(state))]
    saved["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"] = kept
    return slot


def _collect(slot: str, converted: Path, target: Path) -> None:
    """Moves the tensor beside the moments. Frozen weights have none: their file holds the weight itself."""
    for path in converted.rglob("fp32.pt"):
        folder = target / path.parent.relative_to(converted)
        if (folder / "exp_avg.pt").exists():
            shutil.move(path, folder / f"{slot}.pt")


if __name__ == "__main__":
    convert(ds_to_universal.parse_arguments())
