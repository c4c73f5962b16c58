"""`max_grad_norm` in the GPU kernels, run by Triton's interpreter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import RULES
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lion import Lion

NORM = 1.5
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}
SCOPED = {"default": {"scope": "group"}, "paper": {"settings": Settings(rule="paper", s_init=0.1, scope="group")}}


def train(base: str, dtype: torch.dtype, *, by_hand: bool, steps: int = 6, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(5, 7), (16,), ()]]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    if not by_hand:
        options["max_grad_norm"] = NORM
    optimizer = mechanize(BASES[base](groups), **options)
    for step in range(steps):
        optimizer.zero_grad()
        size = 0.1 if step % 4 == 3 else 1.0
        for p in params[: 2 + step % 2]:
            p.grad = (size * (p.detach() - 0.5 * math.cos(step))).to(dtype)
        if by_hand:
            norm = clip_grad_norm_(params, NORM)
            assert (norm > NORM) == (size == 1.0)
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("base", "scope"), [*((base, "all") for base in BASES), ("adamw", "group")])
def test_fused_equals_a_clip_before_the_step(base: str, scope: str, rule: str, launches: Counter[str]) -> None:
    options = RULES[rule] if scope == "all" else SCOPED[rule]
    plain, a = train(base, torch.float32, by_hand=True, backend="foreach", **options)
    fused, b = train(base, torch.float32, by_hand=False, backend="fused", **options)
    assert launches["fused_kernel"] > 1
    for x, y in zip(plain, fused, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(a.scales, b.scales, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_base_by_kernels_equals_a_clip_before_the_step(dtype: torch.dtype, rule: str) -> None:
    plain, a = train("adamw", dtype, by_hand=True, backend="foreach", **RULES[rule])
    kernel, b = train("adamw", dtype, by_hand=False, backend="triton", **RULES[rule])
    tolerance = 1e-12 if dtype is torch.float64 else 2e-2
    for x, y in zip(plain, kernel, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.scale, b.scale, rtol=tolerance, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_the_fused_pass_leaves_the_gradients_alone(rule: str) -> None:
    p = nn.Parameter(torch.randn(16))
    optimizer = mechanize(torch.optim.AdamW([p]), backend="fused", max_grad_norm=0.1, **RULES[rule])
    for step in range(6):
        p.grad, by_base = torch.full_like(p, 3.0), step < 3 or optimizer.is_step_measured
        optimizer.step()
        assert by_base or torch.equal(p.grad, torch.full_like(p, 3.0))
        assert optimizer.grad_norm.item() == pytest.approx(12.0)
