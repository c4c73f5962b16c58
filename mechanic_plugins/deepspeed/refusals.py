"""DeepSpeed set-ups that Mechanic does not support, rejected before training starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["refuse_unsupported"]


def refuse_unsupported(engine: Any, mechanic: MechanicOptimizer) -> None:
    """Checks the engine's set-up.

    Raises:
        ValueError: For the first feature in use that Mechanic does not support.
    """
    for is_used, what, why in (*_of_the_engine(engine), *_of_the_optimizer(engine, mechanic)):
        if is_used:
            raise ValueError(f"Mechanic does not support {what} under DeepSpeed: {why}.")


def _of_the_engine(engine: Any) -> Iterator[tuple[Any, str, str]]:
    """Whether a feature is used, its name, and the reason with what to do instead."""
    offload, ratio = engine.zero_offload_optimizer(), engine.zero_partial_offload()
    is_on_nvme = offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"
    is_half = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    low_master = engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients()
    split = engine.mp_world_size > 1 or engine.autotp_size() > 1
    yield engine.pipeline_parallelism, "a PipelineModule", "each stage would learn its own scale. Use ZeRO"
    yield split, "tensor parallelism", "it does not record which parameters are replicated. Use ZeRO alone"
    yield getattr(engine, "zenflow", False), "ZenFlow", "it steps an Adam of its own. Remove 'zenflow' from the config"
    yield engine.super_offload(), "SuperOffload", "it steps an Adam of its own. Set 'super_offload' to false"
    yield (
        is_half,
        "torch_autocast with float16",
        "its scaler may skip part of a step. Use bfloat16 there, or the 'fp16' section",
    )
    yield low_master, "low-precision master weights", "they round small updates away. Keep them in float32"
    yield is_on_nvme, "an optimizer on NVMe", "its state would be read twice per step. Offload it to 'cpu'"
    yield ratio != 1.0, f"an offload ratio of {ratio}", "a second optimizer steps the rest. Set 'ratio' to 1.0"
    yield (
        engine.zero_elastic_checkpoint(),
        "elastic checkpoints",
        "they omit the tuner. Set 'elastic_checkpoint' to false and use universal checkpoints",
    )
    yield engine.is_deepcompile_enabled(), "DeepCompile", "it is untested. Set 'deepcompile' to false"
    is_moe3 = engine.has_moe_layers and engine.zero_optimization_stage() == 3
    yield is_moe3, "experts at ZeRO stage 3", "they are untested. Use stage 1 or 2"


def _of_the_optimizer(engine: Any, mechanic: MechanicOptimizer) -> Iterator[tuple[Any, str, str]]:
    base, name = mechanic.base, type(mechanic.base).__name__
    has_master = engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()
    is_adagrad, is_muon = isinstance(base, torch.optim.Adagrad), "muon" in name.lower()
    yield is_adagrad and has_master, "torch.optim.Adagrad", "DeepSpeed replaces it with a new instance. Use AdamW"
    is_1bit = type(base).__module__.startswith("deepspeed.runtime.fp16.onebit")
    yield is_muon and has_master, name, "DeepSpeed turns gradients into updates before Mechanic sees them. Use AdamW"
    yield is_1bit, name, "it averages the gradients itself, inside its step. Use AdamW"
    yield (
        mechanic.max_grad_norm is not None,
        "mechanize(max_grad_norm=...)",
        "the engine clips before Mechanic sees the gradients. Set 'gradient_clipping' in the DeepSpeed config",
    )
    yield (
        mechanic.kept_dtype == torch.bfloat16,
        "mechanize(kept_dtype=torch.bfloat16)",
        "its checkpoints hold all of the state in one dtype. Leave it out",
    )
    yield (
        mechanic.group is not None,
        "mechanize(group=...)",
        "the weights are sharded over DeepSpeed's data-parallel group. Leave it out",
    )
