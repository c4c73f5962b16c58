"""The public functions: `mechanize`, `unwrap` and `demechanize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch.optim import Optimizer
from typing_extensions import Unpack

from mechanic_plugins.classes import Mechanized, class_with, not_built, wrap
from mechanic_plugins.optimizer import MechanicOptimizer, saving
from mechanic_plugins.options import Options, configured
from mechanic_plugins.rule.schedule import peak_lr
from mechanic_plugins.weights.masters import narrow_moments

__all__ = ["Options", "chain", "demechanize", "find", "mechanize", "peak_lr", "plain_lrs", "unwrap"]


@overload
def mechanize(optimizer: Optimizer, **options: Unpack[Options]) -> MechanicOptimizer: ...
@overload
def mechanize(optimizer: type[Optimizer], **options: Unpack[Options]) -> type[Mechanized]: ...
def mechanize(
    optimizer: Optimizer | type[Optimizer], **options: Unpack[Options]
) -> MechanicOptimizer | type[Mechanized]:
    """Wraps an optimizer so that the scale of its learning rate is learned during training.

        opt = mechanize(torch.optim.AdamW(model.parameters()))                # an instance
        opt = mechanize(torch.optim.AdamW, scope="group")(model.parameters())  # a class

    The result is a `MechanicOptimizer` with the base in its class name (`MechanicAdamW`). A mechanized class takes the
    base's own arguments, and these options. The base's lr, weight decay and schedule keep their meaning: the learning
    rate in force is `scale * lr`.

    There are two rules for the scale. The default is this package's own, the relative rule; it is not the paper's and
    has no regret bound. `rule="paper"` is Algorithm 1 of "Mechanic: A Learning Rate Tuner". Use the default to train;
    use the paper's to reproduce or study the paper, or to compare with other implementations of it.

    Args:
        optimizer: Any torch optimizer, or its class.
        rule: None or "relative" is this package's own rule, "paper" the paper's Algorithm 1; "experiments", "optax" and
            "theory" are other published forms of it.
        scope: "all" learns one scale, "group" one per param group.
        max_scale: Upper bound on the scale.
        max_grad_norm: Clip the gradients in the step, as `torch.nn.utils.clip_grad_norm_` would before it, by the norm
            over all ranks, which the step knows anyway.
        kept_dtype: `torch.bfloat16` keeps what the step remembers of each weight in 2 bytes: its start, or by a
            published rule the sum of its updates, rounded at random [the weights' own dtype].
        group: The ranks that share the parameters, if not all ranks.
        sync_replicas: Average the sums over data-parallel replicas too, for replicas on different hardware.
        backend: "fused" (Mechanic and the base in a few launches), "triton" or "foreach" (around any base).
            "auto" takes the first that works here.
        s_init: A published rule's first scale [the rule's own].
        s_decay: A published rule's norm penalty, the paper's lambda [the rule's own].
        tuner_betas: Memory lengths of a published rule's learners; one number is one learner [the rule's own].
        tuner_eps: Added to a published rule's divisor [the rule's own].
        settings: All of the tuner's constants as a `Settings` object. Not with the options that it contains.

    Raises:
        ValueError: A value is out of range, or the optimizer cannot be mechanized.
        TypeError: Not an optimizer, an unknown option, or a value of the wrong type.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return class_with(optimizer, options)
    return wrap(optimizer, **configured(options))


def unwrap(optimizer: Any) -> MechanicOptimizer:
    """Returns the mechanized optimizer inside a framework's wrapper.

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
        raise TypeError(f"no mechanized optimizer in {chain(optimizer)}: mechanize() it before wrapping it.")
    return found


def find(optimizer: Any) -> MechanicOptimizer | None:
    """`unwrap`, but None if there is none."""
    while optimizer is not None and not isinstance(optimizer, MechanicOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    if optimizer is None:
        return None
    # Lightning's and Fabric's wrappers derive their class from that of the optimizer they hold
    held = vars(optimizer).get("_optimizer")
    return held if isinstance(held, MechanicOptimizer) else optimizer


def chain(optimizer: Any) -> str:
    """Describes nested wrappers, as in "AcceleratedOptimizer around AdamW"."""
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return " around ".join(names) or "None"


def demechanize(optimizer: Any) -> Optimizer:
    """Returns the base optimizer with the learned learning rate as its lr, its moments kept.

    By a published rule, which rescales past updates, this rate does not continue the run as it was: compare it with
    others.

    The lrs are `optimizer.learned_lrs`. A group held at lr 0 stays there. With `scope="group"`, a group that learned
    nothing (empty, or always frozen) takes the smallest scale of the others.

    Build a new scheduler on the result: an existing one holds the old learning rates. A framework's wrapper is looked
    into (see `unwrap`) but still holds Mechanic afterwards.

    Raises:
        TypeError: Not mechanized.
        RuntimeError: Nothing was learned yet.
    """
    mechanic = unwrap(optimizer)
    groups, learned = mechanic.param_groups, mechanic.learned_lrs
    if not any(learned):
        raise RuntimeError(
            f"the learned learning rates are {learned}, none of them above 0: the learning rate would be 0. Train a "
            "few steps before demechanize()."
        )
    for group, lr in zip(groups, plain_lrs(learned, mechanic.top_lrs), strict=True):
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0 + lr  # a tensor stays one
            group.pop("initial_lr", None)  # a new scheduler starts at lr
    saving.strip(groups, mechanic.state)
    narrow_moments(mechanic.state)
    return mechanic.base


def plain_lrs(learned: Sequence[float], peaks: Sequence[float]) -> list[float]:
    """Each group's lr in a plain optimizer, from `learned_lrs` and the peaks of the schedules.

    A group that learned nothing, but is not held at 0, takes the smallest scale of the others: if it is trained later,
    it should not start faster than they, relative to its lr.
    """
    smallest = min((lr / peak for lr, peak in zip(learned, peaks, strict=True) if lr > 0 < peak), default=0.0)
    return [lr or smallest * peak for lr, peak in zip(learned, peaks, strict=True)]
