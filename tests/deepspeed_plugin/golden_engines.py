"""What the ranks do with a golden checkpoint of DeepSpeed: write one, or go on from one."""

from __future__ import annotations

from typing import Any

import golden
import torch.distributed as dist
from engines import quiet, start, weights_of

CASE = golden.CASES["adamw-float32"]


def build(stage: int) -> tuple[Any, Any]:
    import deepspeed

    import mechanic_plugins.deepspeed
    from mechanic_plugins import mechanize

    model = golden.Bowl(CASE.dtype)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
    }
    with quiet():
        opt = mechanize(CASE.base(golden.groups_of(model, CASE), **CASE.base_options), **CASE.settings)
        engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
    return engine, mechanic_plugins.deepspeed.mechanic_of(engine)


def train(engine: Any, opt: Any, first: int, last: int) -> None:
    for step in range(first, last):
        golden.set_lrs(engine.optimizer.param_groups, CASE, step)
        engine.backward(engine(step))
        engine.step()


def record(rank: int, folder: str, stage: int) -> dict[str, Any]:
    start(rank)
    engine, opt = build(stage)
    train(engine, opt, 0, golden.SAVED)
    with quiet():
        engine.save_checkpoint(folder, tag=f"zero{stage}", save_latest=False)
    dist.barrier()
    train(engine, opt, golden.SAVED, golden.LAST)
    return result(engine, opt)


def resume(rank: int, folder: str, stage: int) -> dict[str, Any]:
    start(rank)
    engine, opt = build(stage)
    with quiet():
        path, _ = engine.load_checkpoint(folder, tag=f"zero{stage}")
    assert path is not None
    train(engine, opt, golden.SAVED, golden.LAST)
    return result(engine, opt)


def result(engine: Any, opt: Any) -> dict[str, Any]:
    seen = {"weights": weights_of(engine), "scales": opt.scales.tolist(), "steps": opt.metrics()["mechanic/steps"]}
    engine.destroy()
    return seen
