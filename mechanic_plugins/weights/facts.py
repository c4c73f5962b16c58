"""Properties of the optimizers that Mechanic wraps, each verified by a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "can_fuse_on_cpu",
    "check_supported",
    "ignores_a_schedule",
    "is_linear_in_lr",
    "is_torchs_own",
    "l2_penalty",
    "own_iterate",
    "skips_on_found_inf",
]

_LINEAR_IN_LR = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "Muon")
"""torch's optimizers whose update is proportional to lr. Not Rprop (lr is its first step size), Adafactor (lr is capped
by the step count) and ASGD (lr also sets its decay)."""

_OTHERS_LINEAR_IN_LR = (
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    "bitsandbytes.optim.adamw.AdamW",
    "bitsandbytes.optim.adamw.AdamW8bit",
)
"""Listed by name to avoid importing their packages."""

_ADDS_WEIGHT_DECAY = ("SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "ASGD")
"""torch's optimizers that add weight_decay * weights to the gradient, unless `decoupled_weight_decay` is set."""

_OWN_ITERATES = ("schedulefree", "prodigy", "dadapt", "lookahead", "ranger", "madgrad")
_OWN_ITERATES_EXACTLY = ("ftrl", "dog", "ldog", "dowg", "trac", "srmm", "accsgd")
"""Parts of class names, and whole names, in lower case, of optimizers that do not add an update to the weights: they
compute the weights from their own iterates, averages or starting points, or learn a scale from those."""

_REFUSED = {
    "LBFGS": "its line search evaluates points that Mechanic does not control. Use torch.optim.Adam, or LBFGS alone.",
    "SparseAdam": "Mechanic moves every weight in every step. Use sparse=False in the embedding and torch.optim.Adam.",
    "ZeroRedundancyOptimizer": "each rank steps different parameters and would learn its own scale. Shard with "
    "fully_shard (FSDP2) instead.",
}
"""Class names, and why each is refused."""

_SKIPS_ON_FOUND_INF = ("SGD", "Adam", "AdamW", "Adagrad")
_FUSED_ON_CPU = ("SGD", "Adam", "AdamW")


def is_linear_in_lr(kind: type[Optimizer]) -> bool:
    """Whether a base's update is proportional to lr: it may be stepped at lr / c and its update multiplied by c."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    declared = bool(getattr(kind, "linear_in_lr", False))
    return declared or _is_torchs(kind, _LINEAR_IN_LR) or name in _OTHERS_LINEAR_IN_LR


def ignores_a_schedule(base: Optimizer) -> bool:
    """Whether the base ignores later changes of lr: Rprop's lr is its first step size."""
    return isinstance(base, torch.optim.Rprop)


def l2_penalty(base: Optimizer, group: dict[str, Any]) -> float:
    """The factor k if the base minimises k / 2 * |x|^2 in addition to the loss, as weight decay in SGD and Adam does.

    0 for decoupled weight decay, which is not the gradient of anything, and for unknown optimizers.
    """
    decay = group.get("weight_decay")
    if not decay or group.get("decoupled_weight_decay"):
        return 0.0
    is_added = _is_torchs(type(base), _ADDS_WEIGHT_DECAY) or getattr(base, "adam_w_mode", True) is False
    return float(decay) if is_added else 0.0


def is_torchs_own(base: Optimizer) -> bool:
    """Whether the base is one of torch's own, which treat each parameter independently."""
    return _is_torchs(type(base), (*_LINEAR_IN_LR, "Rprop", "Adafactor", "ASGD"))


def can_fuse_on_cpu(base: Optimizer) -> bool:
    """Whether torch's fused CPU kernel is correct for these parameters, and the user has not chosen an implementation.

    It is the fastest, but torch uses it only on request. It reads flat memory, so all tensors must be contiguous. With
    16-bit weights, SGD's kernel skips most of them (https://github.com/pytorch/pytorch/issues/191763).
    """
    if not _is_torchs(type(base), _FUSED_ON_CPU):
        return False
    if any(g["foreach"] is not None or g["fused"] is not None or g.get("capturable") for g in base.param_groups):
        return False
    stepped = [p for group in base.param_groups for p in group["params"] if p.grad is not None]
    return all(_is_one_row(p, base.state.get(p, {})) for p in stepped) and not _has_some_buffers(base)


