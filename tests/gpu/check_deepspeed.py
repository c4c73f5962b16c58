"""Compares ZeRO stages 1 to 3 on one CUDA GPU with a plain mechanized optimizer on the same gradients, for both rules.

    python tests/gpu/check_deepspeed.py [--fused]

Prints a line per rule, stage and precision: how far the weights, the scale and h are from the plain run after 40 steps,
and the cost of a step relative to the same engine without Mechanic. float32 shows whether the training is the same: in
bf16 the runs are bit-equal until the first weight is rounded the other way, and about 1e-3 apart after 40 steps.

`--fused` uses DeepSpeed's FusedAdam, which it compiles first (minutes). DeepSpeed 0.19 cannot parse an architecture
with a letter in `TORCH_CUDA_ARCH_LIST`, such as 10.0a: set it to your GPU's, such as 9.0.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

try:
    import deepspeed
except ImportError as error:
    print(f"not checked: {error}")
    sys.exit(0)

import mechanic_plugins.deepspeed  # noqa: F401
from mechanic_plugins import Settings, mechanize

RULES: dict[str, dict[str, Any]] = {"default": {}, "paper": {"settings": Settings(rule="paper", s_init=1e-3)}}
OPTIONS = {"lr": 1.0, "weight_decay": 0.01}
STEPS = 40
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""For the weights, relative to the largest."""


def network(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 3)).cuda()


def batch(step: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(64, width, device="cuda", generator=generator)
    return x.to(dtype), torch.sin(x[:, :3])


def loss_of(model: Any, step: int, width: int, dtype: torch.dtype) -> Tensor:
    x, y = batch(step, width, dtype)
    return nn.functional.mse_loss(model(x).float(), y)


def engine_of(model: nn.Module, optimizer: Any, stage: int, dtype: torch.dtype) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "sub_group_size": 10**7, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def base_of(params: Any, fused: bool) -> Any:
    if fused:
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(params, **OPTIONS)
    return torch.optim.AdamW(params, **OPTIONS)


Run = tuple[list[Tensor], list[float], list[float]]


def plain_run(width: int, depth: int, fused: bool, dtype: torch.dtype, rule: str) -> Run:
    """Trains weights of that dtype by a mechanized AdamW on float32 masters."""
    model = network(width, depth).to(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    opt = mechanize(base_of(masters, fused), **RULES[rule])
    scales, hs = [], []
    for step in range(STEPS):
        loss_of(model, step, width, dtype).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        opt.step()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data.copy_(master)
        scales.append(opt.scale.item())
        hs.append(opt.metrics()["mechanic/h"])
    return [m.detach() for m in masters], scales, hs


def deepspeed_run(stage: int, width: int, depth: int, fused: bool, dtype: torch.dtype, rule: str) -> Run:
    model = network(width, depth)
    opt = mechanize(base_of(model.parameters(), fused), **RULES[rule])
    engine = engine_of(model, opt, stage, dtype)
    scales, hs = [], []
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, width, dtype))
        engine.step()
        scales.append(opt.scale.item())
        hs.append(opt.metrics()["mechanic/h"])
    weights = [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in model.parameters()]
    engine.destroy()
    return weights, scales, hs


def seconds_a_step(stage: int, width: int, depth: int, fused: bool, rule: str | None) -> tuple[float, float]:
    """The time of engine.step() alone after the first ten, which are all measured, and the peak memory in GB."""
    model = network(width, depth)
    base = base_of(model.parameters(), fused)
    engine = engine_of(model, mechanize(base, **RULES[rule]) if rule else base, stage, torch.bfloat16)
    times = []
    torch.cuda.reset_peak_memory_stats()
    for step in range(25):
        engine.backward(loss_of(engine, step, width, torch.bfloat16))
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    engine.destroy()
    return statistics.median(times[10:]), torch.cuda.max_memory_allocated() / 1e9


def distance(a: list[Any], b: list[Any]) -> float:
    """The largest difference, relative to the largest of b."""
    largest = max(torch.as_tensor(y).abs().max().item() for y in b)
    pairs = zip(a, b, strict=True)
    return max((torch.as_tensor(x) - torch.as_tensor(y)).abs().max().item() for x, y in pairs) / largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fused", action="store_true")
    fused = parser.parse_args().fused
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="nccl")
    plain = {(rule, dtype): plain_run(256, 4, fused, dtype, rule) for rule in RULES for dtype in TOLERANCE}
    name = "FusedAdam" if fused else "AdamW"
    for stage in (1, 2, 3):
        for (rule, dtype), expected in plain.items():
            found = deepspeed_run(stage, 256, 4, fused, dtype, rule)
            weights, scales, hs = (distance(a, b) for a, b in zip(found, expected, strict=True))
            print(
                f"{rule} stage {stage} {dtype} {name}: weights {weights:.1e} scale {scales:.1e} h {hs:.1e} from the "
                f"plain run (relative, {STEPS} steps)",
                flush=True,
            )
            assert weights < TOLERANCE[dtype] * (10 if rule == "paper" else 1), "not the same training"
        without, memory = seconds_a_step(stage, 4096, 8, fused, None)
        for rule in RULES:
            with_it, more_memory = seconds_a_step(stage, 4096, 8, fused, rule)
            print(
                f"{rule} stage {stage} bf16 {name}, 134M parameters: step {with_it * 1e3:.1f} ms against "
                f"{without * 1e3:.1f} ms, peak {more_memory:.2f} GB against {memory:.2f} GB",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
