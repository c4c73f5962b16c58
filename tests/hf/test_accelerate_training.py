from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from hf_ranks import SHIMS, as_if_launched
from ranks import Ranks

from mechanic_plugins import optim
from mechanic_plugins.accelerate import mechanize

Pair = Callable[[int], Ranks]
STEPS, ACCUMULATE, RANKS = 8, 2, 2
SETUPS = ("plain", "ddp", "fsdp1", "fsdp2")


def dtype_of(setup: str) -> torch.dtype:
    """FSDP1 clips only in float32."""
    return torch.float32 if setup == "fsdp1" else torch.float64


def build(setup: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers).to(dtype_of(setup))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, eps=1e-3)


def batches(rank: int, setup: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's micro-batches, the same in every set-up."""
    generator = torch.Generator().manual_seed(rank)
    shape = (2 * STEPS * ACCUMULATE, 5)
    x, y = (torch.randn(*shape, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    return list(zip(x.to(dtype_of(setup)), y.to(dtype_of(setup)), strict=True))


def prepared(setup: str) -> tuple[Accelerator, torch.nn.Module, Any, Any]:
    plugin = None
    if setup.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(setup[-1]),
            auto_wrap_policy="size_based_wrap",
            min_num_params=10,
            state_dict_type="SHARDED_STATE_DICT" if setup == "fsdp2" else "FULL_STATE_DICT",
            use_orig_params=False,
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, fsdp_plugin=plugin)
    model = build(setup)
    if setup == "fsdp1":  # FSDP1 creates the parameters, so accelerate needs the model first
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(mechanize(adamw(model.parameters())))
    else:
        model, optimizer = accelerator.prepare(model, mechanize(adamw(model.parameters())))
    # Accelerate advances a scheduler once per rank
    length = 2 * STEPS * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.1, total_iters=length)
    return accelerator, model, optimizer, accelerator.prepare(schedule)


def train(setup: str, data: Any, objects: tuple[Any, ...]) -> list[float]:
    accelerator, model, optimizer, schedule = objects
    scales = []
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
                scales.append(optimizer.optimizer.scale.item())
            optimizer.zero_grad()
    return scales


def whole_run(rank: int, setup: str) -> dict[str, Any]:
    with as_if_launched(rank), SHIMS["fsdp" if setup.startswith("fsdp") else "none"]():
        objects = prepared(setup)
        scales = train(setup, batches(rank, setup), objects)
        accelerator, model, *_ = objects
        weights = accelerator.get_state_dict(model) or {}
        return {
            "kind": accelerator.distributed_type.value,
            "scales": scales,
            "weights": [w.tolist() for w in weights.values()],
        }


def resumed_run(rank: int, setup: str, folder: str) -> dict[str, Any]:
    """Trains half of the run, saves it, loads it into new objects and trains the rest."""
    half = STEPS * ACCUMULATE
    shim = SHIMS["fsdp" if setup.startswith("fsdp") else "none"]
    with as_if_launched(rank), shim():
        objects = prepared(setup)
        scales = train(setup, batches(rank, setup)[:half], objects)
        objects[0].save_state(folder)
    with as_if_launched(rank), shim():
        objects = prepared(setup)
        objects[0].load_state(folder)
        scales += train(setup, batches(rank, setup)[half:], objects)
        weights = objects[0].get_state_dict(objects[1]) or {}
        return {"scales": scales, "weights": [w.tolist() for w in weights.values()]}


def plain_loop(world_size: int, setup: str) -> dict[str, Any]:
    model = build(setup)
    optimizer = mechanize(adamw(model.parameters()))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
    data = [batches(rank, setup) for rank in range(world_size)]
    scales = []
    for step in range(2 * STEPS):
        micro = [b for rank in data for b in rank[step * ACCUMULATE : (step + 1) * ACCUMULATE]]
        torch.stack([(model(x) - y).square().mean() for x, y in micro]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        scales.append(optimizer.scale.item())
    return {"scales": scales, "weights": [w.tolist() for w in model.state_dict().values()]}


def test_a_class_in_an_optimizers_place() -> None:
    net, accelerator = build("plain"), Accelerator(cpu=True)
    sentence = r"got the class AdamW .*: build it, as AdamW\(model.parameters\(\)\)"
    with pytest.raises(TypeError, match=sentence):
        accelerator._prepare_deepspeed(net, optim.AdamW)


def test_plain() -> None:
    objects = prepared("plain")
    scales = train("plain", batches(0, "plain"), objects)
    AcceleratorState._reset_state(reset_partial_state=True)
    expected = plain_loop(1, "plain")
    assert scales == pytest.approx(expected["scales"], rel=1e-9)
    assert scales[-1] > 0
    for w, e in zip(objects[1].state_dict().values(), expected["weights"], strict=True):
        torch.testing.assert_close(w, torch.tensor(e, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("setup", SETUPS[1:])
def test_two_ranks_are_a_plain_loop_on_both_ranks_batches_and_go_on_exactly(
    ranks: Pair, tmp_path: Path, setup: str
) -> None:
    whole = ranks(RANKS)(whole_run, setup)
    expected = plain_loop(RANKS, setup)
    assert whole[0]["kind"] == ("MULTI_CPU" if setup == "ddp" else "FSDP")
    assert whole[0]["scales"] == whole[1]["scales"]
    within = 1e-6 if setup == "fsdp1" else 1e-9
    assert whole[0]["scales"] == pytest.approx(expected["scales"], rel=within)
    for w, e in zip(whole[0]["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(w), torch.tensor(e), rtol=1e-6, atol=1e-6)
    resumed = ranks(RANKS)(resumed_run, setup, str(tmp_path))
    assert resumed[0]["scales"] == whole[0]["scales"]
    assert resumed[0]["weights"] == whole[0]["weights"]
