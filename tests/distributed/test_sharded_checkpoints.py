"""A run saved, loaded into new objects and continued is bit-equal to an uninterrupted one.

Resharded between world sizes or kinds of sharding, it equals a run in one process.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing import assert_close
from ranks import Ranks
from setups import Run
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

SAVED, LAST = 12, 17
"""The default rule measures the first ten steps and the sixteenth: a resumed run must know where it is."""

DCP_OPTIONS = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True},
}


def torch_save(old: Run, new: Run, folder: str) -> None:
    """Saves a file per rank."""
    new.setup.model.load_state_dict(through_a_file(old.setup.model.state_dict()))
    new.optimizer.load_state_dict(through_a_file(old.optimizer.state_dict()))


def through_a_file(state: Any) -> Any:
    """Saves and loads, because a state dict shares its tensors with live objects and torch's load keeps them shared."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_dcp(old: Run, new: Run, folder: str, way: str) -> None:
    options = StateDictOptions(**DCP_OPTIONS[way])
    if way in ("sharded", "flattened"):
        dcp_save(old, folder, options)
        dcp_load(new, folder, options)
        return
    model = through_a_file(get_model_state_dict(old.setup.model, options=options))
    optimizer = through_a_file(get_optimizer_state_dict(old.setup.model, old.optimizer, options=options))
    if way == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model, optimizer = (state if dist.get_rank() == 0 else {} for state in (model, optimizer))
    set_model_state_dict(new.setup.model, model, options=options)
    set_optimizer_state_dict(new.setup.model, new.optimizer, optimizer, options=options)


def dcp_save(run: Run, folder: str, options: StateDictOptions | None = None) -> None:
    model, optimizer = run.setup.model, run.optimizer
    states = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(states, checkpoint_id=folder)


def dcp_load(run: Run, folder: str, options: StateDictOptions | None = None) -> None:
    model, optimizer = run.setup.model, run.optimizer
    states = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"], options=options)
    set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)


_FSDP1_KINDS: dict[str, tuple[Any, Any, Any]] = {
    # on a CPU, offload_to_cpu=True makes all states of a parameter share memory, which damages plain AdamW too
    "fsdp1_full": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    ),
    "fsdp1_sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}


def fsdp1_own(old: Run, new: Run, folder: str, way: str) -> None:
    """Uses FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load."""
    kind, model_config, optim_config = _FSDP1_KINDS[way]
    copied = through_a_file if way == "fsdp1_full" else lambda state: state  # ShardedTensors do not load weights_only
    with FullyShardedDataParallel.state_dict_type(old.setup.model, kind, model_config, optim_config):
        model = copied(old.setup.model.state_dict())
        optimizer = copied(FullyShardedDataParallel.optim_state_dict(old.setup.model, old.optimizer))
    with FullyShardedDataParallel.state_dict_type(new.setup.model, kind, model_config, optim_config):
        new.setup.model.load_state_dict(model)
        own = FullyShardedDataParallel.optim_state_dict_to_load(new.setup.model, new.optimizer, optimizer)
    new.optimizer.load_state_dict(own)


def resume(rank: int, name: str, ways: list[str], even: bool, base: str, folder: str) -> dict[str, bool]:
    """For each way of saving, whether the resumed run is bit-equal to the one that was not interrupted.

    The same run is saved in all ways: if a save disturbed it, it would differ from the copies made before.
    """
    old = Run.start(name, even=even, base=base, dtype="float32", counted=False)
    old.train(0, SAVED)
    copies = {way: copied(old, way, folder, name=name, even=even, base=base) for way in ways}
    for run in (old, *copies.values()):
        run.train(SAVED, LAST)
    return {way: new.result() == old.result() for way, new in copies.items()}


def copied(old: Run, way: str, folder: str, **kind: Any) -> Run:
    """A new run with another seed that has loaded the old one's save."""
    new = Run.start(**kind, dtype="float32", seed=99, counted=False)
    if way == "torch.save":
        torch_save(old, new, folder)
    elif way.startswith("fsdp1"):
        fsdp1_own(old, new, folder, way)
    else:
        through_dcp(old, new, f"{folder}/{way}", way)
    new.hs = list(old.hs)
    return new


