"""The ranks' part: a Trainer under each strategy, on ranks that outlive the Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning_helpers import BATCH, built_in_init, lightning_of, loader, module, trainer
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 (what torch's own documents call it)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from mechanic_plugins import Settings
from mechanic_plugins.lightning import Mechanic

Result = dict[str, Any]

OPTIONS: dict[str, Any] = {"settings": Settings(rule="paper", s_init=0.01)}
"""A start that moves the weights by a tenth in these few steps, so that differences can show."""


def environment(pl: ModuleType, rank: int) -> Any:
    """An environment for existing ranks in a process group, where Lightning need not launch or choose a port."""

    environments = lightning_of(f"{pl.__name__}.plugins.environments")

    class Kept(environments.LightningEnvironment):  # type: ignore[name-defined, misc]
        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

    return Kept()


def shard(self: Any) -> None:
    if not isinstance(self.net[0], FSDPModule):
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def split(self: Any) -> None:
    parallelize_module(self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp_on_cpu(pl: ModuleType, **kwargs: Any) -> Any:
    """FSDPStrategy, which Lightning refuses on a CPU by its exact type."""

    class OnCPU(pl.strategies.FSDPStrategy):  # type: ignore[name-defined, misc]
        def _setup_model(self, model: nn.Module) -> Any:
            original = FSDP.__init__

            def init(me: Any, *args: Any, **kwargs: Any) -> None:
                original(me, *args, **{**kwargs, "device_id": torch.device("cpu")})

            with mock.patch.object(FSDP, "__init__", init):
                return super()._setup_model(model)

    lightning_of(pl.strategies.FSDPStrategy.__module__)._get_full_state_dict_context = _full_state_dicts
    return OnCPU(auto_wrap_policy={nn.Linear}, **kwargs)


def strategy(pl: ModuleType, kind: str) -> Any:
    make = {
        "ddp": lambda: pl.strategies.DDPStrategy(),
        "fsdp2": lambda: pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "fsdp2-full": lambda: pl.strategies.ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
        "tp": lambda: pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        "fsdp-sharded": lambda: fsdp_on_cpu(pl, state_dict_type="sharded"),
        "fsdp-full": lambda: fsdp_on_cpu(pl, state_dict_type="full"),
    }
    return make[kind]()


def configured(kind: str) -> dict[str, Any]:
    if kind.startswith("fsdp2"):
        return {"configure_model": shard}
    return {"configure_model": split} if kind == "tp" else {}


def rank_loader(rank: int) -> DataLoader[Any]:
    """This rank's half of each batch."""
    whole = loader().dataset
    sampler = DistributedSampler(whole, num_replicas=2, rank=rank, shuffle=False)
    return DataLoader(whole, batch_size=BATCH // 2, sampler=sampler)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collects the messages of this rank on Lightning's console."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        yield messages
    finally:
        rank_zero.log.removeHandler(handler)


def fit(
    rank: int,
    namespace: str,
    kind: str,
    *,
    epochs: int = 3,
    save: Path | None = None,
    ckpt_path: Path | None = None,
    mechanic: bool = True,
    **kwargs: Any,
) -> Result:
    """Trains and returns plain values: the full weights, the tuner, logs and warnings."""
    pl = lightning_of(namespace)
    callback, model = Mechanic(**OPTIONS), module(pl, **configured(kind))
    with warnings.catch_warnings(record=True) as caught, heard() as messages:
        warnings.simplefilter("always")
        fitted = trainer(
            pl,
            *([callback] if mechanic else []),
            strategy=strategy(pl, kind),
            plugins=[environment(pl, rank)],
            devices=2,
            use_distributed_sampler=False,  # which would shuffle
            max_epochs=epochs,
            **kwargs,
        )
        fitted.fit(model, loader() if kind == "tp" else rank_loader(rank), ckpt_path=ckpt_path)
        if save:
            fitted.save_checkpoint(save)
    optimizer = fitted.optimizers[0]
    return {
        "weights": [w.float().tolist() for w in whole_weights(fitted)],
        "tuner": [t.tolist() for t in optimizer.tuner] if mechanic else None,
        "scale": optimizer.scale.item() if mechanic else None,
        "moments": int(next(iter(optimizer.state.values()))["step"]),
        "logged": {name: value.item() for name, value in fitted.callback_metrics.items() if "mechanic" in name},
        "said": [message for message in messages if "Mechanic learned" in message],
        "warned": [str(warning.message) for warning in caught],
    }


def refit(rank: int, namespace: str) -> Result:
    """Three fits of one epoch, each with a new Trainer and callback, of a module that keeps its optimizer."""
    pl = lightning_of(namespace)
    model = built_in_init(pl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            callback = Mechanic(**OPTIONS)
            settings = {"strategy": strategy(pl, "ddp"), "plugins": [environment(pl, rank)], "devices": 2}
            fitted = trainer(pl, callback, **settings, use_distributed_sampler=False, max_epochs=1)
            fitted.fit(model, rank_loader(rank))
    return {
        "weights": [w.tolist() for w in model.parameters()],
        "steps": callback.optimizers[0].tuner.steps.item(),
    }


def refusal(rank: int, namespace: str, kind: str, **kwargs: Any) -> str:
    """Returns the error message that the user sees before training starts."""
    try:
        fit(rank, namespace, kind, **kwargs)
    except ValueError as refused:
        return str(refused)
    return "nothing was refused"


def whole_weights(fitted: Any) -> list[Tensor]:
    if isinstance(fitted.strategy.model, FSDP):
        with FSDP.summon_full_params(fitted.strategy.model):
            return [p.detach().clone() for p in fitted.lightning_module.parameters()]
    return [full(p.detach()) for p in fitted.lightning_module.parameters()]


def full(p: Any) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p.clone()  # type: ignore[no-any-return]


def _full_state_dicts(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
    """Lightning's own without offload_to_cpu, on which torch crashes if the parameters are already on the CPU."""
    return FSDP.state_dict_type(
        module=module,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
