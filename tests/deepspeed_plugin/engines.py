"""The ranks' part: trains a small model under DeepSpeed and returns plain values."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mechanic_plugins.rule.sums import Sums

MICRO_BATCH = 4
SPIKE = 8
"""The step at which `Case.spike` applies."""


@dataclass(frozen=True)
class Case:
    """One way to train. The data do not depend on the number of ranks, so that a single process can do the same."""

    stage: int = 0
    base: str = "AdamW"
    base_options: dict[str, Any] = field(default_factory=lambda: {"lr": 1.0, "weight_decay": 0.01})
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    steps: int = 20  # the default rule measures the first ten and the sixteenth
    clip: float = 0.0
    accumulation: int = 1
    param_groups: int = 1
    warmup: int = 0
    global_micro_batch: int = 8
    seed: int = 0
    spike: float = 1.0
    """The factor on the targets of step `SPIKE`."""

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def id(self) -> str:
        words = [f"zero{self.stage}", self.base]
        words += [f"clip{self.clip}"] * (self.clip > 0) + [f"accumulate{self.accumulation}"] * (self.accumulation > 1)
        words += [f"groups{self.param_groups}"] * (self.param_groups > 1) + [f"warmup{self.warmup}"] * (self.warmup > 0)
        words += ["spike"] * (self.spike != 1)
        words += [*(k for k in self.config if k != "zero_force_ds_cpu_optimizer"), *self.zero, *self.options]
        return "-".join(words)


class Model(nn.Module):
    """A model whose sizes no number of ranks divides; one parameter has fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.second(torch.tanh(self.first(x)))


def model(seed: int) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


def param_groups(network: nn.Module, case: Case) -> Any:
    if case.param_groups == 1:
        return list(network.parameters())
    weights = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    lr = case.base_options["lr"]
    return [{"params": weights}, {"params": others, "lr": lr / 4, "weight_decay": 0.0}]


def warm_up(groups: Any, case: Case, step: int) -> None:
    """Sets the learning rates of this step, as a schedule would."""
    if case.warmup:
        for index, group in enumerate(groups):
            peak = case.base_options["lr"] / (4 if index else 1)
            group["lr"] = peak * min(1.0, (step + 1) / case.warmup)


def batches(case: Case, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of a step, for all ranks together."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    target = torch.randn(5, 3, generator=torch.Generator().manual_seed(99))
    for _ in range(case.accumulation):
        x = torch.randn(case.global_micro_batch, 5, generator=generator)
        yield x, torch.sin(x @ target) * (case.spike if step == SPIKE else 1.0)


def loss_of(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    dtype = next(network.parameters()).dtype
    return nn.functional.mse_loss(network(x.to(dtype)).float(), y)


def base_class(name: str) -> Any:
    if name == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    if name == "Lion":
        from mechanic_plugins.lion import Lion

        return Lion
    return getattr(torch.optim, name)


def plain_run(case: Case) -> dict[str, Any]:
    """The same training in one process, without DeepSpeed."""
    from mechanic_plugins import mechanize

    network = model(case.seed)
    name = {"DeepSpeedCPUAdam": "AdamW"}.get(case.base, case.base)
    opt = mechanize(base_class(name)(param_groups(network, case), **case.base_options), **case.options)
    seen: dict[str, Any] = {"s": [], "h": [], "scale": []}
    for step in range(case.steps):
        warm_up(opt.param_groups, case, step)
        opt.zero_grad()
        for x, y in batches(case, step):
            (loss_of(network, x, y) / case.accumulation).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        opt.step()
        note(opt, seen)
    return {**seen, "weights": {n: p.detach().flatten().tolist() for n, p in network.named_parameters()}}


def note(opt: Any, seen: dict[str, Any]) -> None:
    seen["s"].append(opt.tuner.s.tolist())
    seen["h"].append(opt.metrics()["mechanic/h"])
    seen["scale"].append(opt.scale.item())


# -------------------------------------------------------------------- under DeepSpeed


def config_of(case: Case, world_size: int) -> dict[str, Any]:
    zero = {"stage": case.stage, **case.zero}
    if case.stage == 3:  # several sub-groups, and no parameter small enough to stay whole
        zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 20, **zero}
    return {
        "train_micro_batch_size_per_gpu": case.global_micro_batch // world_size,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,  # DeepSpeed's default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **case.config,
    }


@functools.cache
def ask_for_the_cpu_once() -> None:
    """Caches the CPU information, which DeepSpeed queries in a new process for each optimizer."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def start(rank: int) -> None:
    """Starts DeepSpeed on top of this rank's process group."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    ask_for_the_cpu_once()
    import deepspeed
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # otherwise it stays on for every later engine
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # from torch, about names that DeepSpeed uses
    # torch supports float16 on any CPU; DeepSpeed requires hardware support
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    with quiet():
        deepspeed.init_distributed(dist_backend="gloo")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def engine_of(case: Case, network: nn.Module | None = None, optimizer: Any = None) -> tuple[Any, Any]:
    """Returns a DeepSpeed engine and its mechanized optimizer."""
    import deepspeed

    import mechanic_plugins.deepspeed
    from mechanic_plugins import mechanize

    network = model(case.seed) if network is None else network
    if optimizer is None and "optimizer" not in case.config:
        base = base_class(case.base)(param_groups(network, case), **case.base_options)
        optimizer = mechanize(base, **case.options)
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=network,
            optimizer=optimizer,
            model_parameters=None if optimizer is not None else list(network.parameters()),
            config=config_of(case, dist.get_world_size()),
        )
    return engine, mechanic_plugins.deepspeed.mechanic_of(engine)


