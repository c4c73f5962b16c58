"""DeepSpeed set-ups that Mechanic does not support, rejected before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["refuse_unsupported"]


def refuse_unsupported(engine: Any, mechanic: MechanicOptimizer) -> None:
    """Checks the engine's set-up.

    Raises:
        ValueError: For the first feature in use that Mechanic does not support.
    """
    for refusal in _REFUSALS:
        if refusal.applies(engine, mechanic):
            what = refusal.what.format(base=type(mechanic.base).__name__, ratio=engine.zero_partial_offload())
            raise ValueError(f"Mechanic does not support {what} under DeepSpeed: {refusal.why}. {refusal.instead}.")


class _Refusal(NamedTuple):
    applies: Callable[[Any, MechanicOptimizer], object]
    what: str
    why: str
    instead: str


def _has_master_weights(engine: Any) -> bool:
    return bool(engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())


def _is_on_nvme(engine: Any) -> bool:
    offload = engine.zero_offload_optimizer()
    return offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"


_REFUSALS = (
    _Refusal(
        lambda engine, _: engine.pipeline_parallelism,
        "a PipelineModule",
        "each stage would learn its own scale",
        "Use ZeRO",
    ),
    _Refusal(
        lambda engine, _: engine.mp_world_size > 1 or engine.autotp_size() > 1,
        "tensor parallelism",
        "DeepSpeed does not record which parameters are replicated across tensor-parallel ranks",
        "Use ZeRO alone",
    ),
    _Refusal(
        lambda engine, _: getattr(engine, "zenflow", False),
        "ZenFlow",
        "it steps its own Adam outside the optimizer",
        "Remove 'zenflow' from zero_optimization",
    ),
    _Refusal(
        lambda engine, _: engine.super_offload(),
        "SuperOffload",
        "it steps its own Adam in another process",
        "Set 'super_offload' to false",
    ),
    _Refusal(
        lambda engine, _: engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16,
        "torch_autocast with float16",
        "its scaler may skip some parts of a step and not others",
        "Use bfloat16 there, or the 'fp16' section",
    ),
    _Refusal(
        lambda engine, _: engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients(),
        "low-precision master weights",
        "they round away the small changes that the scale is learned from",
        "Keep them in float32",
    ),
    _Refusal(
        lambda engine, _: _is_on_nvme(engine),
        "an optimizer on NVMe",
        "its state would be read twice per step",
        "Offload it to 'cpu'",
    ),
    _Refusal(
        lambda engine, _: engine.zero_partial_offload() != 1.0,
        "an offload ratio of {ratio}",
        "a second optimizer steps the rest",
        "Set 'ratio' to 1.0",
    ),
    _Refusal(
        lambda engine, _: engine.zero_elastic_checkpoint(),
        "elastic checkpoints",
        "they omit the tuner",
        "Set 'elastic_checkpoint' to false and use universal checkpoints",
    ),
    _Refusal(
        lambda engine, _: engine.is_deepcompile_enabled(),
        "DeepCompile",
        "it is untested",
        "Set 'deepcompile' to false",
    ),
    _Refusal(
        lambda engine, mechanic: isinstance(mechanic.base, torch.optim.Adagrad) and _has_master_weights(engine),
        "torch.optim.Adagrad",
        "DeepSpeed replaces it with a new instance",
        "Use AdamW",
    ),
    _Refusal(
        lambda engine, mechanic: "muon" in type(mechanic.base).__name__.lower() and _has_master_weights(engine),
        "{base}",
        "DeepSpeed turns the gradients into updates before Mechanic sees them",
        "Use AdamW",
    ),
    _Refusal(
        lambda _, mechanic: type(mechanic.base).__module__.startswith("deepspeed.runtime.fp16.onebit"),
        "{base}",
        "it averages the gradients itself, inside its step",
        "Use AdamW",
    ),
    _Refusal(
        lambda engine, _: engine.has_moe_layers and engine.zero_optimization_stage() == 3,
        "experts at ZeRO stage 3",
        "they are untested",
        "Use stage 1 or 2",
    ),
    _Refusal(
        lambda _, mechanic: mechanic.max_grad_norm is not None,
        "mechanize(max_grad_norm=...)",
        "the engine clips before Mechanic sees the gradients",
        "Set 'gradient_clipping' in the DeepSpeed config",
    ),
    _Refusal(
        lambda _, mechanic: mechanic.delta_dtype == torch.bfloat16,
        "mechanize(delta_dtype=torch.bfloat16)",
        "its checkpoints hold all of the state in one dtype",
        "Leave it out",
    ),
    _Refusal(
        lambda _, mechanic: mechanic.group is not None,
        "mechanize(group=...)",
        "the weights are sharded over DeepSpeed's data-parallel group",
        "Leave it out",
    ),
)
