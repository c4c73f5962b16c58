"""What kernels must notice between steps, and what they must leave alone."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kernel_cases import BASES, EPS, train
from torch import nn

from mechanic_plugins import mechanize
from mechanic_plugins.core.param_state import REF
from mechanic_plugins.kernels import gpu_tuner, triton_batch, triton_fused, triton_passes, triton_tuner
from mechanic_plugins.passes import fused


class Replaces(torch.optim.SGD):
    """Replaces its parameters' tensors, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("backend", ["foreach", "triton"])
def test_a_base_may_put_new_tensors_in_its_parameters_place(backend: Any) -> None:
    ends = []
    for kind in (torch.optim.SGD, Replaces):
        p = nn.Parameter(torch.arange(16.0))
        optimizer = mechanize(kind([p], lr=1.0), backend=backend)
        for _ in range(10):
            p.grad = p.detach() - 3
            optimizer.step()
        ends.append(p.detach().clone())
    assert optimizer.scale.item() > 0
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


class Breaks(torch.optim.SGD):
    failing = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.failing:
            raise RuntimeError("out of memory")


def test_an_error_inside_the_base_leaves_tuner_and_references() -> None:
    params = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(8, 4))]
    base = Breaks(params, lr=0.1)
    optimizer = mechanize(base, backend="triton")
    for _ in range(4):
        for p in params:
            p.grad = p.detach() - 1
        optimizer.step()
    before = copy.deepcopy(([optimizer.state[p][REF] for p in params], optimizer.tuner))
    base.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    after = [optimizer.state[p][REF] for p in params], optimizer.tuner
    for a, b in zip(before, after, strict=True):
        assert all(map(torch.equal, a, b))


def swap_memory(optimizer: torch.optim.Optimizer) -> None:
    """Acts like tools that move an optimizer's state away and back."""
    for entries in optimizer.state.values():
        for tensor in entries.values():
            old, tensor.data = tensor.data, tensor.data.clone()
            old.fill_(7.0)


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_the_launches_take_notice_of_what_changes_between_steps(backend: Any) -> None:
    """Gradients move or change dtype, state is loaded, swapped or dropped, and a parameter joins."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(5))]
        optimizer = mechanize(BASES["adamw"](params), backend=way)
        saved: Any = None
        for step in range(17):
            for p in params[: 2 + (step > 9)]:
                p.grad = (p.detach() - 1).clone()
            if step == 5:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 7:
                optimizer.load_state_dict(saved)
            if step == 12:
                params[0].data = params[0].data.to(torch.bfloat16).float()
            if step == 14:
                swap_memory(optimizer)
            if step == 15:
                del optimizer.state[params[1]]
            optimizer.step()
        ends.append([p.detach() for p in params])
    for x, y in zip(*ends, strict=True):
        assert ((x - y).abs() <= 300 * EPS[torch.float32] * (1 + x.abs())).all()


def test_no_gradient_is_kept_alive() -> None:
    """The next forward pass needs their memory."""
    for backend in ("foreach", "triton", "fused"):
        p = nn.Parameter(torch.randn(16))
        optimizer = mechanize(torch.optim.AdamW([p]), backend=backend)
        for _ in range(3):
            p.grad = torch.ones(16)
            held = weakref.ref(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert held() is None


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_step_that_is_not_finite_touches_nothing(backend: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = mechanize(torch.optim.AdamW(params, lr=1e-2), backend=backend)
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
    """A kernel would otherwise write past the end of the moments."""
    p = nn.Parameter(torch.ones(6))
    optimizer = mechanize(torch.optim.AdamW([p]), backend="fused")
    for size in (6, 6, 9):
        p.data = torch.ones(size)
        p.grad = torch.ones(size)
        if size == 6:
            optimizer.step()
    with pytest.raises(ValueError, match="belongs to another parameter"):
        optimizer.step()


@pytest.mark.parametrize(
    ("backend", "base", "how"),
    [
        ("fused", "adamw", "in place"),
        ("fused", "lion", "checkpoint"),
        ("triton", "adamw", "checkpoint"),
        ("triton", "lion", "in place"),
    ],
)
def test_weights_may_change_their_memory_format(backend: Any, base: str, how: str) -> None:
    """The kernels used to read delta and moments in the old order beside weights in the new one."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4, 3, 2, 2))
        target = torch.randn(4, 3, 2, 2)
        optimizer = mechanize(BASES[base]([p]), backend=way)
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            moved = p.detach().clone(memory_format=memory_format)
            if how == "in place":
                p.data = moved
            else:
                saved = copy.deepcopy(optimizer.state_dict())
                p = nn.Parameter(moved)
                optimizer = mechanize(BASES[base]([p]), backend=way)
                optimizer.load_state_dict(saved)
            for step in range(4):
                p.grad = (p.detach() - target - 0.5 * math.cos(step)).clone(memory_format=memory_format)
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


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


class Launched:
    """Wraps a kernel and calls `check` at every launch."""

    def __init__(self, kernel: Any, check: Callable[[], None]) -> None:
        self.kernel, self.check = kernel, check

    def __getitem__(self, grid: Any) -> Any:
        self.check()
        return self.kernel[grid]


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_every_launch_is_made_on_its_tensors_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, which after `model.to("cuda:1")` is not that of the tensors."""
    current, launches = list[torch.device](), list[torch.device]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    for module in (triton_batch, gpu_tuner, fused):
        monkeypatch.setattr(module, "on", on)
    for module in (triton_passes, triton_fused, triton_tuner):
        for name in dir(module):
            if name.endswith("_kernel"):
                kernel = Launched(getattr(module, name), lambda: launches.append(current[-1]))
                monkeypatch.setattr(module, name, kernel)
    train("adamw", 10, torch.float32, backend=backend)
    assert len(launches) > 10
    assert set(launches) == {torch.device("cpu")}


@pytest.mark.parametrize("base", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"scope": "group"}], ids=str)
def test_a_fused_base_of_torchs_is_told_on_the_device(base: str, options: dict[str, Any]) -> None:
    """Learning rate, clipping factor and the skip decision are then passed to it as tensors."""
    ends, more = [], {"momentum": 0.9} if base == "SGD" else {}
    for backend in ("foreach", "triton"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16))]
        groups = [{"params": [p]} for p in params]
        optimizer = mechanize(
            getattr(torch.optim, base)(groups, lr=0.1, fused=True, **more), backend=backend, **options
        )
        for step in range(12):
            for p in params:
                p.grad = p.detach() - 0.5 * math.cos(step)
            if step == 8:
                params[0].grad[0, 0] = math.inf  # type: ignore[index]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        assert any(plan.decides_on_device() for plan in optimizer._planner._plans.values()) == (backend == "triton")
        assert optimizer.metrics()["mechanic/skipped_steps"] == 1
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
