"""A sharded run that began without Mechanic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest
import torch.distributed.checkpoint as dcp
from golden_ranks import CASE, build, states
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict


def join(rank: int, folder: str, form: str) -> dict[str, Any]:
    """Trains plainly, loads that into a mechanized optimizer, and says what became of its moments and its scale."""
    options = StateDictOptions(**golden.SHARDED[form])
    model, opt = build()
    plain: Any = CASE.base(golden.groups_of(model, CASE), **CASE.base_options)
    for step in range(5):
        plain.zero_grad()
        model(step).backward()
        plain.step()
    dcp.save(states(model, plain, options), checkpoint_id=folder)

    model, opt = build()
    with warnings.catch_warnings(record=True) as caught, opt.loading_plain():
        loaded = states(model, opt, options)
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, opt, loaded["optimizer"], options=options)
    first = next(iter(opt.state.values()))["step"].item()
    golden.train(model, opt, CASE, 5, 15)
    return {
        "warnings": [str(w.message) for w in caught if "Mechanic" in str(w.message)],
        "moments": first,
        "steps": opt.metrics()["mechanic/steps"],
        "scale": opt.scale.item(),
        "keys": sorted(key for key in opt.param_groups[0] if key.startswith("mechanic_")),
    }


@pytest.mark.parametrize("form", golden.SHARDED)
def test_mechanic_joins_a_sharded_run(ranks: Callable[[int], Ranks], tmp_path: Path, form: str) -> None:
    """torch raised a KeyError ('param_groups.first.mechanic_s'), or said that mechanic_delta was missing."""
    first, second = ranks(2)(join, str(tmp_path), form)
    assert first == second
    (warning,) = first["warnings"]
    assert "no Mechanic in it: the base's moments are kept" in warning
    assert first["moments"] == 5
    assert first["steps"] == 10
    assert first["scale"] > 0
    assert "mechanic_s" in first["keys"]
