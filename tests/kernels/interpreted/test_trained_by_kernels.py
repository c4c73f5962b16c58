"""Compares training by the kernels with training without them, for both rules."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from kernel_cases import BASES, RULES, TOLD, three_params, train
from kernel_tensors import EPS
from torch import nn

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.weights import on_device
from mechanic_plugins.weights.slots import DELTA, MASTER, REF


def assert_alike(plain: list[torch.Tensor], kernel: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Each step rounds once or twice, and most of these errors fade, as the problem is well conditioned."""
    for x, y in zip(plain, kernel, strict=True):
        assert ((x - y).abs() <= 300 * EPS[dtype] * (1 + x.abs())).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", BASES)
def test_fused_equals_any_base(base: str, rule: str, launches: Counter[str]) -> None:
    steps = 12 if base == "adamw" else 8
    plain, a = train(base, steps, torch.float32, backend="foreach", **RULES[rule])
    assert not launches
    fused, b = train(base, steps, torch.float32, backend="fused", **RULES[rule])
    assert launches["fused_kernel"] >= steps - 5
    assert_alike(plain, fused)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(a.moved, b.moved, rtol=1e-4, atol=0, equal_nan=True)
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        assert a.state[p].keys() - {"momentum_buffer"} <= b.state[q].keys()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which computes with the infinity
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", TOLD)
def test_a_fused_base_of_torchs_is_told_on_the_device(base: str, rule: str, launches: Counter[str]) -> None:
    """Learning rate, clipping factor and the skip decision are passed to it as tensors."""
    options = {**RULES[rule], "late": False, "poison": 8, "max_grad_norm": 3.0}
    with pytest.warns(UserWarning, match="was skipped"):
        plain, a = train(base, 11, torch.float32, backend="foreach", **options)
    assert not launches
    told, b = train(base, 11, torch.float32, backend="triton", **options)
    assert launches["tuner_kernel"] >= 11 - 4
    assert launches["fused_kernel"] == 0
    with pytest.warns(UserWarning, match="was skipped"):
        assert b.metrics()["mechanic/skipped_steps"] == 1
    assert_alike(plain, told)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)


@pytest.mark.parametrize("base", ["adamw", "told adamw"])
@pytest.mark.parametrize("rule", ["experiments", "optax", "theory"])
def test_every_published_rule(rule: Any, base: str, launches: Counter[str]) -> None:
    options: Any = {"settings": Settings(rule=rule, s_init=0.1), "late": base == "adamw"}
    plain, a = train(base, 6, torch.float32, backend="foreach", **options)
    kernel, b = train(base, 6, torch.float32, **options, backend="fused" if base == "adamw" else "triton")
    assert launches["tuner_kernel"] > 3
    assert_alike(plain, kernel)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)


WAYS = [("adamw", "fused"), ("told adamw", "triton")]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("base", "backend"), WAYS)
def test_what_is_kept_in_bfloat16_by_kernels_is_torchs(base: str, backend: str, rule: str) -> None:
    """Delta is rounded at random: the kernels and torch draw other numbers, and both are right on average."""
    options = {**RULES[rule], "kept_dtype": torch.bfloat16, "late": False}
    plain, a = train(base, 10, torch.float32, backend="foreach", **options)
    kernel, b = train(base, 10, torch.float32, backend=backend, **options)
    slot = REF if rule == "default" else DELTA
    assert {state[slot].dtype for state in (*a.state.values(), *b.state.values())} == {torch.bfloat16}
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4 if rule == "default" else 2e-2, atol=0)
    tolerance = 1e-5 if rule == "default" else 1e-2
    for x, y in zip(plain, kernel, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("base", "backend"), WAYS)