DCP = ["sharded", "flattened", "full", "broadcast"]
CASES = [
    ("ddp", 2, False, ["torch.save", *DCP]),
    ("fsdp2", 2, False, ["torch.save", *DCP]),
    ("fsdp2", 4, False, ["torch.save", "sharded", "flattened"]),
    ("hsdp", 4, False, ["torch.save", "sharded", "flattened", "full"]),
    ("tp", 2, True, ["torch.save", "sharded", "full"]),
    ("fsdp2_tp", 4, True, ["torch.save", "sharded", "full"]),
    ("fsdp1_full_shard_original", 2, False, ["torch.save", "sharded", "flattened", "fsdp1_full", "fsdp1_sharded"]),
    ("fsdp1_full_shard_flat", 2, False, ["torch.save", "sharded", "flattened", "fsdp1_full", "fsdp1_sharded"]),
    ("fsdp1_hybrid_shard_original", 4, False, ["torch.save", "sharded", "fsdp1_full"]),
]


@pytest.mark.parametrize(
    ("name", "world", "even", "ways"), CASES, ids=lambda v: str(v) if not isinstance(v, list) else ""
)
def test_resume_is_exact(
    ranks: Callable[[int], Ranks], tmp_path: Path, name: str, world: int, even: bool, ways: list[str]
) -> None:
    base = "sgd" if name in ("tp", "hsdp") else "adamw"
    for same in ranks(world)(resume, name, ways, even, base, str(tmp_path)):
        assert same == dict.fromkeys(ways, True)


def leg(rank: int, name: str, first: int, last: int, load: str | None, save: str) -> dict[str, Any]:
    run = Run.start(name, even=True, seed=0 if load is None else 99, counted=False)
    if load is not None:
        dcp_load(run, load)
    run.train(first, last)
    dcp_save(run, save)
    return run.result()


JOURNEYS = {
    "4 to 2 to 4 ranks": [("fsdp2", 4), ("fsdp2", 2), ("fsdp2", 4)],
    "kinds of sharding": [("fsdp2", 4), ("hsdp", 4), ("tp", 2), ("ddp", 2)],
    "FSDP1 to FSDP2": [("fsdp1_full_shard_original", 2), ("fsdp2", 2)],
}


@pytest.mark.parametrize("journey", JOURNEYS.values(), ids=JOURNEYS)
def test_resharding(ranks: Callable[[int], Ranks], tmp_path: Path, journey: list[tuple[str, int]]) -> None:
    steps, load = 6, None
    for index, (name, world) in enumerate(journey):
        save = str(tmp_path / f"{index}")
        results = ranks(world)(leg, name, index * steps, (index + 1) * steps, load, save)
        load = save
    alone = Run.start("alone", even=True)
    alone.train(0, steps * len(journey))
    expected = alone.result()
    assert_close(results[0], {**expected, "h": expected["h"][-steps:]}, tolerance=1e-12)


def dry_run(rank: int, folder: str) -> bool:
    """Whether DCP's step at lr 0 with zero gradients, for an early state dict, leaves the run unchanged."""
    plain = Run.start("fsdp2", counted=False)
    asked = Run.start("fsdp2", counted=False)
    get_optimizer_state_dict(asked.setup.model, asked.optimizer)
    assert asked.optimizer.metrics()["mechanic/steps"] == 0
    for run in (plain, asked):
        run.train(0, 5)
    return plain.result() == asked.result()


def test_the_dry_run_of_dcp_leaves_no_trace(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Adam would count it as a step, and Mechanic would pull back weights that are loaded after it."""
    assert ranks(2)(dry_run, str(tmp_path)) == [True, True]


def released(rank: int, way: str, folder: str) -> tuple[dict[str, Any], bool]:
    old, new = (Run.start("fsdp2", dtype="float32", seed=seed, counted=False) for seed in (0, 99))
    old.train(0, SAVED)
    old.optimizer.freeze(release=True)
    old.train(SAVED, SAVED + 1)
    if way == "torch.save":
        torch_save(old, new, folder)
    else:
        new.optimizer.freeze(release=True)  # DCP loads only keys that the new one has, so it must have no reference
        through_dcp(old, new, folder, way)
    new.hs = list(old.hs)
    for run in (old, new):
        run.train(SAVED + 1, LAST)
    return old.result(), new.result() == old.result()


@pytest.mark.parametrize("way", ["torch.save", "sharded", "full"])
def test_a_released_run_resumes(ranks: Callable[[int], Ranks], tmp_path: Path, way: str) -> None:
    results = ranks(2)(released, way, str(tmp_path))
    assert [same for _, same in results] == [True, True]
    alone = Run.start("alone", dtype="float32")
    alone.train(0, SAVED)
    alone.optimizer.freeze(release=True)
    alone.train(SAVED, LAST)
    assert_close(results[0][0], alone.result(), tolerance=1e-5)
