"""A sharded run that starts without Mechanic and continues with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from setups import BASES, Run
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FORMS: dict[str, dict[str, Any]] = {"sharded": {}, "flattened": {"flatten_optimizer_state_dict": True}}


def states(model: Any, opt: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, opt, options=options),
    }


def join(rank: int, folder: str, form: str) -> dict[str, Any]:
    """Trains without Mechanic, loads that into a mechanized optimizer, and returns its moments and scale."""
    options, run = StateDictOptions(**FORMS[form]), Run.start("fsdp2", counted=False)
    plain = BASES["adamw"](run.setup.model.parameters())
    for step in range(5):
        run.backward(step)
        plain.step()
        plain.zero_grad()
    dcp.save(states(run.setup.model, plain, options), checkpoint_id=folder)

    run = Run.start("fsdp2", counted=False)
    model, opt = run.setup.model, run.optimizer
    with warnings.catch_warnings(record=True) as caught, opt.loading_plain():
        loaded = states(model, opt, options)
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, opt, loaded["optimizer"], options=options)
    first = next(iter(opt.state.values()))["step"].item()
    run.train(5, 15)
    return {
        "warnings": [str(w.message) for w in caught if "Mechanic" in str(w.message)],
        "moments": first,
        "steps": opt.metrics()["mechanic/steps"],
        "scale": opt.scale.item(),
        "keys": sorted(key for key in opt.param_groups[0] if key.startswith("mechanic_")),
    }


@pytest.mark.parametrize("form", FORMS)
def test_mechanic_joins_a_sharded_run(ranks: Callable[[int], Ranks], tmp_path: Path, form: str) -> None:
    """torch used to raise a KeyError ('param_groups.first.mechanic_tuner') or to report a missing mechanic_delta."""
    first, second = ranks(2)(join, str(tmp_path), form)
    assert first == second
    (warning,) = first["warnings"]
    assert "saved without Mechanic: the base's moments are kept" in warning
    assert first["moments"] == 5
    assert first["steps"] == 10
    assert first["scale"] > 0
    assert "mechanic_tuner" in first["keys"]
