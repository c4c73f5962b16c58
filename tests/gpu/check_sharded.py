"""Sharded equals unsharded on a real GPU, under both rules. Exits with 1 on a failure.

Run by hand: `python tests/gpu/check_sharded.py`.

Four ranks share one GPU and talk over gloo, since NCCL refuses two ranks on one device. The optimizers get DTensors on
the GPU, as from FSDP2, HSDP and FSDP2 x TP, with the gradients of a recorded unsharded run, so that the only
communication is the one all-reduce of a step, and those of a measurement. Two ranks save a distributed checkpoint, and
one and four resume it. What gloo cannot do on a GPU is reported but is no failure. Without a GPU the ranks run on the
CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lion import Lion

RANKS, STEPS = 4, 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((96, 33), (33,), (64, 96), (7, 64), (128, 128))
Build = Callable[[Any], torch.optim.Optimizer]
BASES: dict[str, Build] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "lion": lambda params: Lion(params, lr=1e-3),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}
PAPER = {"settings": Settings(rule="paper", s_init=0.01)}
_CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    **{base: (base, {}, torch.float32) for base in BASES},
    "adamw, clipped": ("adamw", {"max_grad_norm": 0.5}, torch.float32),
    "adamw foreach, clipped": ("adamw foreach", {"max_grad_norm": 0.5}, torch.float32),
    "adamw, bf16 kept": ("adamw", {"kept_dtype": torch.bfloat16}, torch.float32),
    "adamw, bf16 weights": ("adamw", {}, torch.bfloat16),
    "adamw, backend triton": ("adamw", {"backend": "triton"}, torch.float32),
    "adamw, backend foreach": ("adamw", {"backend": "foreach"}, torch.float32),
}
CASES = _CASES | {f"{name}, paper": (b, options | PAPER, dtype) for name, (b, options, dtype) in _CASES.items()}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "FSDP2": ((4,), (Shard(0),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP2 x TP": ((2, 2), (Shard(0), Shard(1))),
}


def start(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def gradient(x: Tensor, step: int) -> Tensor:
    """The gradient of a noisy quadratic."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step)).to(x)
    return 0.3 * (x - 1) + noise


def unsharded(case: str) -> tuple[list[Tensor], list[list[Tensor]], float]:
    """Returns final weights, all gradients and the last scale."""
    base, options, dtype = CASES[case]
    params = [nn.Parameter(x) for x in start(dtype)]
    optimizer, recorded = mechanize(BASES[base](params), **options), []
    for step in range(STEPS):
        recorded.append([gradient(p.detach(), step) for p in params])
        for p, grad in zip(params, recorded[-1], strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in params], recorded, float(optimizer.scale)


class Sharded:
    """The same parameters as DTensors, with their optimizer."""

    def __init__(self, case: str, layout: str) -> None:
        base, options, dtype = CASES[case]
        shape, self.placements = LAYOUTS[layout]
        self.mesh = init_device_mesh(DEVICE, shape if len(shape) > 1 else (dist.get_world_size(),))
        self.params = [nn.Parameter(self.cut(x)) for x in start(dtype)]
        self.optimizer = mechanize(BASES[base](self.params), **options)

    def cut(self, x: Tensor) -> DTensor:
        """This rank's part, taken without communication."""
        placements = [Replicate() if x.dim() == 1 and p == Shard(1) else p for p in self.placements]
        return distribute_tensor(x.to(DEVICE), self.mesh, placements, src_data_rank=None)

    def train(self, recorded: Sequence[list[Tensor]]) -> None:
        for grads in recorded:
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = self.cut(grad)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(nn.ParameterList(self.params), self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def load(self, folder: str) -> None:
        """Loads into tensors sharded for this number of ranks."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            nn.ParameterList(self.params),
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def distance(self, weights: Sequence[Tensor]) -> float:
        """The largest difference from the unsharded weights, in this rank's part."""
        pairs = zip(self.params, map(self.cut, weights), strict=True)
        here = [(p.detach().to_local() - x.to_local()).abs() for p, x in pairs]
        return max([float(each.max()) for each in here if each.numel()], default=0.0)


def agreed(number: float) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(_of_all(number))) == 1


def _of_all(number: float) -> list[Any]:
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return numbers


def join(rank: int, ranks: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29577", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")


def leave(failures: int = 0) -> None:
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(min(failures, 1))


def check(rank: int, known: dict[str, Any]) -> None:
    join(rank, RANKS)
    failures = 0
    for case in CASES:
        for layout in LAYOUTS:
            failures += check_one(rank, case, layout, known[case])
        failures += check_resume(rank, case, known[case])
    attempts = (
        ("DDP", try_ddp, {}),
        ("DDP, paper", try_ddp, PAPER),
        ("FSDP2", try_fsdp2, {}),
        ("FSDP2, paper", try_fsdp2, PAPER),
    )
    for name, attempt, options in attempts:
        name += " with its own communication"
        try:
            report(rank, name, attempt(**options))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            report(rank, name, f"cannot run over gloo here: {str(error).splitlines()[0][:120]}")
    leave(failures)


