"""Loading universal checkpoints, with which DeepSpeed changes the number of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.optimizer import MechanicOptimizer, saving
from mechanic_plugins.weights.slots import main_slot

__all__ = ["mend_universal_load", "mend_universal_load_of_stage3"]


def mend_universal_load(holder: Any, mechanic: MechanicOptimizer) -> None:
    """Adds a check that Mechanic's tensor was among those that DeepSpeed loads beside a parameter's moments."""
    original = holder.load_hp_checkpoint_state_from_checkpoint_dir

    def load(lp_groups_name: str, checkpoint_dir: str) -> None:
        original(lp_groups_name, checkpoint_dir)
        _check_loaded(mechanic, [p for group in mechanic.param_groups for p in group["params"]], checkpoint_dir)

    holder.load_hp_checkpoint_state_from_checkpoint_dir = load


def mend_universal_load_of_stage3(zero: Any, mechanic: MechanicOptimizer) -> None:
    """Also loads Mechanic's tensor and every group's settings: DeepSpeed loads three tensors and one group's."""
    original = zero.load_hp_checkpoint_state_from_checkpoint_dir_stage3

    def load(checkpoint_dir: str) -> None:
        original(checkpoint_dir)
        folder = Path(checkpoint_dir) / "zero"
        # DeepSpeed has just unpickled this file, which holds classes of its own: weights_only would not protect
        saved = torch.load(folder / "optimizer_state.pt", map_location="cpu", weights_only=False)
        for group, old in zip(mechanic.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True):
            group.update({key: value for key, value in old.items() if key != "params"})
        for shard, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            sources = [(folder / zero.param_names[p], p) for p in params]
            _load_shard(zero, mechanic.state[shard], shard, sources, main_slot(mechanic.settings.rule))
        _check_loaded(mechanic, zero.fp32_partitioned_groups_flat, checkpoint_dir)

    zero.load_hp_checkpoint_state_from_checkpoint_dir_stage3 = load


def _load_shard(
    zero: Any, state: dict[str, Any], shard: Tensor, params: Sequence[tuple[Path, Tensor]], slot: str
) -> None:
    state["step"] = copy.deepcopy(state["step"])  # stage 3 shares one tensor between all shards
    if not all((folder / f"{slot}.pt").exists() for folder, _ in params):
        return
    parts = [zero.load_hp_checkpoint_state(str(folder), slot, param=p) for folder, p in params]
    state[slot] = torch.zeros_like(shard, requires_grad=False)
    start = 0
    for part in parts:
        state[slot][start : start + part.numel()] = part
        start += part.numel()


def _check_loaded(mechanic: MechanicOptimizer, shards: Sequence[Tensor], checkpoint_dir: str) -> None:
    slot = main_slot(mechanic.settings.rule)
    learned, _ = saving.read(mechanic.param_groups, mechanic.settings)
    if not learned.tuners[0].steps:
        warnings.warn(
            f"the universal checkpoint {checkpoint_dir} was saved without Mechanic: the base's moments are kept, and "
            "the scale is learned from scratch, starting at the current weights.",
            stacklevel=3,
        )
    elif any(slot not in mechanic.state[shard] for shard in shards):
        raise ValueError(
            f"the universal checkpoint {checkpoint_dir} has Mechanic's tuner but no {slot}: DeepSpeed's "
            "own converter omits it. Convert with `python -m mechanic_plugins.ds_to_universal`, which takes the same "
            "arguments."
        )