def test_a_warm_up_by_kernels_is_torchs(base: str, backend: str, rule: str) -> None:
    options = {**RULES[rule], "warm_up": 8, "late": False}
    plain, a = train(base, 11, torch.float32, backend="foreach", **options)
    kernel, b = train(base, 11, torch.float32, backend=backend, **options)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-5, atol=0)
    assert_alike(plain, kernel)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        ("adamw", torch.float32),
        ("lion", torch.float64),
        ("sgd momentum", torch.float16),
        ("told adamw", torch.float64),
        ("told adamw", torch.float16),
    ],
    ids=str,
)
def test_any_base_by_kernels_equals_torchs(base: str, dtype: torch.dtype, rule: str, launches: Counter[str]) -> None:
    options = {**RULES[rule], "late": "told" not in base}
    plain, a = train(base, 8, dtype, backend="foreach", **options)
    kernel, b = train(base, 8, dtype, backend="triton", **options)
    assert launches["fused_kernel"] == 0
    is_exact = dtype == torch.float64 and base == "lion"  # torch's kernels read the lr on the device as float32
    assert_alike(plain, kernel, torch.float32 if dtype == torch.float64 and not is_exact else dtype)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-11 if is_exact else 1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_low_precision_weights_are_roundings(dtype: torch.dtype, launches: Counter[str]) -> None:
    _, optimizer = train("adamw", 12, dtype, backend="fused")
    assert launches["fused_kernel"] > 6
    for p in optimizer.param_groups[0]["params"]:
        exact = optimizer.state[p][MASTER]
        assert exact.dtype == torch.float32
        assert ((exact.to(dtype) - p).abs().float() <= EPS[dtype] * 2 * p.abs().float()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_16_bit_weights_of_a_published_rule_are_roundings(dtype: torch.dtype, launches: Counter[str]) -> None:
    """Of reference + scale * Delta, with Delta in float32."""
    _, optimizer = train("adamw", 10, dtype, backend="fused", **RULES["paper"])
    assert launches["fused_kernel"] > 6
    for p in optimizer.param_groups[0]["params"]:
        kept = optimizer.state[p]
        assert (kept[DELTA].dtype, kept[REF].dtype) == (torch.float32, dtype)
        exact = kept[REF].float() + optimizer.scale.float() * kept[DELTA]
        assert ((exact - p.float()).abs() <= EPS[dtype] * 2 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("rule", RULES)
def test_paths_may_change_at_any_step(rule: str) -> None:
    """All paths use the same state, so alternating between them gives the same result as one path."""
    whole, _ = train("told adamw", 12, torch.float32, backend="foreach", **RULES[rule])
    params = three_params()
    targets = [torch.randn_like(p) for p in params]
    backends: Any = ("fused", "foreach", "triton")
    optimizers = [mechanize(TOLD["told adamw"](params), backend=backend, **RULES[rule]) for backend in backends]
    for step in range(12):
        optimizer = optimizers[step % 3]
        if step:
            optimizer.load_state_dict(optimizers[(step - 1) % 3].state_dict())
        optimizer.zero_grad()
        swing = 0.5 * math.cos(step)
        sum(((p - t - swing) ** 2).sum() for p, t in zip(params[: 2 + step % 2], targets, strict=False)).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert_alike(whole, [p.detach() for p in params])


def test_an_update_read_off_the_weights_keeps_its_digits() -> None:
    """At lr=1e-7, weights near 1 would round all of an update away: it is made with a larger lr and divided."""
    ends = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(64, 16), (33,)]]
        optimizer = mechanize(torch.optim.AdamW(params, lr=1e-7, fused=True), rule="paper", backend="triton")
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape).to(dtype)
            optimizer.step()
        ends.append([optimizer.state[p][DELTA].double() for p in params])
    for exact, found in zip(*ends, strict=True):
        assert ((exact - found).norm() <= 3e-6 * exact.norm()).item()


def test_the_weights_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch, launches: Counter[str]) -> None:
    """With a published rule around a base. Hooks on the base are called once a step, so then they are not."""
    ends, called = [], []
    for limit, hooked in ((1 << 30, False), (100, False), (100, True)):
        launches.clear()
        monkeypatch.setattr(on_device, "COPIED_AT_ONCE", limit)
        params = three_params()
        base = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}], lr=1e-3, fused=True)
        if hooked:
            base.register_step_post_hook(lambda *given: called.append(given))
        optimizer = mechanize(base, backend="triton", **RULES["paper"])
        for _ in range(5):
            for p in params:
                p.grad = p.detach() - 1
            optimizer.step()
        assert launches["snapshot_kernel"] == launches["move_kernel"] == 4 * (3 if limit == 100 and not hooked else 2)
        ends.append(params)
    assert len(called) == 5
    for other in ends[1:]:
        assert all(map(torch.equal, ends[0], other))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("base", "backend"), WAYS)
def test_a_closure_is_evaluated_once(base: str, backend: Any, rule: str, launches: Counter[str]) -> None:
    ends = []
    for way in ("foreach", backend):
        params, losses = three_params(), list[float]()
        optimizer = mechanize((BASES | TOLD)[base](params), backend=way, **RULES[rule])

        def closure() -> Any:
            optimizer.zero_grad()  # noqa: B023
            loss = sum((p**2).sum() for p in params)  # noqa: B023
            loss.backward()  # type: ignore[union-attr]
            losses.append(loss.item())  # type: ignore[union-attr]  # noqa: B023
            return loss

        for step in range(6):
            assert optimizer.step(closure).item() == losses[-1]
            assert len(losses) == step + 1
        ends.append([p.detach() for p in params])
    assert launches["tuner_kernel"] > 2
    assert_alike(*ends)


class Own(torch.optim.AdamW):
    """An unknown base."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Own, torch.optim.NAdam])
def test_masters_of_16_bit_weights_by_kernels_equal_torchs(kind: Any) -> None:
    ends = []
    for backend in ("foreach", "triton"):  # in float16, as the interpreter truncates bfloat16 where GPUs round
        params = three_params(torch.float16)
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