def save(rank: int, ranks: int, known: dict[str, Any], folder: str) -> None:
    """Trains half of each run and saves it."""
    join(rank, ranks)
    for case, (_, recorded, _) in known.items():
        run = Sharded(case, "FSDP2")
        run.train(recorded[: STEPS // 2])
        dcp.save(run.state(), checkpoint_id=f"{folder}/{case}")
    leave()


def resume(rank: int, ranks: int, known: dict[str, Any], folder: str) -> None:
    """Trains the other half on another number of ranks, and compares with the unsharded run."""
    join(rank, ranks)
    failures = 0
    for case, (_, recorded, _) in known.items():
        run = Sharded(case, "FSDP2")
        run.load(f"{folder}/{case}")
        run.train(recorded[STEPS // 2 :])
        failures += compare(rank, f"{case}, saved on 2 ranks, resumed on {ranks}", case, run, known[case])
    leave(failures)


def report(rank: int, name: str, found: str) -> None:
    if rank == 0:
        print(f"{name}: {found}", flush=True)


def check_one(rank: int, case: str, layout: str, known: Any) -> int:
    run = Sharded(case, layout)
    run.train(known[1])
    return compare(rank, f"{case}, {layout}", case, run, known)


def compare(rank: int, name: str, case: str, run: Sharded, known: Any) -> int:
    """Compares with the unsharded run. Returns 1 if they differ."""
    weights, _, scale = known
    _, options, dtype = CASES[case]
    limit, off = (2e-2, 1e-4) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    if "settings" in options:
        limit, off = max(limit, 1e-4), 1e-3
        if "kept_dtype" in options:  # rounded at random
            limit, off = 5e-2, 0.1
    mine, apart = float(run.optimizer.scale), run.distance(weights)
    same = agreed(mine)
    if run.mesh.ndim == 2 and run.placements[0] == Replicate():
        here = _of_all(float(torch.cat([p.to_local().double().flatten() for p in run.params]).square().sum()))  # type: ignore[attr-defined]
        same &= here[:2] == here[2:]
    is_ok = same and abs(mine / scale - 1) < off and apart < limit
    found = f"scale {mine:.6g}, unsharded {scale:.6g}, weights apart {apart:.1g}, ranks {'alike' if same else 'differ'}"
    report(rank, name, f"{'ok' if is_ok else 'FAILED'} {found}")
    return int(not is_ok)


def check_resume(rank: int, case: str, known: Any) -> int:
    """Half of the run, its state loaded into a new optimizer, and the other half equal the whole run bit for bit."""
    recorded = known[1]
    whole, first, second = (Sharded(case, "FSDP2") for _ in range(3))
    whole.train(recorded)
    first.train(recorded[: STEPS // 2])
    with torch.no_grad():
        for p, q in zip(second.params, first.params, strict=True):
            p.to_local().copy_(q.to_local())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.train(recorded[STEPS // 2 :])
    is_ok = all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(whole.params, second.params, strict=True))
    report(rank, f"{case}, resumed", "ok bit for bit" if is_ok else "FAILED")
    return int(not is_ok)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)


def trained(model: nn.Module, rows: slice, **options: Any) -> float:
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer = mechanize(base, max_grad_norm=1.0, **options)
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs[rows]).square().mean().backward()
        optimizer.step()
    return float(optimizer.scale)


def try_ddp(**options: Any) -> str:
    scale = trained(DistributedDataParallel(network()), slice(dist.get_rank(), None, RANKS), **options)
    return f"{'ok' if agreed(scale) else 'FAILED'} scale {scale:.6g}, ranks compared bit for bit"


def try_fsdp2(**options: Any) -> str:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (RANKS,)))
    scale = trained(model, slice(dist.get_rank(), None, RANKS), **options)
    return f"{'ok' if agreed(scale) else 'FAILED'} scale {scale:.6g}, ranks compared bit for bit"


def main() -> None:
    """Starts with the unsharded runs in this process, which is in no process group."""
    known = {case: unsharded(case) for case in CASES}
    on_cpu = {
        case: ([x.cpu() for x in weights], [[g.cpu() for g in each] for each in recorded], scale)
        for case, (weights, recorded, scale) in known.items()
    }
    torch.multiprocessing.spawn(check, (on_cpu,), nprocs=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        for leg, ranks in ((save, 2), (resume, 1), (resume, 4)):
            torch.multiprocessing.spawn(leg, (ranks, on_cpu, folder), nprocs=ranks)
    print("all ok")


if __name__ == "__main__":
    main()
