"""The sums by torch operations, with small tensors joined into rows and large ones cut into rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import mechanize
from mechanic_plugins.weights import dots
from mechanic_plugins.weights.dots import Dots, runs_of

SHAPES = [(3, 5), (), (40,), (0, 2), (7, 2, 3, 3), (11,)]
CPU = torch.device("cpu")


def tensors(dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    found[4] = found[4].to(memory_format=torch.channels_last)
    return found


def flat(some: list[Tensor]) -> Tensor:
    return torch.cat([t.double().flatten() for t in some])


@pytest.mark.parametrize("row", [25, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_difference", [True, False])
def test_sums_by_rows(dtype: torch.dtype, row: int, is_difference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dots._ROW, "cpu", row)
    xs, refs, grads = (tensors(dtype, seed) for seed in range(3))
    x, g = flat(xs), flat(grads)
    d = x - flat(refs) if is_difference else flat(refs)
    found = Dots([t.numel() for t in xs], CPU).of(
        xs, refs, grads, is_difference=is_difference, with_dx=True, with_xx=True
    )
    expected = [float(a @ b) for a, b in ((d, g), (g, g), (d, d), (d, x), (x, x))]
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_is_not_there_is_zero() -> None:
    xs, grads = tensors(torch.float32, 0), tensors(torch.float32, 1)
    sizes = Dots([t.numel() for t in xs], CPU)
    dg, gg, dd, dx, xx = sizes.of(xs, None, grads)
    assert gg > 0 == dg == dd == dx == xx
    dg, gg, dd, dx, xx = sizes.of(xs, grads, [torch.zeros_like(x) for x in xs], with_dx=True)
    assert dd > 0 == dg == gg == xx
    assert dx != 0


def test_squares_that_overflow_float32_are_summed_in_float64() -> None:
    x = torch.full((4,), 3e19)
    assert Dots([4], CPU).of([x], [torch.zeros(4)], [x])[:3] == pytest.approx([3.6e39] * 3, rel=1e-6)


def test_squares_that_are_0_in_float32_are_summed_in_float64() -> None:
    """A run with such gradients learned nothing, and nothing said so."""
    g = torch.full((4,), 1e-25)
    assert Dots([4], CPU).of([g], [torch.ones(4)], [g])[:2] == pytest.approx([-4e-25, 4e-50], rel=1e-6, abs=0)


def test_long_sums_keep_their_digits() -> None:
    x = torch.randn(10_000_001, generator=torch.Generator().manual_seed(0))
    (gg,) = Dots([x.numel()], CPU).of([x], None, [x])[1:2]
    assert gg == pytest.approx(x.double().square().sum().item(), rel=1e-6)


def test_runs() -> None:
    assert [(run.start, run.stop) for run in runs_of([3, 4, 9, 1, 1], 8)] == [(0, 2), (2, 3), (3, 5)]
    assert not list(runs_of([], 8))


def test_the_operations_do_not_grow_with_the_tensors() -> None:
    counts = []
    for number in (10, 100):
        params = [nn.Parameter(torch.ones(4)) for _ in range(number)]
        optimizer = mechanize(torch.optim.SGD(params, lr=0.1, foreach=True))
        for p in params:
            p.grad = torch.ones(4)
        for _ in range(12):
            optimizer.step()
        assert not optimizer.is_step_measured
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            optimizer.step()
        counts.append(sum(event.name in ("aten::dot", "aten::cat", "aten::sub") for event in profiler.events()))
    assert counts[0] == counts[1] < 20


def test_a_reference_whose_memory_was_swapped_is_read_where_it_is() -> None:
    """Some tools move an optimizer's state away and back."""
    ends = []
    for swaps in (False, True):
        params = [nn.Parameter(torch.full((4, 3), 2.0)), nn.Parameter(torch.ones(5))]
        optimizer = mechanize(torch.optim.AdamW(params, lr=0.1))
        for step in range(12):
            for p in params:
                p.grad = p.detach() - 1
            optimizer.step()
            for p in params if swaps and step == 5 else []:
                ref = optimizer.state[p]["mechanic_ref"]
                old, ref.data = ref.data, ref.data.clone()
                old.fill_(7.0)
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(*ends)
