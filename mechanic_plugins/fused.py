"""The fused path: a known base's update and Mechanic's move in one pass over memory.

The moments stay in the base's own state, under the base's own names, so that checkpoints and `demechanize` do not know
the difference, and a run may change paths at any step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins import multi_tensor
from mechanic_plugins.lion import Lion
from mechanic_plugins.multi_tensor import MOVE_BLOCK, MOVE_WARPS, Extra, Workspace
from mechanic_plugins.sharding import local
from mechanic_plugins.slots import Slot, needs_reference

__all__ = ["DTYPES", "Part", "can_fuse", "prepare", "step"]

Group = dict[str, Any]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAM, _ADAMW, _SGD, _LION = range(4)
_STEPS_BLOCK = 128


@dataclass(frozen=True)
class Part:
    """Parameters that share a launch: one param group, tuner and kind of tensor."""

    group: Group
    params: list[Tensor]
    slots: list[Slot]
    row: int


def can_fuse(base: Optimizer) -> bool:
    """Whether the fused pass knows this base with these settings."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        return False  # they would not be called
    if type(base) in (torch.optim.Adam, torch.optim.AdamW):
        return not any(group["amsgrad"] or group["foreach"] for group in base.param_groups)
    if type(base) is torch.optim.SGD:
        return not any(group["dampening"] or group["foreach"] for group in base.param_groups)
    return type(base) is Lion


def prepare(base: Optimizer, params: Sequence[Tensor]) -> None:
    """Makes the base's state for parameters that have none yet, as the base itself would."""
    for p in params:
        state = base.state[p]
        for name in _moments(base):
            if state.get(name) is None:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
        if _has_steps(base):
            step = state.get("step")
            known = torch.zeros((), dtype=torch.float32) if step is None else torch.as_tensor(step)
            state["step"] = known.to(device=local(p).device, dtype=torch.float32)


def step(
    base: Optimizer, parts: Sequence[Part], scales: Tensor, *, unit: float, workspace: Workspace | None
) -> list[Tensor]:
    """Steps the base at lr / unit and plays the scales; returns, for each part, its blocks' shares of the next norms.

    `scales` has for each tuner the scale before and after, and whether the step is made: where it is not, nothing is.
    """
    assert workspace is not None
    norms = [_launch(base, part, scales[part.row], unit=unit, workspace=workspace) for part in parts]
    torch.autograd.graph.increment_version([slot.x for part in parts for slot in part.slots])
    base._opt_called = True  # type: ignore[attr-defined]  # for schedulers built on the base before it was wrapped
    return norms


def _launch(base: Optimizer, part: Part, scales: Tensor, *, unit: float, workspace: Workspace) -> Tensor:
    from mechanic_plugins import triton_kernels as kernels

    x, group = part.slots[0].x, part.group
    extras = [_extra(base, p) for p in part.params]
    moment = extras[0].moment1
    kind = multi_tensor.kind_of(part.slots[0])
    table = workspace.table(("fused", id(group), part.row, *kind), part.slots)
    tiles = table.tiled(MOVE_BLOCK)
    pointers, _alive = multi_tensor.point(table, part.slots, extras=extras)
    norms = table.buffer("norms", (tiles.count, 3))
    if not tiles.count:
        return norms
    corrections = _corrections(kernels, table, group, scales) if _has_steps(base) else norms
    lr = group["lr"]
    kernels.fused_kernel[(tiles.count,)](
        pointers,
        tiles.blocks,
        tiles.firsts,
        scales,
        norms,
        corrections,
        lr if isinstance(lr, Tensor) else lr / unit,
        1 / unit,
        *_constants(base, group),
        LR_IS_TENSOR=isinstance(lr, Tensor),
        KIND=_kind(base, group),
        MOMENTUM=bool(group.get("momentum")),
        NESTEROV=bool(group.get("nesterov")),
        MAXIMIZE=bool(group.get("maximize")),
        xtype=multi_tensor.triton_type(x.dtype),
        gtype=multi_tensor.triton_type(kind[2]),
        dtype=multi_tensor.triton_type(torch.float32),
        mtype=multi_tensor.triton_type(x.dtype if moment is None else moment.dtype),
        LOW=needs_reference(x.dtype),
        ALIGNED=table.is_aligned,
        SIZE=MOVE_BLOCK,
        num_warps=MOVE_WARPS,
    )
    return norms


def _corrections(kernels: Any, table: multi_tensor.Table, group: Group, scales: Tensor) -> Tensor:
    """Counts Adam's step for every parameter, and its bias corrections."""
    count = len(table.numels)
    corrections = table.buffer("corrections", (count, 2))
    logs = table.constant(tuple(math.log(beta) if beta > 0 else -math.inf for beta in group["betas"]))
    kernels.adam_steps_kernel[(-(-count // _STEPS_BLOCK),)](
        table.pointers, count, scales, logs, corrections, SIZE=_STEPS_BLOCK, num_warps=4
    )
    return corrections


def _moments(base: Optimizer) -> tuple[str, ...]:
    if type(base) is torch.optim.SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()
    return ("exp_avg",) if type(base) is Lion else ("exp_avg", "exp_avg_sq")


def _has_steps(base: Optimizer) -> bool:
    return type(base) in (torch.optim.Adam, torch.optim.AdamW)


def _extra(base: Optimizer, p: Tensor) -> Extra:
    state = base.state[p]
    first, second, *_ = *(local(state.get(name)) for name in _moments(base)), None, None
    return Extra(first, second, state.get("step"))


def _kind(base: Optimizer, group: Group) -> int:
    if type(base) is torch.optim.SGD:
        return _SGD
    if type(base) is Lion:
        return _LION
    return _ADAMW if type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay") else _ADAM


def _constants(base: Optimizer, group: Group) -> tuple[float, float, float, float]:
    """Weight decay, and the base's own three."""
    decay = float(group["weight_decay"])
    if type(base) is torch.optim.SGD:
        return decay, float(group["momentum"]), 0.0, 0.0
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return decay, beta1, beta2, float(group.get("eps", 0.0))
