"""What the ranks do with a golden checkpoint of torch.distributed.checkpoint: write one, or go on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mechanic_plugins import MechanicOptimizer, mechanize

CASE = golden.CASES["adamw"]


def build() -> tuple[golden.Bowl, MechanicOptimizer]:
    model = golden.Bowl(CASE.dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, mechanize(CASE.base(golden.groups_of(model, CASE), **CASE.base_options), **CASE.settings)


def states(model: Any, opt: MechanicOptimizer, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, opt, options=options),
    }


def record(rank: int, folder: str) -> dict[str, Any]:
    """Saves in both forms, and returns what the next steps gave."""
    model, opt = build()
    golden.train(model, opt, CASE, 0, golden.SAVED)
    for form, options in golden.SHARDED.items():
        dcp.save(states(model, opt, StateDictOptions(**options)), checkpoint_id=str(Path(folder) / f"fsdp2-{form}"))
    golden.train(model, opt, CASE, golden.SAVED, golden.LAST)
    return result(model, opt)


def resume(rank: int, folder: str, form: str) -> dict[str, Any]:
    model, opt = build()
    options = StateDictOptions(**golden.SHARDED[form])
    loaded = states(model, opt, options)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded["model"], options=options)
    set_optimizer_state_dict(model, opt, loaded["optimizer"], options=options)
    golden.train(model, opt, CASE, golden.SAVED, golden.LAST)
    return result(model, opt)


def result(model: Any, opt: MechanicOptimizer) -> dict[str, Any]:
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    weights = {name: p.detach().flatten().tolist() for name, p in whole.items()}
    return {"weights": weights, "scales": opt.scales.tolist(), "steps": opt.metrics()["mechanic/steps"]}
