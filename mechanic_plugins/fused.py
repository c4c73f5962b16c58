"""The fused path: a known base's update and Mechanic's move in one pass over memory.

The moments stay in the base's own state, under the base's own names, so that checkpoints and `demechanize` do not know
the difference, and a run may change paths at any step.

The pass also leaves <x, x>, <d, x> and <d, d> of what it wrote, so that the next step's sums need not read the weights:
44 bytes a parameter in all for AdamW in float32, where the base alone takes 28.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins import multi_tensor
from mechanic_plugins.checkpoint import DELTA, REF
from mechanic_plugins.lion import Lion
from mechanic_plugins.multi_tensor import MOVE_BLOCK, MOVE_WARPS, Table
from mechanic_plugins.sharding import align_gradients, is_dtensor, local
from mechanic_plugins.slots import needs_reference

__all__ = ["DTYPES", "Piece", "Plan", "can_fuse", "is_capturing", "prepare"]

Group = dict[str, Any]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAM, _ADAMW, _SGD, _LION = range(4)
_STEPS_BLOCK = 128
_COLUMNS = 9


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


class Piece:
    """Parameters that share launches: one param group, tuner, weight and kind of tensor.

    Built once and used as long as nothing but the addresses of weights and gradients changes: reading those is all
    that a step does on the host for each parameter.
    """

    def __init__(self, base: Optimizer, group: Group, params: Sequence[Tensor], *, row: int, weight: float) -> None:
        self.base, self.group, self.params = base, group, list(params)
        self.row, self.weight = row, weight
        self.is_sharded = is_dtensor(params[0])
        x = local(params[0])
        grad = local(params[0].grad)
        self.kind = (x.device, x.dtype, x.dtype if grad is None else grad.dtype)
        self.names = (DELTA, REF, *_moments(base), *(("step",) if _has_steps(base) else ()))
        self.states = [base.state[p] for p in self.params]
        self.tensors = [tuple(state.get(name) for name in self.names) for state in self.states]
        self.table = Table(x.device, tuple(local(p).numel() for p in self.params))
        self.rows: list[int] = []
        self.versions: list[int] = []
        self.left: list[int] | None = None
        """The weights' versions after our last step: as long as they are the same, the norms it left are right."""
        self.gradients = 0
        self._refuse_foreign_state()
        self._fill_rows()

    def _refuse_foreign_state(self) -> None:
        """A kernel would read past the end of what is too short."""
        vectors = self.names[: len(self.names) - _has_steps(self.base)]
        kinds = {torch.float32, *(local(t[2]).dtype for t in self.tensors[:1] if len(vectors) > 2)}
        for p, tensors in zip(self.params, self.tensors, strict=True):
            for name, tensor in zip(vectors, tensors, strict=False):
                if tensor is None:
                    continue
                if tensor.shape != p.shape or (name != REF and tensor.dtype not in kinds):
                    raise ValueError(
                        f"the optimizer's {name} is {tensor.dtype} of shape {tuple(tensor.shape)} where the parameter "
                        f"has shape {tuple(p.shape)}: it belongs to another parameter. Build a new optimizer when you "
                        "change a parameter's shape, or use backend='foreach'."
                    )

    def _fill_rows(self) -> None:
        for p, tensors in zip(self.params, self.tensors, strict=True):
            delta, ref, *rest = (0 if t is None else local(t).data_ptr() for t in tensors)
            step = rest.pop() if _has_steps(self.base) else 0
            moment1, moment2, *_ = *rest, 0, 0
            self.rows += (0, 0, delta, ref, moment1, moment2, step, 0, local(p).numel())

    def is_current(self) -> bool:
        """Whether the state is still where it was: a load, or a change of paths, puts other tensors there."""
        names = self.names
        for state, tensors in zip(self.states, self.tensors, strict=True):
            for name, tensor in zip(names, tensors, strict=True):
                if state.get(name) is not tensor:
                    return False
        return True

    def point(self) -> bool:
        """Reads the addresses of weights and gradients; False where a gradient is not like the others."""
        gtype = self.kind[2]
        if self.is_sharded:
            align_gradients(self.params)
        rows, at, gradients, versions = list(self.rows), 0, 0, []
        for p, numel in zip(self.params, self.table.numels, strict=True):
            x, grad = p, p.grad
            if self.is_sharded:
                x, grad = p._local_tensor, None if grad is None else grad._local_tensor  # type: ignore[attr-defined]
            if x.numel() != numel:
                return False
            rows[at] = x.data_ptr()
            versions.append(x._version)
            if grad is not None:
                if grad.is_sparse or grad.dtype != gtype or grad.stride() != x.stride():
                    return False
                rows[at + 1] = grad.data_ptr()
                gradients += 1
            else:
                rows[at + 1] = 0
            at += _COLUMNS
        if rows[::_COLUMNS] != self.rows[::_COLUMNS]:
            self.left = None
        self.rows, self.versions, self.gradients = rows, versions, gradients
        if self.table.rows != rows:
            self.table.point_to(rows, bits=_ored(rows))
        return True

    def add_sums(self, out: Tensor) -> None:
        """Adds this piece's share to its tuner's five sums, and its gradients to the count at the end."""
        norms = self._norms() if self.left == self.versions and not is_capturing(self.kind[0]) else None
        partial = multi_tensor.partial_sums(self.table, self._pointers(), self.kind, norms=norms is None)
        constants = self.table.constant((self.weight, float(self.gradients)))
        five = out[5 * self.row : 5 * self.row + 5]
        maximize = bool(self.group.get("maximize"))
        multi_tensor.collect(five, out[-1:], partial, norms, constants=constants, maximize=maximize)

    def _pointers(self) -> Tensor:
        assert self.table.pointers is not None
        return self.table.pointers

    def _norms(self) -> Tensor:
        programs = multi_tensor.move_programs(self.table.tiled(MOVE_BLOCK), self.kind[0])
        return self.table.buffer("norms", (programs, 3))

    def play(self, scales: Tensor, *, unit: float) -> None:
        """Steps the base at lr / unit and plays the scale; where the step is not made, touches nothing."""
        from mechanic_plugins import triton_kernels as kernels

        device, xtype, gtype = self.kind
        group, scales = self.group, scales[self.row].to(device, non_blocking=True)
        tiles = self.table.tiled(MOVE_BLOCK)
        norms = self._norms()
        lr = group["lr"]
        moment = self.tensors[0][2] if _moments(self.base) else None
        if tiles.count:
            kernels.fused_kernel[(len(norms),)](
                self._pointers(),
                tiles.blocks,
                tiles.firsts,
                tiles.count,
                scales,
                norms,
                self._corrections(kernels, scales) if _has_steps(self.base) else norms,
                lr if isinstance(lr, Tensor) else lr / unit,
                1 / unit,
                *_constants(self.base, group),
                LR_IS_TENSOR=isinstance(lr, Tensor),
                KIND=_kind(self.base, group),
                MOMENTUM=bool(group.get("momentum")),
                NESTEROV=bool(group.get("nesterov")),
                MAXIMIZE=bool(group.get("maximize")),
                xtype=multi_tensor.triton_type(xtype),
                gtype=multi_tensor.triton_type(gtype),
                mtype=multi_tensor.triton_type(xtype if moment is None else moment.dtype),
                LOW=needs_reference(xtype),
                ALIGNED=self.table.is_aligned,
                SIZE=MOVE_BLOCK,
                num_warps=MOVE_WARPS,
            )
        self.left = [version + 1 for version in self.versions]

    def _corrections(self, kernels: Any, scales: Tensor) -> Tensor:
        """Counts Adam's step for every parameter, and its bias corrections."""
        count = len(self.params)
        corrections = self.table.buffer("corrections", (count, 2))
        logs = self.table.constant(tuple(math.log(beta) if beta > 0 else -math.inf for beta in self.group["betas"]))
        kernels.adam_steps_kernel[(-(-count // _STEPS_BLOCK),)](
            self._pointers(), count, scales, logs, corrections, SIZE=_STEPS_BLOCK, num_warps=4
        )
        return corrections


class Plan:
    """The pieces of one optimizer, good as long as its parameters and their state stay the same."""

    def __init__(self, base: Optimizer, key: tuple[int, ...], pieces: list[Piece], outsiders: list[Tensor]) -> None:
        self.base, self.key, self.pieces = base, key, pieces
        self.outsiders = outsiders
        """Parameters that never had a gradient: the first one they get ends the plan."""
        self._state = base.state

    @classmethod
    def of(cls, base: Optimizer, key: tuple[int, ...], members: Sequence[tuple[Tensor, Group, int, float]]) -> Plan:
        """From (parameter, group, tuner, weight), all of them with their state."""
        kinds: dict[Any, list[tuple[Tensor, Group, int, float]]] = defaultdict(list)
        for member in members:
            p, group, row, weight = member
            x, grad = local(p), local(p.grad)
            gtype = x.dtype if grad is None else grad.dtype
            kinds[id(group), row, weight, x.device, x.dtype, gtype, is_dtensor(p)].append(member)
        pieces = [
            Piece(base, part[0][1], [p for p, *_ in part], row=part[0][2], weight=part[0][3]) for part in kinds.values()
        ]
        inside = {id(p) for p, *_ in members}
        outsiders = [p for group in base.param_groups for p in group["params"] if id(p) not in inside]
        return cls(base, key, pieces, outsiders)

    def is_current(self, key: tuple[int, ...]) -> bool:
        """Whether this step can follow the plan; reads the addresses it needs."""
        return (
            self.key == key
            and self._state is self.base.state
            and can_fuse(self.base)
            and all(p.grad is None for p in self.outsiders)
            and all(piece.is_current() and piece.point() for piece in self.pieces)
        )

    def sums(self, *, tuners: int, device: torch.device) -> Tensor:
        """Five sums for each tuner and, last, how many gradients there are."""
        out = torch.zeros(5 * tuners + 1, dtype=torch.float64, device=device)
        for piece in self.pieces:
            if piece.kind[0] == device:
                piece.add_sums(out)
            else:
                there = torch.zeros_like(out, device=piece.kind[0])
                piece.add_sums(there)
                out += there.to(device, non_blocking=True)
        return out

    def play(self, scales: Tensor, *, unit: float) -> None:
        """`scales` has for each tuner the scale before and after, and whether the step is made."""
        for piece in self.pieces:
            piece.play(scales, unit=unit)
        torch.autograd.graph.increment_version([local(p) for piece in self.pieces for p in piece.params])
        self.base._opt_called = True  # type: ignore[attr-defined]  # for schedulers built on the base


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ored(rows: Sequence[int]) -> int:
    """All pointers to vectors in one number: what its last bits say holds for each."""
    bits = 0
    for column in range(6):
        for pointer in rows[column::_COLUMNS]:
            bits |= pointer
    return bits


def _moments(base: Optimizer) -> tuple[str, ...]:
    if type(base) is torch.optim.SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in base.param_groups) else ()
    return ("exp_avg",) if type(base) is Lion else ("exp_avg", "exp_avg_sq")


def _has_steps(base: Optimizer) -> bool:
    return type(base) in (torch.optim.Adam, torch.optim.AdamW)


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
