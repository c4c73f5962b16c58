"""The GPU kernels, run by Triton's interpreter on CPU tensors (started by tests/test_interpreted.py)."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mechanic_plugins import mechanize
from mechanic_plugins.core import tuner
from mechanic_plugins.core.param_state import DELTA, IndexRange, ParamState, needs_reference
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import column, initial_state
from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.kernels.foreach import ForeachBatch
from mechanic_plugins.kernels.triton_batch import TritonBatch
from mechanic_plugins.kernels.triton_support import kind_of
from mechanic_plugins.lion import Lion
from mechanic_plugins.passes import any_base

CPU = torch.device("cpu")
SHAPES = [(3, 5), (4097,), (0,), (), (17, 33), (2, 3, 4, 5)]
# The rounding of one product or sum, and how many of them meet in a random walk here.
EPS = {torch.float32: 6e-8, torch.bfloat16: 4e-3, torch.float64: 1.2e-16, torch.float16: 5e-4}


def make_slots(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[ParamState]:
    generator = torch.Generator().manual_seed(seed)
    param_states = []
    for index, shape in enumerate(shapes):
        x, g, d = (torch.randn(shape, generator=generator) for _ in range(3))
        ref = x.to(dtype) if needs_reference(dtype) else None
        delta = d if needs_reference(dtype) else d.to(dtype)
        param_states.append(ParamState(x.to(dtype), None if index == 1 else g.to(dtype), delta, ref))
    return param_states


def xs_of(param_states: list[ParamState]) -> list[torch.Tensor]:
    return [param_state.x for param_state in param_states]


def grads_of(param_states: list[ParamState]) -> list[torch.Tensor | None]:
    return [param_state.grad for param_state in param_states]


def pointed(rows: TritonBatch, param_states: list[ParamState]) -> TritonBatch:
    assert rows.refresh_pointers(xs_of(param_states), grads_of(param_states))
    return rows


def summed(rows: TritonBatch | ForeachBatch, param_states: list[ParamState], *, maximize: bool = False) -> torch.Tensor:
    out = torch.zeros(11, dtype=torch.float64)
    rows.add_sums(xs_of(param_states), grads_of(param_states), out, tuner_index=1, weight=0.5, maximize=maximize)
    assert not out[:5].any()
    return out[5:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_sums_equal_torchs(dtype: torch.dtype, maximize: bool) -> None:
    param_states = make_slots(SHAPES, dtype, 0)
    plain = summed(ForeachBatch(param_states), param_states, maximize=maximize)
    kernel = summed(pointed(TritonBatch(param_states), param_states), param_states, maximize=maximize)
    eps = EPS[torch.float64 if dtype == torch.float64 else torch.float32]
    assert ((plain - kernel).abs() <= 30 * eps * plain.abs().max()).all()
    assert plain[5] == kernel[5] == len(SHAPES) - 1


@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_sums_over_random_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    param_states = make_slots(shapes, torch.float32, seed)
    plain, kernel = (
        summed(ForeachBatch(param_states), param_states),
        summed(pointed(TritonBatch(param_states), param_states), param_states),
    )
    assert ((plain - kernel).abs() <= 30 * EPS[torch.float32] * plain.abs().max().clamp(min=1e-30)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_move_equals_torchs(dtype: torch.dtype, kept: float) -> None:
    """In two parts, each with its own snapshot; what the sums then take from the move is what they would read."""
    param_states = make_slots(SHAPES, dtype, 1)
    twins = copy.deepcopy(param_states)
    scales = torch.tensor([0.1, 0.13, 1.0, kept], dtype=torch.float64)
    plain, kernel = ForeachBatch(param_states), pointed(TritonBatch(twins), twins)
    parts = [IndexRange(0, 2), IndexRange(2, len(SHAPES))]
    kernel.begin_moves(parts)
    for rows, each in ((plain, param_states), (kernel, twins)):
        for part in parts:
            xs = xs_of(each)[part.first : part.last]
            snapshot = rows.snapshot(part, xs)
            for x in xs:
                x.add_(0.5)
            rows.move(part, xs, snapshot, scales)
        rows.finish_moves(xs_of(each))
    for param_state, twin in zip(param_states, twins, strict=True):
        # one rounding apart: the kernel multiplies and adds at once, and the interpreter cuts bf16 off where GPUs round
        tolerance = 4 * EPS[dtype] * (1 + param_state.x.double().abs())
        assert ((param_state.x.double() - twin.x.double()).abs() <= tolerance).all()
        assert param_state.delta is not None
        assert twin.delta is not None
        if kept == 1.0:
            assert torch.equal(param_state.delta, twin.delta)
        else:  # of low-precision weights, delta holds what ref was rounded by
            slack = (
                4 * EPS[dtype] * (1 + param_state.x.double().abs()) / 0.13 if param_state.ref is not None else tolerance
            )
            assert ((param_state.delta - twin.delta).abs() <= slack).all()
    left, read = summed(pointed(kernel, twins), twins), summed(pointed(TritonBatch(twins), twins), twins)
    assert ((left - read).abs() <= 30 * EPS[torch.float32] * read.abs().max()).all()


def test_the_snapshot_brings_the_weights_back() -> None:
    param_states = make_slots(SHAPES, torch.float32, 2)
    before = copy.deepcopy(xs_of(param_states))
    rows, part = pointed(TritonBatch(param_states), param_states), IndexRange(1, 5)
    snapshot = rows.snapshot(part, xs_of(param_states)[1:5])
    for x in xs_of(param_states):
        x.add_(1)
    rows.restore(part, xs_of(param_states)[1:5], snapshot)
    assert all(map(torch.equal, before[1:5], xs_of(param_states)[1:5]))
    assert torch.equal(before[0] + 1, param_states[0].x)


def test_norms_are_read_again_where_somebody_wrote_into_the_weights() -> None:
    param_states = make_slots([(4, 4)], torch.float32, 3)
    rows, part = pointed(TritonBatch(param_states), param_states), IndexRange(0, 1)
    rows.begin_moves([part])
    snapshot = rows.snapshot(part, xs_of(param_states))
    rows.move(part, xs_of(param_states), snapshot, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    rows.finish_moves(xs_of(param_states))
    param_states[0].x.mul_(2)
    assert summed(pointed(rows, param_states), param_states)[2].item() == pytest.approx(
        0.5 * param_states[0].x.double().square().sum().item()
    )


def test_tensors_of_odd_length_are_kept_apart() -> None:
    """One of them in a list would have the kernels read all of it element by element."""
    odd, even = make_slots([(3, 5), (4, 4)], torch.float32, 0)
    assert kind_of(odd) != kind_of(even)


@pytest.mark.parametrize("rule", ["optimistic", "paper", "experiments", "optax", "theory"])
@pytest.mark.parametrize(
    "options",
    [
        {"s_init": "auto", "first_move": 1e-2},
        {"smoothing": 0.9},
        {"max_scale": 1e-3},
        {"s_init": 1e-3},
        {"hindsight": 0.6},
        {"s_decay": 0.1},
        {"own_warmup": True, "hindsight": 0.6},
        {"own_warmup": True, "smoothing": 0.9, "s_init": 1e-3},
    ],
    ids=str,
)
def test_tuner_equals_torchs(rule: str, options: dict[str, Any]) -> None:
    tuners = 1 if options.get("s_init") == 1e-3 else 2  # one gets its lr as a number, two theirs as a tensor
    if rule == "theory" and options.keys() & {"smoothing", "hindsight"}:
        options = {"s_decay": 0.1}  # refused together
    chosen = Settings.from_preset(rule=rule, **options)  # type: ignore[arg-type]
    betas = torch.tensor(chosen.betas, dtype=torch.float64)
    constants = torch.tensor(gpu_tuner.constants_of(chosen), dtype=torch.float64)
    plain = kernel = initial_state(chosen, tuners=tuners, device=CPU)
    counted = counters = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        lrs: list[float | torch.Tensor] = [0.1 * min(step, 8) + row for row in range(tuners)]
        sums = torch.randn(tuners, 5, dtype=torch.float64, generator=generator)
        sums[:, [1, 2, 4]] = sums[:, [1, 2, 4]].abs()
        if step == 0:
            sums[:, [0, 3, 4]] = 0
        if step == 10:
            sums[-1, 1] = 1e12  # an outlier for one of the tuners
        vector = torch.cat([sums.flatten(), torch.ones(1, dtype=torch.float64)])
        if step == 6:
            vector[3] = float("nan")
        before, hold = plain.played, step == 9
        shared = {"settings": chosen, "betas": betas, "hold": hold}
        by_torch = tuner.decide(plain, vector, counted, lr=column(lrs, CPU), **shared)
        by_kernel, scales = gpu_tuner.decide(kernel, vector, counters, lrs=lrs, constants=constants, **shared)
        plain, counted, kernel, counters = by_torch.state, by_torch.counters, by_kernel.state, by_kernel.counters
        applied = by_torch.applied.double().expand_as(before)
        expected = torch.cat([before, plain.played, applied, by_torch.delta_factor, torch.ones_like(before)], dim=1)
        torch.testing.assert_close(scales, expected, rtol=1e-11, atol=0)
        is_skipped = step == 6 or (step == 10 and rule == "optimistic")
        assert bool(by_torch.applied) is not is_skipped
    for name, a, b in zip(plain._fields, plain, kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=0, msg=name)
    assert counted.tolist() == counters.tolist() == ([10, 2] if rule == "optimistic" else [11, 1])


BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "adam maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


def train(base: str, steps: int, dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Steps with gradients that depend on the weights, one parameter sometimes without.

    The targets swing: at rest, where the gradients are rounding errors, Adam would take whole steps along them.
    """
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(5, 7), (9,), ()]]
    targets = [torch.randn_like(p) for p in params]
    sign = -1 if "maximize" in base else 1
    warm_up = options.pop("warm_up", 1)
    optimizer = mechanize(BASES[base](params), **{"s_init": 1e-3, "s_decay": 0.01, **options})  # all five sums count
    lr = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warm_up)
        optimizer.zero_grad()
        swing = 0.5 * math.cos(step)
        loss = sum(((p - t - swing).float() ** 2).sum() for p, t in zip(params[: 2 + step % 2], targets, strict=False))
        (sign * loss).backward()  # type: ignore[attr-defined]
        if options.pop("poison", None) == step:
            params[0].grad[0, 0] = float("inf")  # type: ignore[index]
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer


