"""The ranks' part of the checkpoint tests."""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist
from engines import Case, engine_of, quiet, start, train

SAVED_AT = 8


def run_and_resume(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Continues training after a save; then loads it into new objects with other weights and trains those."""
    start(rank)
    engine, opt = engine_of(case)
    train(engine, opt, case, range(SAVED_AT))
    save(engine, folder)
    straight = train(engine, opt, case, range(SAVED_AT, case.steps))
    engine.destroy()
    resumed = load_and_train(case.but(seed=0), folder, "step")
    return {"straight": straight, "resumed": resumed}


def save(engine: Any, folder: str) -> None:
    with quiet():
        engine.save_checkpoint(folder, tag="step")
    dist.barrier()


def load_and_train(case: Case, folder: str, tag: str) -> dict[str, Any]:
    from engines import model

    engine, opt = engine_of(case, network=model(case.seed + 1))
    with quiet():
        path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    seen = train(engine, opt, case, range(SAVED_AT, case.steps))
    engine.destroy()
    return {**seen, "steps": opt.metrics()["mechanic/steps"]}


def run_and_convert(rank: int, case: Case, folder: str, ours: bool) -> dict[str, Any]:
    """Continues training after a save; rank 0 then converts the checkpoint to a universal one."""
    start(rank)
    engine, opt = engine_of(case)
    train(engine, opt, case, range(SAVED_AT))
    save(engine, folder)
    straight = train(engine, opt, case, range(SAVED_AT, case.steps))
    engine.destroy()
    if rank == 0:
        convert(folder, ours=ours)
    dist.barrier()
    return straight


def convert(folder: str, *, ours: bool) -> None:
    from deepspeed.checkpoint import ds_to_universal

    from mechanic_plugins.ds_to_universal import convert as with_delta

    args = argparse.Namespace(
        input_folder=f"{folder}/step",
        output_folder=f"{folder}/universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with quiet():
        (with_delta if ours else ds_to_universal.main)(args)


def run_from_universal(rank: int, case: Case, folder: str) -> dict[str, Any]:
    start(rank)
    return load_and_train(universal(case), folder, "universal")


def fail_from_universal(rank: int, case: Case, folder: str) -> str:
    start(rank)
    try:
        load_and_train(universal(case), folder, "universal")
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def universal(case: Case) -> Case:
    return case.but(config={**case.config, "checkpoint": {"load_universal": True}})