def my_part(case: Case, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    size = case.global_micro_batch // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return x[mine], y[mine]


def backward(engine: Any, case: Case, step: int) -> Iterator[None]:
    """Yields before each engine.step()."""
    for x, y in batches(case, step):
        engine.backward(loss_of(engine, *my_part(case, x, y)))
        yield
        engine.step()


def train(engine: Any, opt: Any, case: Case, steps: range) -> dict[str, Any]:
    seen: dict[str, Any] = {"s": [], "h": [], "scale": [], "reductions": []}
    for step in steps:
        warm_up(engine.optimizer.param_groups, case, step)
        with counted_reductions() as reductions:
            for _ in backward(engine, case, step):
                pass
        seen["reductions"].append(len(reductions))
        note(opt, seen)
    return {**seen, "weights": weights_of(engine)}


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Records Mechanic's all-reduces, which are sums and a count in float64."""
    original, calls = dist.all_reduce, []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64 and tensor.numel() > 1 and tensor.numel() % len(Sums._fields) == 1:
            calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


def weights_of(engine: Any) -> dict[str, list[float]]:
    """The full float32 weights, whatever the stage."""
    return {name: full_weight(p).flatten().tolist() for name, p in engine.module.named_parameters()}


def full_weight(p: Any) -> Tensor:
    """The model's own tensor if it is whole: DeepSpeed's function mixes up parameters under round_robin_gradients."""
    from deepspeed.utils import safe_get_full_fp32_param

    whole = p.dtype == torch.float32 and not hasattr(p, "ds_id")
    full = None if whole else safe_get_full_fp32_param(p)
    return (p if full is None else full).detach().float()


def run(rank: int, case: Case) -> dict[str, Any]:
    start(rank)
    engine, opt = engine_of(case)
    seen = train(engine, opt, case, range(case.steps))
    engine.destroy()
    return {**seen, "steps": opt.metrics()["mechanic/steps"], "holder": type(engine.optimizer).__name__}


def run_without_reduction(rank: int, case: Case) -> dict[str, Any]:
    """Lets every rank tune on its own piece, as the other implementations do."""
    from mechanic_plugins.distributed.reduction import Reduction

    original = Reduction.__call__
    Reduction.__call__ = lambda self, sums: sums  # type: ignore[method-assign]
    try:
        return run(rank, case)
    finally:
        Reduction.__call__ = original  # type: ignore[method-assign]


# -------------------------------------------------------------------- recomputing h and moves


def audit(engine: Any, opt: Any, case: Case, steps: range) -> dict[str, list[Any]]:
    """Trains, and recomputes each step's h from the full tensors that DeepSpeed returns.

    For low precision and experts, where no single process can do the same training.
    """
    books: dict[str, list[Any]] = {"h": [], "expected_h": [], "error": [], "s": [], "reductions": []}
    for step in steps:
        for micro, _ in enumerate(backward(engine, case, step), start=1):
            if micro == case.accumulation:
                before = full_tensors(engine, opt)
                scale = opt.scale.item()
                counter = contextlib.ExitStack()
                reductions = counter.enter_context(counted_reductions())
        counter.close()
        after = full_tensors(engine, opt, gradients=False)
        books["reductions"].append(len(reductions))
        books["s"].append(opt.tuner.s.tolist())
        books["h"].append(opt.metrics()["mechanic/h"])
        books["expected_h"].append(expected_h(engine, case, before, scale, opt.settings.s_decay))
        published = opt.settings.rule != "relative"
        error = move_error(before, after, scale, opt.scale.item()) if published else ref_error(before, after, scale)
        books["error"].append(error)
    return books


def full_tensors(engine: Any, opt: Any, *, gradients: bool = True) -> dict[str, dict[str, Tensor]]:
    """For every parameter on this rank, the full x, its reference or delta, the d of the sums, and g."""
    from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

    tensors = {}
    moved = opt.metrics()["mechanic/steps"] > 0
    published = opt.settings.rule != "relative"
    slot = "mechanic_delta" if published else "mechanic_ref"
    if moved and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links them after the first group's first step, when the other groups have no state yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        x = full_weight(p).clone()
        if not moved:
            ref = torch.zeros_like(x)
        elif engine.optimizer is opt:
            ref = opt.state[p][slot]
        else:
            ref = safe_get_full_optimizer_state(p, slot)
        ref = ref.float().clone()
        tensors[name] = {"x": x, "ref": ref, "d": ref if published or opt.scale == 0 else x.float() - ref}
        if gradients:
            grad = p.grad if engine.optimizer is opt else safe_get_full_grad(p)
            tensors[name]["g"] = grad.float().view_as(x).clone()
    return tensors


def expected_h(
    engine: Any, case: Case, tensors: dict[str, dict[str, Tensor]], scale: float, s_decay: float | None
) -> float:
    """Computes h by its definition in float64, with unscaled and clipped gradients."""
    own = {"dg": ("d", "g"), "gg": ("g", "g"), "xx": ("x", "x"), "dx": ("d", "x")}
    sums = torch.zeros(4, dtype=torch.float64)
    experts = torch.zeros(4, dtype=torch.float64)
    for name, p in engine.module.named_parameters():
        t = tensors[name]
        parts = torch.stack([(t[a].double() * t[b].double()).sum() for a, b in own.values()])
        (experts if not getattr(p, "allreduce", True) else sums).add_(parts)
    if engine.has_moe_layers:
        dist.all_reduce(experts)
        sums += experts * engine.expert_parallel_group_size / dist.get_world_size()
    loss_scale = getattr(engine.optimizer, "loss_scale", 1.0)
    norm = sums[1].sqrt() / loss_scale
    factor = 1 / loss_scale / (max(1.0, (norm + 1e-6) / case.clip) if case.clip else 1.0)
    dg, gg, xx, dx = (sums * torch.tensor([factor, factor**2, 1, 1])).tolist()
    if s_decay is None:  # the default rule, whose d is scaled
        return dg / (scale or 1.0)
    return dg + s_decay * scale * gg**0.5 * dx / xx**0.5


def move_error(before: Any, after: Any, scale: float, new_scale: float) -> float:
    """The error in x' - x = S' delta' - S delta, which holds by a published rule whatever the base did."""
    errors = []
    for name, old in before.items():
        new = after[name]
        expected = new_scale * new["ref"].double() - scale * old["ref"].double()
        errors.append((new["x"].double() - old["x"].double() - expected).abs().max().item())
    return max(errors)


def ref_error(before: Any, after: Any, scale: float) -> float:
    """The change of the references, which stay constant by the default rule once the weights move."""
    return (
        0.0 if scale == 0 else max((after[name]["ref"] - old["ref"]).abs().max().item() for name, old in before.items())
    )


def run_audit(rank: int, case: Case) -> dict[str, Any]:
    start(rank)
    engine, opt = engine_of(case)
    books = audit(engine, opt, case, range(case.steps))
    books["weights"] = weights_of(engine)  # type: ignore[assignment]
    engine.destroy()
    return {**books, "steps": opt.metrics()["mechanic/steps"], "holder": type(engine.optimizer).__name__}
