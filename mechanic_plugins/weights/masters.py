"""float32 masters, which the base steps in place of 16-bit weights.

An update smaller than a 16-bit weight's rounding is lost, and Mechanic would learn from what is left. So the base is
lent float32 weights, gradients and moments for the duration of a step. Between steps, its state has the dtypes that it
has without Mechanic, so that plain checkpoints and `demechanize` see no difference. Only float16 weights keep float32
moments: squares of small gradients would be 0 in float16, and a division by them ends a run.

A base that cannot work with them steps the 16-bit weights themselves, with a warning: see `_why_not`.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.weights import facts
from mechanic_plugins.weights.plan import Closure
from mechanic_plugins.weights.slots import PREFIX, is_16_bit

__all__ = ["Pairs", "are_usable", "in_the_place_of", "narrow_moments", "stand_in", "synchronized"]

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Parameters and their stand-ins."""

_SEQUENCES = (list, tuple, deque)
_SCALARS = ("step", "mu_product", "eta", "mu")
"""State that torch's optimizers keep as a single float32 number per parameter."""


def are_usable(base: Optimizer, params: Iterable[Tensor]) -> bool:
    """Whether some of these weights are 16-bit and the base can step float32 copies of them. Warns if it cannot."""
    params = [p for p in params if is_16_bit(p.dtype)]
    if not params:
        return False
    reason = None if facts.is_torchs_own(base) else _why_not(base, params)
    if reason is not None:
        dtype = str(params[0].dtype).removeprefix("torch.")
        warnings.warn(
            f"{type(base).__name__} steps the {dtype} weights themselves and not float32 copies, since {reason}. "
            "Updates smaller than the weights' rounding are lost: keep float32 weights and use autocast.",
            stacklevel=2,
        )
    return reason is None


def _why_not(base: Optimizer, params: Sequence[Tensor]) -> str | None:
    """Why the base cannot step float32 copies, or None."""
    options = [*vars(base).values(), *(value for group in base.param_groups for value in group.values())]
    if any(isinstance(value, torch.dtype) and is_16_bit(value) for value in options):
        return "it casts to a dtype of its own"
    if any(p.grad is not None and p.grad.requires_grad for p in params):
        return "its gradients carry a graph (create_graph=True)"
    if not all(_is_within_reach(base.state.get(p, {})) for p in params):
        return "it keeps its state in an object"
    return None


def _is_within_reach(value: Any) -> bool:
    """Whether `_mapped` reaches all tensors inside."""
    if type(value) is dict:
        return all(map(_is_within_reach, value.values()))
    if type(value) in _SEQUENCES:
        return all(map(_is_within_reach, value))
    return value is None or isinstance(value, (Tensor, int, float, complex, str, torch.dtype, torch.device, torch.Size))


def stand_in(p: Tensor, wide: Tensor) -> Tensor:
    """A tensor with the parameter's attributes and the memory of `wide`, its float32 copy."""
    twin = wide.detach()
    for name, value in vars(p).items():  # but not a DTensor's local tensor
        vars(twin).setdefault(name, value)
    return twin.requires_grad_(p.requires_grad)


@contextmanager
def in_the_place_of(base: Optimizer, pairs: Pairs) -> Iterator[None]:
    """Lends the base the stand-ins. On an error weights and moments stay as they were."""
    twins = {id(p): twin for p, twin in pairs}
    lists = [group["params"] for group in base.param_groups]
    try:
        for group in base.param_groups if pairs else ():
            group["params"] = [twins.get(id(p), p) for p in group["params"]]
        for p, twin in pairs:
            twin.grad = None if p.grad is None else p.grad.to(torch.float32)
            if own := {name: value for name, value in base.state.get(p, {}).items() if not name.startswith(PREFIX)}:
                base.state[twin] = _mapped(_wide, own)
        yield
        for p, twin in pairs:
            if twin in base.state:
                _take_back(base, p, twin)
    finally:
        for group, params in zip(base.param_groups, lists, strict=True):
            group["params"] = params
        for twin in twins.values():
            base.state.pop(twin, None)


def synchronized(closure: Closure | None, pairs: Pairs) -> Closure | None:
    """For bases that re-evaluate the loss after moving: copies the stand-ins to the weights, which the model uses."""
    if closure is None or not pairs:
        return closure
    calls = iter([closure])  # the first call only returns the loss evaluated before

    def again() -> Any:
        if (first := next(calls, None)) is not None:
            return first()
        with torch.no_grad():
            olds = [p.clone() for p, _ in pairs]
            for p, twin in pairs:
                p.copy_(twin)
        try:
            return closure()
        finally:
            with torch.no_grad():
                for (p, twin), old in zip(pairs, olds, strict=True):
                    p.copy_(old)
                    twin.grad = None if p.grad is None else p.grad.to(torch.float32)

    return again


def _take_back(base: Optimizer, p: Tensor, twin: Tensor) -> None:
    stepped, kept = base.state.pop(twin), base.state[p]
    for name in [name for name in kept if name not in stepped and not name.startswith(PREFIX)]:
        del kept[name]
    for name, value in stepped.items():
        like = None if p.dim() == 0 and name in _SCALARS else p
        kept[name] = _mapped(functools.partial(_narrow, like=like), value, kept.get(name))


def narrow_moments(state: Mapping[Any, Any]) -> None:
    """Gives float16 weights' moments the dtype in which a plain base keeps them."""
    for p, entries in state.items():
        if isinstance(p, Tensor) and p.dtype == torch.float16:
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.dtype == torch.float32 and name not in _SCALARS:
                    entries[name] = value.to(p.dtype)


def _mapped(change: Callable[..., Tensor], value: Any, other: Any = None) -> Any:
    """Applies `change` to every tensor in a nested structure, along with its counterpart in `other`, if alike."""
    alike = type(value) is type(other)
    if isinstance(value, Tensor):
        return change(value, other)
    if type(value) is dict:
        return {key: _mapped(change, item, other.get(key) if alike else None) for key, item in value.items()}
    if type(value) in _SEQUENCES:
        others = other if alike and len(other) == len(value) else [None] * len(value)
        items = [_mapped(change, item, old) for item, old in zip(value, others, strict=True)]
        return deque(items, value.maxlen) if type(value) is deque else type(value)(items)
    return value


def _wide(value: Tensor, _: Any) -> Tensor:
    """The value in float32. Quantized tensors, which only claim a 16-bit dtype, are left alone."""
    is_plain = type(local(value)) in (Tensor, torch.nn.Parameter)
    return value.to(torch.float32) if is_plain and is_16_bit(value.dtype) else value


def _narrow(new: Tensor, old: Any, *, like: Tensor | None) -> Tensor:
    """The value in the dtype it had. New tensors get the parameter's dtype, scalars excepted, as torch would do.

    The moments of a 0-dim parameter are 0-dim as well, so torch's scalars are recognised by name. Beside float16
    weights, float32 moments stay what they are.
    """
    if like is not None and like.dtype == torch.float16 and new.dtype == torch.float32:
        return new
    if isinstance(old, Tensor):
        if new is old or not is_16_bit(old.dtype):
            return new
        return old.copy_(new) if old.shape == new.shape else new.to(old.dtype)
    if like is None or new.dtype != torch.float32 or (new.dim() == 0 and like.dim() > 0):
        return new
    return new.to(like.dtype)