@pytest.mark.parametrize("base", BASES)
def test_fused_equals_any_base(base: str) -> None:
    """Each step rounds once or twice in float32 and forgets most of it, as the problem is well conditioned."""
    steps = 200 if base == "adamw" else 30
    options = {"preset": "paper"} if base in ("adam", "lion") else {}
    plain, a = train(base, steps, torch.float32, backend="foreach", **options)
    fused, b = train(base, steps, torch.float32, backend="fused", **options)
    assert b._fused
    for x, y in zip(plain, fused, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0)
    for p, q in zip(a._params(), b._params(), strict=True):
        assert a.state[p].keys() - {"momentum_buffer"} <= b.state[q].keys()


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_warm_up_by_kernels_is_torchs(backend: str) -> None:
    plain, a = train("adamw", 30, torch.float32, backend="foreach", warm_up=20)
    kernel, b = train("adamw", 30, torch.float32, backend=backend, warm_up=20)
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-5, atol=0)
    for x, y in zip(plain, kernel, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()


@pytest.mark.parametrize(
    ("base", "dtype"), [("adamw", torch.float32), ("lion", torch.float64), ("sgd momentum", torch.float16)], ids=str
)
@pytest.mark.parametrize("snapshot_bytes", [any_base.SNAPSHOT_BYTES, 40], ids=["whole", "chunks"])
def test_any_base_by_kernels_equals_torchs(
    base: str, dtype: torch.dtype, snapshot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, a = train(base, 15, dtype, backend="foreach")
    monkeypatch.setattr(any_base, "SNAPSHOT_BYTES", snapshot_bytes)
    kernel, b = train(base, 15, dtype, backend="triton")
    assert not b._fused
    for x, y in zip(plain, kernel, strict=True):
        assert ((x - y).abs() <= 300 * EPS[dtype] * (1 + x.abs())).all()
    torch.testing.assert_close(a.scale, b.scale, rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=0)


class Replaces(torch.optim.SGD):
    """Puts new tensors in its parameters' place, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class Breaks(torch.optim.SGD):
    failing = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.failing:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("backend", ["foreach", "triton"])
def test_a_base_may_put_new_tensors_in_its_parameters_place(backend: Any) -> None:
    ends = []
    for kind in (torch.optim.SGD, Replaces):
        p = nn.Parameter(torch.arange(16.0))
        optimizer = mechanize(kind([p], lr=1.0), s_init=1e-3, backend=backend)
        for _ in range(10):
            p.grad = p.detach() - 3
            optimizer.step()
        ends.append(p.detach().clone())
    assert optimizer.scale.item() > 0
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_an_error_inside_the_base_brings_the_weights_back() -> None:
    params = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(8, 4))]
    base = Breaks(params, lr=0.1)
    optimizer = mechanize(base, s_init=1e-3, backend="triton")
    for _ in range(4):
        for p in params:
            p.grad = p.detach() - 1
        optimizer.step()
    before = copy.deepcopy((params, [optimizer.state[p][DELTA] for p in params], optimizer.tuner))
    base.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    after = params, [optimizer.state[p][DELTA] for p in params], optimizer.tuner
    for a, b in zip(before, after, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_the_launches_take_notice_of_what_changes_between_steps(backend: Any) -> None:
    """New gradients at other addresses, other dtypes, state that was loaded, a parameter that joins: as by torch's."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(5))]
        optimizer = mechanize(BASES["adamw"](params), s_init=1e-3, backend=way)
        saved: Any = None
        for step in range(16):
            for p in params[: 2 + (step > 9)]:
                p.grad = (p.detach() - 1).clone()
            if step == 5:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 7:
                optimizer.load_state_dict(saved)
            if step == 12:
                params[0].data = params[0].data.to(torch.bfloat16).float()
            optimizer.step()
        ends.append([p.detach() for p in params])
    for x, y in zip(*ends, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()


def test_no_gradient_is_kept_alive() -> None:
    """Memory that the next forward pass would lack."""
    for backend in ("foreach", "triton", "fused"):
        p = nn.Parameter(torch.randn(16))
        optimizer = mechanize(torch.optim.AdamW([p]), backend=backend)
        for _ in range(3):
            p.grad = torch.ones(16)
            held = weakref.ref(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert held() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_low_precision_weights_are_roundings(dtype: torch.dtype) -> None:
    _, optimizer = train("adamw", 12, dtype, backend="fused")
    played = (optimizer.scale * optimizer.param_groups[0]["lr"]).float()
    for state, p in ((optimizer.state[p], p) for p in optimizer._params()):
        exact = torch.addcmul(state["mechanic_ref"].float(), state["mechanic_delta"], played)
        assert ((exact.to(dtype) - p).abs().float() <= EPS[dtype] * 2 * p.abs().float()).all()


def test_paths_may_change_at_any_step() -> None:
    """The state is the same under either: half the steps each way end where one way ends."""
    whole, _ = train("adamw", 40, torch.float32, backend="foreach")
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (9,), ()]]
    targets = [torch.randn_like(p) for p in params]
    optimizers = [mechanize(BASES["adamw"](params), s_init=1e-3, s_decay=0.01, backend=b) for b in ("fused", "foreach")]
    for step in range(40):
        optimizer = optimizers[step % 2]
        if step:
            optimizer.load_state_dict(optimizers[1 - step % 2].state_dict())
        optimizer.zero_grad()
        swing = 0.5 * math.cos(step)
        sum(((p - t - swing) ** 2).sum() for p, t in zip(params[: 2 + step % 2], targets, strict=False)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for x, p in zip(whole, params, strict=True):
        torch.testing.assert_close(x, p.detach(), rtol=0, atol=300 * EPS[torch.float32])


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_step_that_is_not_finite_touches_nothing(backend: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = mechanize(torch.optim.AdamW(params, lr=1e-2), s_init=1e-3, backend=backend)
    for step in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        if step == 3:
            before = copy.deepcopy((params, optimizer.state_dict()["state"]))
            params[1].grad[2] = float("nan")  # type: ignore[index]
            with pytest.warns(UserWarning, match="not finite"):
                optimizer.step()
        else:
            optimizer.step()
    after = optimizer.state_dict()["state"]
    for p, q in zip(before[0], params, strict=True):
        assert torch.equal(p, q)
    for key, entries in before[1].items():
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[key][name])), name
    assert optimizer.metrics()["mechanic/skipped_steps"] == 1


def test_forced_fused_says_why_it_cannot() -> None:
    optimizer = mechanize(torch.optim.RMSprop([p := nn.Parameter(torch.ones(3))]), backend="fused")
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="backend='fused' cannot step RMSprop"):
        optimizer.step()


def test_state_of_another_shape_is_refused() -> None:
    """A kernel would write past the end of the moments."""
    p = nn.Parameter(torch.ones(6))
    optimizer = mechanize(torch.optim.AdamW([p]), backend="fused")
    for size in (6, 6, 9):
        p.data = torch.ones(size)
        p.grad = torch.ones(size)
        if size == 6:
            optimizer.step()
    with pytest.raises(ValueError, match="belongs to another parameter"):
        optimizer.step()


@pytest.mark.parametrize("how", ["in place", "checkpoint"])
@pytest.mark.parametrize("base", ["adamw", "lion"])
@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_weights_may_change_their_memory_format(backend: Any, base: str, how: str) -> None:
    """The kernels walked delta and moments in their old order beside weights in the new one."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4, 3, 2, 2))
        target = torch.randn(4, 3, 2, 2)
        optimizer = mechanize(BASES[base]([p]), s_init=1e-3, backend=way)
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            moved = p.detach().clone(memory_format=memory_format)
            if how == "in place":
                p.data = moved
            else:
                saved = copy.deepcopy(optimizer.state_dict())
                p = nn.Parameter(moved)
                optimizer = mechanize(BASES[base]([p]), s_init=1e-3, backend=way)
                optimizer.load_state_dict(saved)
            for step in range(4):
                p.grad = (p.detach() - target - 0.5 * math.cos(step)).clone(memory_format=memory_format)
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


class Own(torch.optim.AdamW):
    """A base that nobody knows."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Own, torch.optim.NAdam])
def test_twins_of_16_bit_weights_by_kernels_equal_torchs(kind: Any) -> None:
    """The base steps float32 copies that lie in one row; the kernel reads where it has taken them."""
    ends = []
    for backend in ("foreach", "triton"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in [(5, 7), (9,), ()]]
        optimizer = mechanize(kind(params, lr=1e-4), s_init=1.0, backend=backend)
        for step in range(8):
            for p in params[: 2 + step % 2]:
                p.grad = torch.randn(p.shape).bfloat16() + 1  # not the weights': their roundings would come back
            optimizer.step()
        ends.append([t for p in params for t in (p.detach(), *map(optimizer.state[p].get, ("exp_avg", DELTA)))])
    assert optimizer.scale.item() > 0
    for a, b in zip(*ends, strict=True):
        lost = 8 * 2 * EPS[torch.float32] if a.dtype == torch.float32 else 0  # of an update, read off weights up to 2
        torch.testing.assert_close(a, b, rtol=2 * EPS[a.dtype], atol=lost)


@pytest.mark.parametrize("backend", ["fused", "triton"])
@pytest.mark.parametrize("kind", ["not finite", "no gradient"])
@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_first_step_that_is_not_made_does_not_fix_the_unit(backend: str, kind: str) -> None:
    """The tuner's launch decides whether a step is made, when the lr unit had been fixed already."""
    ends = []
    for has_one in (False, True):
        p = nn.Parameter(torch.ones(4))
        optimizer = mechanize(torch.optim.SGD([p], lr=0.01), preset="paper", s_init=1e-3, backend=backend)
        if has_one:
            p.grad = torch.full((4,), math.nan) if kind == "not finite" else None
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1.0
        for _ in range(5):
            p.grad = p.detach().clone()
            optimizer.step()
        ends.append((optimizer.scale.item(), p.tolist()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_nothing_moves_at_an_lr_of_zero_and_frozen_parameters_never(backend: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = mechanize(torch.optim.AdamW(params, lr=0.1), backend=backend)
    seen = []
    for step in range(12):
        params[0].requires_grad_(step < 4)
        optimizer.param_groups[0]["lr"] = 0.0 if step in (7, 8) else 0.1
        for p in params:
            p.grad = p.detach().clone() if p.requires_grad else None
        optimizer.step()
        seen.append((params[0].tolist(), params[1].tolist(), optimizer.scale.item()))
    assert all(frozen == seen[3][0] for frozen, _, _ in seen[3:])
    assert seen[8][1:] == seen[7][1:] == seen[6][1:]
    moving = [x for _, x, _ in seen[:7] + seen[9:]]
    assert all(a != b for a, b in itertools.pairwise(moving[1:]))
