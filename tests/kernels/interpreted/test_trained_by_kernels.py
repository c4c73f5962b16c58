"""Compares training by the kernels with training without them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_cases import BASES, EPS, train
from torch import nn

from mechanic_plugins import mechanize
from mechanic_plugins.core.param_state import MASTER, REF
from mechanic_plugins.passes.fused import FusedPlan


def is_fused(optimizer: Any) -> bool:
    """Whether some of its steps were fused."""
    return any(isinstance(plan, FusedPlan) for plan in optimizer._planner._plans.values())


@pytest.mark.parametrize("base", BASES)
def test_fused_equals_any_base(base: str) -> None:
    """Each step rounds once or twice in float32, and most of these errors fade, as the problem is well conditioned."""
    steps = 12 if base == "adamw" else 8
    plain, a = train(base, steps, torch.float32, backend="foreach")
    fused, b = train(base, steps, torch.float32, backend="fused")
    assert is_fused(b)
    for x, y in zip(plain, fused, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(a.moved, b.moved, rtol=1e-4, atol=0)
    for p, q in zip(a._params(), b._params(), strict=True):
        assert a.state[p].keys() - {"momentum_buffer"} <= b.state[q].keys()


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_reference_in_bfloat16_by_kernels_is_torchs(backend: str) -> None:
    plain, a = train("adamw", 10, torch.float32, backend="foreach", delta_dtype=torch.bfloat16)
    kernel, b = train("adamw", 10, torch.float32, backend=backend, delta_dtype=torch.bfloat16)
    assert {state[REF].dtype for state in b.state.values()} == {torch.bfloat16}
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)
    for x, y in zip(plain, kernel, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_warm_up_by_kernels_is_torchs(backend: str) -> None:
    plain, a = train("adamw", 11, torch.float32, backend="foreach", warm_up=8)
    kernel, b = train("adamw", 11, torch.float32, backend=backend, warm_up=8)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-5, atol=0)
    for x, y in zip(plain, kernel, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()


@pytest.mark.parametrize(
    ("base", "dtype"), [("adamw", torch.float32), ("lion", torch.float64), ("sgd momentum", torch.float16)], ids=str
)
def test_any_base_by_kernels_equals_torchs(base: str, dtype: torch.dtype) -> None:
    plain, a = train(base, 8, dtype, backend="foreach")
    kernel, b = train(base, 8, dtype, backend="triton")
    assert not is_fused(b)
    for x, y in zip(plain, kernel, strict=True):
        assert ((x - y).abs() <= 300 * EPS[dtype] * (1 + x.abs())).all()
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_low_precision_weights_are_roundings(dtype: torch.dtype) -> None:
    _, optimizer = train("adamw", 12, dtype, backend="fused")
    assert is_fused(optimizer)
    for p in optimizer._params():
        exact = optimizer.state[p][MASTER]
        assert exact.dtype == torch.float32
        assert ((exact.to(dtype) - p).abs().float() <= EPS[dtype] * 2 * p.abs().float()).all()


def test_paths_may_change_at_any_step() -> None:
    """Both paths use the same state, so alternating between them gives the same result as one path."""
    whole, _ = train("adamw", 14, torch.float32, backend="foreach")
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (9,), ()]]
    targets = [torch.randn_like(p) for p in params]
    optimizers = [mechanize(BASES["adamw"](params), backend=b) for b in ("fused", "foreach")]
    for step in range(14):
        optimizer = optimizers[step % 2]
        if step:
            optimizer.load_state_dict(optimizers[1 - step % 2].state_dict())
        optimizer.zero_grad()
        swing = 0.5 * math.cos(step)
        sum(((p - t - swing) ** 2).sum() for p, t in zip(params[: 2 + step % 2], targets, strict=False)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for x, p in zip(whole, params, strict=True):
        torch.testing.assert_close(x, p.detach(), rtol=0, atol=300 * EPS[torch.float32])


class Own(torch.optim.AdamW):
    """An unknown base."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Own, torch.optim.NAdam])
def test_masters_of_16_bit_weights_by_kernels_equal_torchs(kind: Any) -> None:
    ends = []
    for backend in ("foreach", "triton"):  # in float16, as the interpreter truncates bfloat16 where GPUs round
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).half()) for shape in [(5, 7), (9,), ()]]
        optimizer = mechanize(kind(params, lr=1e-4), backend=backend)
        for step in range(8):
            for p in params[: 2 + step % 2]:
                p.grad = torch.randn(p.shape).half() + 1  # not from the weights: roundings would feed back
            optimizer.step()
        ends.append([t for p in params for t in (p.detach(), *map(optimizer.state[p].get, ("exp_avg", MASTER)))])
    assert optimizer.scale.item() > 0
    for a, b in zip(*ends, strict=True):
        lost = 8 * 2 * EPS[torch.float32] if a.dtype == torch.float32 else 0  # in updates computed from weights up to 2
        torch.testing.assert_close(a, b, rtol=2 * EPS[a.dtype], atol=lost)
