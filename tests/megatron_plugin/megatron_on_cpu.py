"""Megatron-Core's own code on CPU ranks. It names CUDA throughout, which here means the CPU."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mechanic_plugins.megatron import layout_of_member, mechanic_of, mechanize

LR = 0.01
CLIP = 1.0
DECAY = 0.1


class OnCpu(TorchFunctionMode):
    """Within this mode, CUDA devices and tensor types are the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        return out.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(out, str) else out

    def __enter__(self) -> Any:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *_: None
        return super().__enter__()


class Expert(nn.Linear):
    """Parameters that exist on one rank each, which Megatron marks by `allreduce=False`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(8, 8)
        for p in self.parameters():
            p.allreduce = False  # type: ignore[attr-defined]


class Net(MegatronModule):
    """A model with weights that tensor parallelism splits or copies to all its ranks, and an expert per rank."""

    def __init__(self, config: TransformerConfig, expert: int | None) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        kind = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
        self.up = tensor_parallel.ColumnParallelLinear(8, 12, gather_output=False, **kind)
        self.down = tensor_parallel.RowParallelLinear(12, 8, input_is_parallel=True, skip_bias_add=False, **kind)
        self.norm = nn.LayerNorm(8)
        if expert is not None:
            self.expert = Expert(expert)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(x)
        y, _ = self.down(torch.tanh(hidden))
        y = self.norm(y)
        return self.expert(y) if hasattr(self, "expert") else y


class Plain(nn.Module):
    """The same model in plain torch, for whole batches."""

    def __init__(self, start: dict[str, Tensor], experts: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.load_state_dict(start)
        self.experts = nn.ModuleList(Expert(seed) for seed in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.down(torch.tanh(self.up(x))))
        if not len(self.experts):
            return y
        return torch.cat([expert(part) for expert, part in zip(self.experts, y.chunk(2), strict=True)])


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


class Run:
    """Training on two ranks: tensor parallel, or data parallel with or without an expert each."""

    def __init__(self, rank: int, *, split: bool, sharded: bool, experts: bool, rule: Any = None) -> None:
        self.rank, self.split = rank, split
        tensor = 2 if split else 1
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=2 if experts else 1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor,
            gradient_accumulation_fusion=False,
        )
        net = Net(config, rank if experts else None)
        self.start = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), net
        )
        options = {"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "use_distributed_optimizer": sharded}
        built = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), [self.model])
        self.optimizer = mechanize(built, rule=rule)
        self.scales: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            x = batch(step) if self.split else batch(step).chunk(2)[self.rank]
            (self.model(x) - x.flip(-1)).square().mean().backward()
            self.model.finish_grad_sync()
            done, _, _ = self.optimizer.step()
            assert done
            self.scales.append(float(mechanic_of(self.optimizer).scale))

    def result(self) -> dict[str, Any]:
        weights = {name: p.tolist() for name, p in self.model.module.named_parameters()}
        members = self.optimizer.chained_optimizers
        return {"scales": self.scales, "weights": weights, "ends": [float(m.optimizer.scale) for m in members]}


def on_cpu(rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with OnCpu():
        return function(rank, *args, **kwargs)


def trained(rank: int, steps: int, **setup: Any) -> dict[str, Any]:
    run = Run(rank, **setup)
    run.train(range(steps))
    return {**run.result(), "start": {name: p.tolist() for name, p in run.start.items()}}


def laid_out(rank: int, **setup: Any) -> dict[str, Any]:
    """What each of Megatron's optimizers steps on this rank, after two steps."""
    run = Run(rank, **setup)
    run.train(range(2))
    members = []
    for member in run.optimizer.chained_optimizers:
        tensors, layout = layout_of_member(member)
        ranks = dist.get_process_group_ranks(member.get_grad_stats_parallel_group())
        flat = [tensor.detach().flatten().tolist() for tensor in tensors]
        members.append({**layout._asdict(), "tensors": flat, "ranks": ranks})
    return {"members": members, "weights": run.result()["weights"]}


@torch.no_grad()
def load(run: Run, loaded: dict[str, Any]) -> None:
    """Loads without autograd, as float32 shards are views of the model's weights.

    Without Transformer Engine, all parameters share one step tensor, which torch's AdamW would increment for each.
    """
    run.model.module.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    for state in run.optimizer.chained_optimizers[0].optimizer.state.values():
        state["step"] = state["step"].clone()


def resumed(rank: int, folder: str, **setup: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a run of 40 steps, and one resumed from a checkpoint of the first 20."""
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts a process

    def states(run: Run, *, is_loading: bool) -> dict[str, Any]:
        model = run.model.module.sharded_state_dict()
        return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    whole = Run(rank, **setup)
    whole.train(range(20))
    dist_checkpointing.save(states(whole, is_loading=False), folder)
    groups = copy.deepcopy(whole.optimizer.state_dict())
    whole.train(range(20, 40))
    second = Run(rank, **setup)
    if setup["sharded"]:  # without Transformer Engine, Megatron needs a step count before it can load
        second.optimizer.load_state_dict(groups)
    load(second, dist_checkpointing.load(states(second, is_loading=True), folder))
    second.train(range(20, 40))
    return whole.result(), second.result()


def refused(rank: int) -> list[str]:
    """The messages for a gathered checkpoint, a step of the inner optimizer, an option, and offloading."""
    run = Run(rank, split=False, sharded=True, experts=False)
    run.train(range(2))
    inner, config = mechanic_of(run.optimizer), replace(run.optimizer.config, optimizer_cpu_offload=True)
    tries: list[Callable[[], Any]] = [
        lambda: run.optimizer.save_parameter_state("nowhere"),
        inner.step,
        lambda: mechanize(run.optimizer, scope="group"),
        lambda: (setattr(run.optimizer, "config", config), mechanize(run.optimizer)),
    ]
    return [_message(attempt) for attempt in tries]


def _message(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""
