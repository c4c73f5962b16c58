"""What Mechanic refuses under DeepSpeed, before training starts: what, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["refuse_unsupported"]


def refuse_unsupported(engine: Any, mechanic: MechanicOptimizer) -> None:
    """Raises ValueError for the first thing in the engine's set-up that Mechanic cannot work with."""
    for refused, what, why_and_way_out in _refusals(engine, mechanic):
        if refused:
            raise ValueError(f"Mechanic does not support {what} under DeepSpeed: {why_and_way_out}")


def _refusals(engine: Any, mechanic: MechanicOptimizer) -> Iterator[tuple[bool, str, str]]:
    base, zero, offload = mechanic.base, engine.zero_optimization_stage(), engine.zero_offload_optimizer()
    yield engine.pipeline_parallelism, "a PipelineModule", "each stage would learn a scale of its own. Use ZeRO."
    yield (
        engine.mp_world_size > 1 or engine.autotp_size() > 1,
        "tensor parallelism",
        "which pieces of a weight are replicas is not known here. Use ZeRO alone.",
    )
    yield (
        bool(getattr(engine, "zenflow", False)),
        "ZenFlow",
        "it steps an Adam of its own, outside the optimizer. Remove 'zenflow' from zero_optimization.",
    )
    yield (
        engine.super_offload(),
        "SuperOffload",
        "it steps an Adam of its own, in another process. Set 'super_offload' to false.",
    )
    yield (
        engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16,
        "torch_autocast with float16",
        "its scaler skips a step part by part. Use bfloat16 there, or the 'fp16' section.",
    )
    yield (
        engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients(),
        "low-precision master weights",
        "the scale is learned from small changes that they round away. Leave them float32.",
    )
    yield (
        offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme",
        "an optimizer on NVMe",
        "all of its state is read before a step, and again in it. Offload it to 'cpu'.",
    )
    yield (
        engine.zero_partial_offload() != 1.0,
        f"an offload ratio of {engine.zero_partial_offload()}",
        "a second optimizer steps the rest. Set 'ratio' to 1.0.",
    )
    yield (
        bool(engine.zero_elastic_checkpoint()),
        "elastic checkpoints",
        "they leave the tuner out. Set 'elastic_checkpoint' to false and use universal checkpoints.",
    )
    yield (
        bool(engine.is_deepcompile_enabled()),
        "DeepCompile",
        "it is untested. Set 'deepcompile' to false.",
    )
    yield (
        isinstance(base, torch.optim.Adagrad) and _has_masters(engine),
        "torch.optim.Adagrad",
        "DeepSpeed replaces it by a new one. Use AdamW.",
    )
    yield (
        "muon" in type(base).__name__.lower() and _has_masters(engine),
        type(base).__name__,
        "DeepSpeed turns the gradients into updates before Mechanic sees them. Use AdamW.",
    )
    yield (
        type(base).__module__.startswith("deepspeed.runtime.fp16.onebit"),
        type(base).__name__,
        "it averages the gradients itself, inside its step. Use AdamW.",
    )
    yield (
        engine.has_moe_layers and zero == 3,
        "experts at ZeRO stage 3",
        "it is untested. Use stage 1 or 2.",
    )
    yield (
        mechanic.group is not None,
        "mechanize(group=...)",
        "the ranks that share the weights are DeepSpeed's data-parallel group. Leave it out.",
    )


def _has_masters(engine: Any) -> bool:
    return bool(engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())