def _is_one_row(p: Tensor, state: dict[str, Any]) -> bool:
    """Whether weights, gradient and moments are contiguous and of one dtype that the fused CPU kernels support."""
    if p.device.type != "cpu" or p.dtype not in (torch.float32, torch.float64):
        return False
    moments = (t for t in state.values() if isinstance(t, Tensor) and t.shape == p.shape)
    return all(t is not None and t.dtype == p.dtype and t.is_contiguous() for t in (p, p.grad, *moments))


def _has_some_buffers(base: Optimizer) -> bool:
    """Whether only some parameters have momentum buffers, after a late first gradient: fused SGD needs all or none."""
    for group in base.param_groups:
        if group.get("momentum"):
            states = [base.state.get(p, {}) for p in group["params"] if p.grad is not None]
            if len({state.get("momentum_buffer") is None for state in states}) > 1:
                return True
    return False


def skips_on_found_inf(base: Optimizer, params: Iterable[Tensor]) -> bool:
    """Whether the base skips its update on the device when `found_inf` is 1."""
    if not _is_torchs(type(base), _SKIPS_ON_FOUND_INF) or not all(g.get("fused") for g in base.param_groups):
        return False
    if isinstance(base, torch.optim.SGD) and any(g["momentum"] for g in base.param_groups):
        # a skipped first step would leave SGD's momentum buffer allocated and never written
        return all("momentum_buffer" in base.state.get(p, ()) for p in params if p.grad is not None)
    return True


def check_supported(base: Any) -> None:
    """Checks that the base can be mechanized.

    Raises:
        TypeError: Not an optimizer.
        ValueError: An optimizer that Mechanic cannot scale.
    """
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"mechanize() takes a torch.optim.Optimizer or a subclass of it, got {type(base).__name__}: mechanize the "
            "optimizer before a framework wraps it, as in mechanize(torch.optim.AdamW(model.parameters()))."
        )
    for name in (parent.__name__ for parent in type(base).__mro__):
        if why := _why_not(name):
            raise ValueError(f"{name} cannot be mechanized: {why}")
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError(
            "differentiable=True cannot be mechanized: the scale is learned outside autograd. "
            "Build the base with differentiable=False."
        )


def _why_not(name: str) -> str | None:
    plain = name.lower().replace("_", "")
    if plain in _OWN_ITERATES_EXACTLY or any(part in plain for part in _OWN_ITERATES):
        return (
            "it computes the weights from its own iterates or scale, while Mechanic assumes that a step adds an update "
            "to the weights. Mechanize the plain optimizer that it is built on, such as AdamW or SGD, or use it alone."
        )
    return _REFUSED.get(name)


def own_iterate(state: Any, grad: Tensor | None, old: Tensor, new: Tensor) -> str | None:
    """The name of a state entry that equals the parameter's weights before or after the first step, or None.

    Such a base may continue from its own copy of the weights, like those rejected by name. Inconclusive, hence None, if
    all weights are equal or equal to their gradient: other entries may then look like a copy.
    """
    if not isinstance(state, dict) or grad is None or old.numel() < 2 or bool((old == old.reshape(-1)[0]).all()):
        return None
    if torch.equal(grad, old):
        return None
    for name, kept in state.items():
        is_plain = type(kept) in (Tensor, torch.nn.Parameter)  # torchao's 8-bit moments cannot be compared
        if is_plain and kept.shape == old.shape and any(torch.equal(kept, x) for x in (old, new)):
            return str(name)
    return None


def _is_torchs(kind: type[Optimizer], names: tuple[str, ...]) -> bool:
    """Whether the class is one of these, or a subclass that overrides only the constructor."""
    known = next(parent for parent in kind.__mro__ if parent.__module__.startswith("torch.optim"))
    if known.__name__ not in names or known is not getattr(torch.optim, known.__name__, None):
        return False
    below = kind.__mro__[: kind.__mro__.index(known)]
    return not any(hasattr(known, name) for each in below for name in vars(each) if not name.startswith("__"))
