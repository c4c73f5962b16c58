"""The functions a user needs."""

from __future__ import annotations

import inspect
from typing import Any, overload

from torch.optim import Optimizer
from typing_extensions import Unpack

from mechanic_plugins.checkpoints import state as checkpoint
from mechanic_plugins.checkpoints.leaving import filled
from mechanic_plugins.classes import Mechanized, class_with, not_built, wrap
from mechanic_plugins.core.groups import release
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.options import Options, configured, parameters

__all__ = ["Options", "chain", "demechanize", "find", "mechanize", "unwrap"]


@overload
def mechanize(optimizer: Optimizer, **options: Unpack[Options]) -> MechanicOptimizer: ...
@overload
def mechanize(optimizer: type[Optimizer], **options: Unpack[Options]) -> type[Mechanized]: ...
def mechanize(
    optimizer: Optimizer | type[Optimizer], **options: Unpack[Options]
) -> MechanicOptimizer | type[Mechanized]:
    """Wraps an optimizer so that the scale of its learning rate is learned while it trains.

        opt = mechanize(torch.optim.AdamW(model.parameters()))           # an instance
        opt = mechanize(torch.optim.AdamW, s_decay=0.0)(model.parameters())  # a class

    What comes out is a `MechanicOptimizer`, or a subclass of it, which has the base in its name (`MechanicAdamW`). A
    class is built with the base's own arguments, and takes these options too.

    The base's lr, weight decay and schedule keep their meaning: the learning rate in force is `scale * lr`. What is
    left None has the value in brackets, or the preset's.

    Args:
        optimizer: Any torch optimizer, or its class.
        betas: One discount factor per bettor; their scales are summed.
        s_init: The first scale ["auto": the first move is the share `first_move` of the weights' norm].
        first_move: See s_init [3e-3; 5e-4 for SGD].
        s_decay: The paper's lambda, a pull on the scale towards small weights [0].
        eps: Added to sqrt(v) [0].
        rule: "optimistic", or a published tuner with the constants it was published with: "paper", "experiments",
            "optax" or "theory" ["optimistic"].
        preset: "paper" sets the paper's rule and constants, "0.1" what version 0.1 of this package did by default.
        normalize_lr: Let the result not depend on the base's lr: the constants above are stated for an lr of 1.
        smoothing: Play a log-average of the scale; 0 plays it as it is [0.97].
        hindsight: 1 (the paper's) re-applies past updates at the new scale, 0 leaves the weights where they are [0.15;
            0.3 for SGD].
        own_warmup: Cancel the schedule's warm-up: while the lr sets new maxima, divide the scale by its growth [True].
        scope: "all" learns one scale, "group" one for each param group.
        max_scale: Never play a scale above this.
        max_grad_norm: Clip the gradients in the step, as `torch.nn.utils.clip_grad_norm_` before it would: by the norm
            of all gradients of all ranks, which the step knows anyway.
        total_steps: The number of optimizer steps in the run, if it is known: in a short one (below 1,000) the scale
            then rises sooner, in a long one (above) later [Lightning's and Hugging Face's plugins know it, and so do
            torch's schedulers that end and are stepped once a step: cosine, linear, one-cycle, functions].
        delta_dtype: `torch.bfloat16` keeps the sum of the base's updates in 2 bytes a parameter, rounded at random so
            that it is right on average [float32; float64 for weights in it].
        group: The ranks that share the parameters, where that is not all ranks.
        sync_replicas: Average the sums over data-parallel replicas too, for replicas on unlike hardware.
        backend: How the passes over memory are made: "fused" (the base's update and Mechanic's in one), "triton" or
            "foreach" (around any base). "auto" takes the first of them that works here.

    Raises:
        ValueError: A value is out of range, or the optimizer cannot be mechanized.
        TypeError: Not an optimizer.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return class_with(optimizer, options)
    return wrap(optimizer, **configured(options))


_optimizer = inspect.Parameter("optimizer", inspect.Parameter.POSITIONAL_OR_KEYWORD)
mechanize.__signature__ = inspect.Signature((_optimizer, *parameters()))  # type: ignore[attr-defined]


def unwrap(optimizer: Any) -> MechanicOptimizer:
    """The mechanized optimizer inside a framework's wrapper, where `scale` and `metrics()` are.

        optimizer = accelerator.prepare(mechanize(torch.optim.AdamW(model.parameters())))
        unwrap(optimizer).metrics()

    Args:
        optimizer: Accelerate's, Lightning's or Fabric's optimizer, one of DeepSpeed's or its engine, or the mechanized
            one itself.

    Raises:
        TypeError: There is none in it.
    """
    if isinstance(optimizer, type):
        raise TypeError(not_built(optimizer))
    found = find(optimizer)
    if found is None:
        raise TypeError(f"there is no mechanized optimizer in {chain(optimizer)}: mechanize() it before it is wrapped.")
    return found


def find(optimizer: Any) -> MechanicOptimizer | None:
    """As `unwrap`, and None where there is none."""
    while optimizer is not None and not isinstance(optimizer, MechanicOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    if optimizer is None:
        return None
    # Lightning's and Fabric's have a class derived from that of the optimizer they hold
    held = vars(optimizer).get("_optimizer")
    return held if isinstance(held, MechanicOptimizer) else optimizer


def chain(optimizer: Any) -> str:
    """Names what wraps what: "AcceleratedOptimizer around AdamW"."""
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return " around ".join(names) or "None"


def demechanize(optimizer: Any) -> Optimizer:
    """The base optimizer, its lr multiplied by the learned scale, its moments kept.

    With `scope="group"`, a group that has learned nothing, because it is empty or was frozen all along, takes the
    smallest of the other groups' scales. A scheduler built before holds the old learning rates: build a new one on what
    this returns. A framework's wrapper around the optimizer is looked into (see `unwrap`), but still holds Mechanic
    afterwards: hand it the new one.

    Raises:
        TypeError: Not mechanized.
        RuntimeError: Nothing was learned yet.
    """
    mechanic = unwrap(optimizer)
    try:
        scales = filled(mechanic.scales.tolist())
    except ValueError as error:
        raise RuntimeError(
            f"{error}: training with a learning rate of 0 would stand still. Train a few steps before demechanize()."
        ) from error
    for group, scale in zip(mechanic.param_groups, scales, strict=True):
        for key in ("lr", "initial_lr"):
            if group.get(key) is not None:
                group[key] = group[key] * scale
    checkpoint.strip(mechanic.param_groups, mechanic.state)
    release(mechanic.param_groups)
    return mechanic.base
