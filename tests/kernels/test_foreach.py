"""The passes by torch operations, as a GPU without Triton makes them: small tensors together, in rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.kernels import foreach, foreach_sums

COUNTED = ("aten::dot", "aten::cat", "aten::linalg_vector_norm", "aten::addcmul", "aten::lerp")
PAPER = Settings(rule="paper", s_init=1e-3, s_decay=0.1)
SHAPES = [(3, 5), (), (40,), (0, 2), (7, 2, 3, 3), (11,)]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    for module in (foreach, foreach_sums):
        monkeypatch.setattr(module, "waits_for_host", lambda device: True)
        monkeypatch.setattr(module, "SMALL", 45)  # of six tensors one is longer
    monkeypatch.setattr(foreach_sums, "_LONG", 35)  # one lies between
    monkeypatch.setattr(foreach_sums, "_SHORT", 15)  # and one between these
    monkeypatch.setattr(foreach_sums, "_ROW", row)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[4].data = params[4].data.to(memory_format=torch.channels_last)
    return params


def trained(dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], float]:
    params = parameters(dtype)
    optimizer = mechanize(torch.optim.AdamW(params, lr=0.1), backend="foreach", **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        for index, p in enumerate(params):
            noise = torch.randn(p.shape, generator=generator)
            p.grad = None if (step + index) % 5 == 4 else (p.detach() - 1 + 0.1 * noise).to(dtype)
        optimizer.step()
    return [p.detach() for p in params], optimizer.scale.item()


@pytest.mark.parametrize("row", [25, 10**6])
@pytest.mark.parametrize("options", [{}, {"settings": PAPER}, {"max_grad_norm": 0.5}], ids=str)
def test_rows_lead_where_single_tensors_do(options: dict[str, Any], row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, scale = trained(torch.float64, **options)
    as_on_a_gpu(monkeypatch, row)
    weights, scale_by_rows = trained(torch.float64, **options)
    assert scale_by_rows == pytest.approx(scale, rel=1e-12)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"settings": PAPER}], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "gaps"])
def test_moves_by_the_kernel_of_sgd(layout: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It walks flat memory: it would write beside a tensor with gaps, or refuse it."""
    as_on_a_gpu(monkeypatch, 10**6)
    used: list[int] = []
    fused = torch._fused_sgd_
    monkeypatch.setattr(
        torch, "_fused_sgd_", lambda xs, *args, **kwargs: used.append(len(xs)) or fused(xs, *args, **kwargs)
    )
    expected, scale, _ = of_layout(layout, options)
    assert not used
    monkeypatch.setattr(foreach, "has_fused_sgd", lambda x: True)
    weights, scale_by_kernel, between = of_layout(layout, options)
    assert bool(used) == (layout == "plain")
    assert scale_by_kernel == pytest.approx(scale, rel=1e-12)
    assert not between.any()
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def of_layout(layout: str, options: dict[str, Any]) -> tuple[list[Tensor], float, Tensor]:
    """Trained weights, the scale, and what lies in memory between the weights."""
    memory = torch.zeros(4, 6, dtype=torch.float64)
    first = {"plain": torch.zeros(4, 3), "transposed": torch.zeros(3, 4).T, "gaps": memory[:, ::2]}[layout].double()
    params = [nn.Parameter(first), nn.Parameter(torch.ones(5, dtype=torch.float64))]
    optimizer = mechanize(torch.optim.AdamW(params, lr=0.1), backend="foreach", **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        for p in params:
            p.grad = p.detach() - 1 + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach() for p in params], optimizer.scale.item(), memory[:, 1::2]


@pytest.mark.parametrize("row", [25, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("with_dx", [True, False])
def test_sums_by_rows(dtype: torch.dtype, row: int, with_dx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [p.detach() for p in parameters(dtype)]
    grads, deltas = (
        [None if i == 1 else 2 * x for i, x in enumerate(xs)],
        [None if i == 2 else 3 * x for i, x in enumerate(xs)],
    )
    expected = foreach_sums.local_sums(xs, grads, deltas, device=torch.device("cpu"), with_dx=with_dx)
    assert (expected[3] == 0) == (not with_dx)
    as_on_a_gpu(monkeypatch, row)
    sums = foreach_sums.local_sums(xs, grads, deltas, device=torch.device("cpu"), with_dx=with_dx)
    torch.testing.assert_close(sums, expected, rtol=1e-5 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_the_launches_do_not_grow_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, 10**6)
    counts = []
    for number in (10, 100):
        params = [nn.Parameter(torch.ones(4)) for _ in range(number)]
        optimizer = mechanize(torch.optim.SGD(params, lr=0.1, foreach=True), backend="foreach")
        for _ in range(4):
            for p in params:
                p.grad = torch.ones(4)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                optimizer.step()
        names = [event.name for event in profiler.events()]
        counts.append(sum(name in COUNTED for name in names))
    assert counts[0] == counts[1] < 20


def test_a_delta_whose_memory_was_swapped_is_read_where_it_is() -> None:
    """As tools do that move an optimizer's state away for a while and back."""
    ends = []
    for swaps in (False, True):
        params = [nn.Parameter(torch.full((4, 3), 2.0)), nn.Parameter(torch.ones(5))]
        optimizer = mechanize(torch.optim.AdamW(params, lr=0.1), backend="foreach")
        for step in range(12):
            for p in params:
                p.grad = p.detach() - 1
            optimizer.step()
            for p in params if swaps and step == 5 else []:
                delta = optimizer.state[p]["mechanic_delta"]
                old, delta.data = delta.data, delta.data.clone()
                old.fill_(7.0)
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(*ends)
