"""The ranks' part under DeepSpeed: a Trainer with DeepSpeedStrategy, which Lightning refuses on a CPU."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning_helpers import adamw, lightning_of, module, trainer
from lightning_on_ranks import OPTIONS, Result, environment, heard, rank_loader
from torch import Tensor, nn

from mechanic_plugins.lightning import Mechanic


def deepspeed_on_cpu(pl: ModuleType, config: dict[str, Any]) -> Any:
    import deepspeed

    class OnCPU(pl.strategies.DeepSpeedStrategy):  # type: ignore[name-defined, misc]
        def setup_environment(self) -> None:
            super(pl.strategies.DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            os.environ["LOCAL_RANK"] = str(self.local_rank)  # read by DeepSpeed
            deepspeed.init_distributed("gloo", verbose=False)

        def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
            engine, optimizer, *_ = deepspeed.initialize(
                args=argparse.Namespace(device_rank=self.local_rank),
                config=self.config,
                model=model,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                dist_init_required=False,
            )
            return engine, optimizer

    return OnCPU(config=config)


def config_of(stage: int, *, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"sub_group_size": 40, "stage3_param_persistence_threshold": 0}  # for several sub-groups
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 4,
    }


def scheduled(model: nn.Module) -> Any:
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def whole_weights(model: nn.Module) -> list[Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def fit_engine(
    rank: int,
    namespace: str,
    stage: int,
    *,
    offload: bool = False,
    epochs: int = 3,
    save: Path | None = None,
    ckpt_path: Path | None = None,
    config: dict[str, Any] | None = None,
) -> Result:
    pl = lightning_of(namespace)
    callback, model = Mechanic(**OPTIONS), module(pl, scheduled)
    settings = {**config_of(stage, offload=offload), **(config or {})}
    with warnings.catch_warnings(), heard() as messages:
        warnings.simplefilter("ignore")
        fitted = trainer(
            pl,
            callback,
            strategy=deepspeed_on_cpu(pl, settings),
            plugins=[environment(pl, rank)],
            devices=2,
            max_epochs=epochs,
            use_distributed_sampler=False,
        )
        fitted.fit(model, rank_loader(rank), ckpt_path=ckpt_path)
        if save:
            fitted.save_checkpoint(save)
    (optimizer,) = callback.optimizers
    return {
        "weights": [w.tolist() for w in whole_weights(model)],
        "tuner": [t.tolist() for t in optimizer.tuner],
        "scale": optimizer.scale.item(),
        "said": [message for message in messages if "Mechanic learned" in message],
        "schedules": type(fitted.lr_scheduler_configs[0].scheduler.optimizer).__name__,
        "logged": {name: value.item() for name, value in fitted.callback_metrics.items() if "mechanic" in name},
    }


def refusal(rank: int, namespace: str, config: dict[str, Any]) -> str:
    try:
        fit_engine(rank, namespace, 1, config=config)
    except ValueError as error:
        return str(error)
    return "nothing was refused"
