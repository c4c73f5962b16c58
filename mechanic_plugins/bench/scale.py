"""What a sharded step costs one rank of many: `python -m mechanic_plugins.bench --scale 64 1024 4096`.

torch's fake process group answers at once and sends nothing, so that one process can be a rank of any number. What is
measured is this rank's host time, memory and collectives; what the network needs is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import AdamW, Optimizer

from mechanic_plugins.api import mechanize
from mechanic_plugins.bench.shapes import SIZES, gpt2_shapes
from mechanic_plugins.core.param_state import DELTA

__all__ = ["LAYOUTS", "NODE", "Cost", "cost_on", "scale_table"]

NODE = 8
LAYOUTS = ("FSDP2", "HSDP")
"""HSDP shards over a node of eight and replicates over the nodes."""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes on one rank. `plain` is the base's own, with clip_grad_norm_."""

    ranks: int
    layout: str
    set_up: float
    """`mechanize` and the first step."""
    step: float
    plain_step: float
    collectives: int
    plain_collectives: int
    delta: int
    shard: int


def scale_table(ranks: Sequence[int], *, size: str = "124M", repeats: int = 25) -> str:
    """`cost_on` for each number of ranks, as a Markdown table."""
    lines = [
        f"torch {torch.__version__}, one rank of many on the CPU, GPT-2 {size}, AdamW with clipping, FSDP2",
        "| ranks | layout | set-up, s | ms a step | base | collectives | base | MB of delta | of weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        for c in (cost_on(count, layout, size=size, repeats=repeats) for count in ranks):
            lines.append(
                f"| {c.ranks:,} | {c.layout} | {c.set_up:.2f} | {c.step * 1e3:.1f} | {c.plain_step * 1e3:.1f} "
                f"| {c.collectives} | {c.plain_collectives} | {c.delta / 1e6:.2f} | {c.shard / 1e6:.2f} |"
            )
    return "\n".join(lines)


def cost_on(ranks: int, layout: str, *, size: str = "124M", repeats: int = 25) -> Cost:
    """As the first rank of so many."""
    with _first_of(ranks):
        params = _shards(gpt2_shapes(*SIZES[size]), _mesh(ranks, layout))
        plain = AdamW(params)
        plain_step, plain_collectives = _measured(lambda: _clipped_step(plain, params), repeats)
        start = time.perf_counter()
        optimizer = mechanize(AdamW(params), max_grad_norm=1.0)
        optimizer.step()
        set_up = time.perf_counter() - start
        step, collectives = _measured(optimizer.step, repeats)
        return Cost(
            ranks=ranks,
            layout=layout,
            set_up=set_up,
            step=step,
            plain_step=plain_step,
            collectives=collectives,
            plain_collectives=plain_collectives,
            delta=sum(_bytes(state[DELTA]) for state in optimizer.state.values()),
            shard=sum(map(_bytes, params)),
        )


@contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mesh(ranks: int, layout: str) -> DeviceMesh:
    if layout == "FSDP2":
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (ranks // NODE, NODE), mesh_dim_names=("replicate", "shard"))


def _shards(shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> list[nn.Parameter]:
    """Weights and gradients; no rank ever holds a whole tensor."""
    model = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    params = list(model.parameters())
    for p in params:
        nn.init.normal_(_local(p), std=0.02)
        p.grad = torch.zeros_like(p)
        nn.init.normal_(_local(p.grad), std=1e-3)
    return params


def _clipped_step(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def _measured(step: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Seconds, and how many collectives it makes."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
        step()
    return statistics.median(times), counted.get_total_counts()


def _local(t: Tensor) -> Tensor:
    assert isinstance(t, DTensor)
    return t.to_local()


def _bytes(t: Tensor) -> int:
    shard = _local(t)
    return shard.numel() * shard.element_size()
