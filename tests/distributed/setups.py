"""A small network, all the ways to spread it over ranks, and one training loop for all of them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from mechanic_plugins import MechanicOptimizer, mechanize

BATCH = 24
STEPS = 20
"""The default rule measures the first ten and the sixteenth."""
COUNTED_STEPS = (0, 1, 10, 15)  # at these steps only, as counting is slow
MEASURED = [True, True, False, True]
"""Whether the default rule measures the counted steps."""
OF_A_MEASUREMENT = 2 * (1 + 2 * 8 + 1) + 1
"""The collectives of a measurement, whatever is measured.

Twice, for the weights and for the update: the vectors' norms, eight power iterations, and their last product. Once, the
norms at the start and of the gradients.
"""


def collectives_of(every_step: int, *, rule: str = "relative") -> list[int]:
    """The collectives of the counted steps, if there are `every_step` in the other steps."""
    extra = OF_A_MEASUREMENT if rule == "relative" and every_step else 0
    return [every_step + extra * is_measured for is_measured in MEASURED]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Has odd sizes by default, so that shards are uneven and the head's 3 rows leave the last of 4 ranks empty."""

    def __init__(self, *, even: bool) -> None:
        super().__init__()
        width, hidden, out = (8, 16, 4) if even else (9, 14, 3)
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList([Block(width, hidden), Block(width, hidden)])
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(*, even: bool, dtype: torch.dtype, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(even=even).to(dtype)


def batch(step: int, *, even: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The global batch of a step, the same in every run."""
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)
    w = torch.randn(6, 4 if even else 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x.to(dtype), torch.sin(x @ w).to(dtype)


@dataclass
class Setup:
    """A model spread over ranks. This rank takes part `dp_rank` of `dp_size` of the batch."""

    model: nn.Module
    dp_rank: int
    dp_size: int
    finish_gradients: Callable[[], None] = lambda: None
    """The user's own reduction for parameters that the framework leaves alone."""


def _rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _average(params: list[nn.Parameter], group: Any = None) -> None:
    for p in params:
        assert p.grad is not None
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


def ddp(net: Net) -> Setup:
    return Setup(nn.parallel.DistributedDataParallel(net), *_rank_and_size())


def fsdp2(net: Net, **kwargs: Any) -> Setup:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return Setup(fully_shard(net, mesh=mesh, **kwargs), *_rank_and_size())


def fsdp2_bf16(net: Net) -> Setup:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(net, mp_policy=policy)


def fsdp2_ignored(net: Net) -> Setup:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ignored = list(net.head.parameters())
    model = fully_shard(net, mesh=mesh, ignored_params=set(ignored))
    return Setup(model, *_rank_and_size(), finish_gradients=lambda: _average(ignored))


def hsdp(net: Net) -> Setup:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return Setup(fully_shard(net, mesh=mesh), *_rank_and_size())


def mixed_meshes(net: Net) -> Setup:
    """Shards one block over all ranks, the other hybrid, and leaves the head plain: three weights in one optimizer."""
    size = dist.get_world_size()
    hybrid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    ignored = list(net.head.parameters())
    fully_shard(net.blocks[0], mesh=flat)
    fully_shard(net.blocks[1], mesh=hybrid)
    model = fully_shard(net, mesh=hybrid, ignored_params=set(ignored))
    return Setup(model, *_rank_and_size(), finish_gradients=lambda: _average(ignored))


_TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tp(net: Net) -> Setup:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in net.blocks:
        parallelize_module(block, mesh, _TP_PLAN)
    return Setup(net, 0, 1)


def sequence_parallel(net: Net) -> Setup:
    """Sequence parallel: norms over sharded activations have Replicate weights and Partial gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def forward(self: Block, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(DTensor.from_local(x, mesh, [Replicate()])))))

    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    for block in net.blocks:
        block.forward = types.MethodType(forward, block)  # type: ignore[method-assign]
        parallelize_module(block, mesh, plan)
    return Setup(net, 0, 1)


def fsdp2_tp(net: Net) -> Setup:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], _TP_PLAN)
        fully_shard(block, mesh=mesh["dp"])
    return Setup(fully_shard(net, mesh=mesh["dp"]), mesh["dp"].get_local_rank(), mesh["dp"].size())


def ddp_tp(net: Net) -> Setup:
    """Tensor parallel on a submesh, with replicas averaged by hand: no placement shows this replication."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], _TP_PLAN)
    group, params = mesh["dp"].get_group(), list(net.parameters())
    return Setup(net, mesh["dp"].get_local_rank(), mesh["dp"].size(), lambda: _average(params, group))


def fsdp1(net: Net, strategy: str, *, original: bool) -> Setup:
    kwargs: dict[str, Any] = {}
    if "HYBRID" in strategy:
        shape = (2, dist.get_world_size() // 2)
        kwargs["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **kwargs,
    )
    return Setup(model, *_rank_and_size())


def _fsdp1(strategy: str, *, original: bool) -> Callable[[Net], Setup]:
    return lambda net: fsdp1(net, strategy, original=original)


SETUPS: dict[str, Callable[[Net], Setup]] = {
    "alone": lambda net: Setup(net, 0, 1),
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_bf16": fsdp2_bf16,
    "fsdp2_ignored": fsdp2_ignored,
    "hsdp": hsdp,
    "mixed_meshes": mixed_meshes,
    "tp": tp,
    "sequence_parallel": sequence_parallel,
    "fsdp2_tp": fsdp2_tp,
    "ddp_tp": ddp_tp,
    **{
        f"fsdp1_{strategy.lower()}_{'original' if original else 'flat'}": _fsdp1(strategy, original=original)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
        for original in (True, False)
    },
}

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-3),
}


class Collectives(TorchDispatchMode):
    """Counts collectives. torch's CommDebugMode records more about every operation, which takes as long as the step."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the operations inside it come next
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """A model and its optimizer during training."""

    setup: Setup
    optimizer: MechanicOptimizer
    even: bool
    dtype: torch.dtype
    counted: bool = True
    hs: list[float] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        name: str,
        *,
        base: str = "adamw",
        even: bool = False,
        dtype: str = "float64",
        seed: int = 0,
        counted: bool = True,
        **options: Any,
    ) -> Run:
        kind = getattr(torch, dtype)
        setup = SETUPS[name](make_net(even=even, dtype=kind, seed=seed))
        optimizer = mechanize(BASES[base](setup.model.parameters()), **options)
        return cls(setup, optimizer, even, kind, counted)

    def train(self, first: int, last: int, *, accumulate: int = 1, clip: float | None = None) -> None:
        for step in range(first, last):
            self.backward(step, accumulate=accumulate)
            if clip is not None:
                self.clip(clip)
            self.step()

    def backward(self, step: int, *, accumulate: int = 1) -> None:
        x, y = (t.chunk(self.setup.dp_size)[self.setup.dp_rank] for t in batch(step, even=self.even, dtype=self.dtype))
        parts = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for index, (inputs, targets) in enumerate(parts):
            with self._no_sync() if index < len(parts) - 1 else contextlib.nullcontext():
                (nn.functional.mse_loss(self.setup.model(inputs), targets) / accumulate).backward()
        self.setup.finish_gradients()

    def clip(self, norm: float) -> None:
        if isinstance(self.setup.model, FullyShardedDataParallel):
            self.setup.model.clip_grad_norm_(norm)
        else:
            nn.utils.clip_grad_norm_(self.setup.model.parameters(), norm)

    def step(self) -> None:
        if self.counted and len(self.hs) in COUNTED_STEPS:
            with Collectives() as collectives:
                self.optimizer.step()
            self.collectives.append(collectives.count)
        else:
            self.optimizer.step()
        self.hs.append(self.optimizer.metrics()["mechanic/h"])
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        model = self.setup.model
        if hasattr(model, "no_sync"):
            with model.no_sync():
                yield
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        else:
            yield

    def weights(self) -> dict[str, list[Any]]:
        """The full weights by name."""
        model = self.setup.model
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                return {_plain(n): p.detach().tolist() for n, p in model.named_parameters()}
        return {_plain(n): full(p.detach()).tolist() for n, p in model.named_parameters()}

    def result(self) -> dict[str, Any]:
        """Plain values, for the parent to compare."""
        s, r, m, v, steps = (t.tolist() for t in self.optimizer.tuner)
        return {
            "weights": self.weights(),
            "tuner": {"s": s, "r": r, "m": m, "v": v, "steps": steps},
            "h": self.hs,
            "collectives": self.collectives,
        }


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
