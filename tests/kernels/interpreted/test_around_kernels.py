"""What kernels must notice between steps, and what they must leave alone."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import BASES, RULES, TOLD, train, watch_launches
from kernel_tensors import EPS
from torch import nn

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.kernels import gpu_tuner, triton_batch
from mechanic_plugins.weights.slots import DELTA, REF

WAYS = [("fused", "adamw"), ("triton", "adamw"), ("triton", "told adamw")]
MAIN = {"default": REF, "paper": DELTA}


class Replaces(torch.optim.SGD):
    """Replaces its parameters' tensors, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["foreach", "triton"])
def test_a_base_may_put_new_tensors_in_its_parameters_place(backend: Any, rule: str) -> None:
    ends = []
    for kind in (torch.optim.SGD, Replaces):
        p = nn.Parameter(torch.arange(16.0))
        optimizer = mechanize(kind([p], lr=1.0), backend=backend, **RULES[rule])
        for _ in range(10):
            p.grad = p.detach() - 3
            optimizer.step()
        ends.append(p.detach().clone())
    assert optimizer.scale.item() > 0
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("told", [False, True])
def test_an_error_inside_the_base_changes_nothing_of_mechanics(told: bool, rule: str) -> None:
    params = [
        nn.Parameter(torch.randn(3, 5)),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    ]
    base = torch.optim.SGD(params, lr=0.1, fused=told or None)
    optimizer = mechanize(base, backend="triton", **RULES[rule])
    plain = base.step
    for _ in range(4):
        for p in params:
            p.grad = p.detach() - 1
        optimizer.step()
    kept = [p.detach() for p in params] if rule == "paper" else []  # else the base has moved them where they stand
    kept += [optimizer.state[p][MAIN[rule]] for p in params]
    before = copy.deepcopy((kept, optimizer.tuner))

    def step(*given: Any) -> None:
        plain(*given)
        raise RuntimeError("out of memory")

    base.step = step  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    for a, b in zip(before, (kept, optimizer.tuner), strict=True):
        assert all(map(torch.equal, a, b))


def swap_memory(optimizer: torch.optim.Optimizer) -> None:
    """Acts like tools that move an optimizer's state away and back."""
    for entries in optimizer.state.values():
        for tensor in entries.values():
            old, tensor.data = tensor.data, tensor.data.clone()
            old.fill_(7.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "base"), WAYS)
def test_the_launches_take_notice_of_what_changes_between_steps(backend: Any, base: str, rule: str) -> None:
    """Gradients move or change dtype, state is loaded, swapped or dropped, and a parameter joins."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(5))]
        optimizer = mechanize((BASES | TOLD)[base](params), backend=way, **RULES[rule])
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
    backends: Any = ("foreach", "triton", "fused")
    for backend, rule in itertools.product(backends, RULES):
        p = nn.Parameter(torch.randn(16))
        optimizer = mechanize(torch.optim.AdamW([p], fused=True), backend=backend, **RULES[rule])
        for _ in range(3):
            p.grad = torch.ones(16)
            held = weakref.ref(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert held() is None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "base"), WAYS)
def test_a_step_that_is_not_finite_touches_nothing(backend: Any, base: str, rule: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = mechanize((BASES | TOLD)[base](params), backend=backend, **RULES[rule])
    for step in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        if step == 3:
            before = copy.deepcopy((params, optimizer.state_dict()["state"]))
            params[1].grad[2] = float("nan")  # type: ignore[index]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, and that the step was skipped
            optimizer.step()
            skipped = optimizer.metrics()["mechanic/skipped_steps"]
    assert skipped == 1
    after = optimizer.state_dict()["state"]
    for p, q in zip(before[0], params, strict=True):
        assert torch.equal(p, q)
    for key, entries in before[1].items():
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[key][name])), name


@pytest.mark.parametrize("rule", RULES)
def test_forced_fused_says_why_it_cannot(rule: str) -> None:
    optimizer = mechanize(torch.optim.RMSprop([p := nn.Parameter(torch.ones(3))]), backend="fused", **RULES[rule])
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="backend='fused' cannot step RMSprop"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_state_of_another_shape_is_refused(rule: str) -> None:
    """A kernel would otherwise write past the end of the moments."""
    p = nn.Parameter(torch.ones(6))
    optimizer = mechanize(torch.optim.AdamW([p]), backend="fused", **RULES[rule])
    for size in (6, 6, 9):
        p.data = torch.ones(size)
        p.grad = torch.ones(size)
        if size == 6:
            optimizer.step()
    with pytest.raises(ValueError, match="belongs to another parameter"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("backend", "base", "how"),
    [
        ("triton", "told adamw", "in place"),
        ("fused", "adamw", "in place"),
        ("fused", "lion", "checkpoint"),
        ("triton", "adamw", "checkpoint"),
        ("triton", "lion", "in place"),
    ],
)
def test_weights_may_change_their_memory_format(backend: Any, base: str, how: str, rule: str) -> None:
    """The kernels used to read delta and moments in the old order beside weights in the new one."""
    ends = []
    for way in ("foreach", backend):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4, 3, 2, 2))
        target = torch.randn(4, 3, 2, 2)
        optimizer = mechanize((BASES | TOLD)[base]([p]), backend=way, **RULES[rule])
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            moved = p.detach().clone(memory_format=memory_format)
            if how == "in place":
                p.data = moved
            else:
                saved = copy.deepcopy(optimizer.state_dict())
                p = nn.Parameter(moved)
                optimizer = mechanize((BASES | TOLD)[base]([p]), backend=way, **RULES[rule])
                optimizer.load_state_dict(saved)
            for step in range(4):
                p.grad = (p.detach() - target - 0.5 * math.cos(step)).clone(memory_format=memory_format)
                optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "base"), WAYS)
def test_nothing_moves_at_an_lr_of_zero_and_frozen_parameters_never(backend: Any, base: str, rule: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = mechanize((BASES | TOLD)[base](params), backend=backend, **RULES[rule])
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


@pytest.mark.parametrize(("backend", "base"), [("fused", "adamw"), ("triton", "told adamw")])
def test_a_captured_step_is_not_measured_and_its_numbers_follow_the_others(
    backend: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring waits for the device, which a capture forbids. Replays must go on from what the host has decided."""
    p = nn.Parameter(torch.randn(4, 8))
    optimizer = mechanize((BASES | TOLD)[base]([p]), backend=backend)
    for step in range(8):
        if step == 5:
            assert optimizer.is_step_measured
        for module in ("optimizer.step", "kernels.gpu_tuner"):
            monkeypatch.setattr(f"mechanic_plugins.{module}.is_capturing", lambda device, step=step: step == 5)
        if step == 5:
            assert not optimizer.is_step_measured
        if step == 7:
            monkeypatch.setattr("mechanic_plugins.optimizer.step.is_due", lambda step: True)
            assert optimizer.is_step_measured
        p.grad = p.detach() - 0.5 * math.cos(step)
        optimizer.step()
        if step == 5:
            captured = optimizer._learned.captured
            assert captured is not None
    [tuner] = optimizer._learned.tuners
    assert captured.tolist() == tuner.numbers()
    assert tuner.steps == 8
    assert tuner.measured > 6 / 20 + 1  # the full steps so far, of which the last was measured
    p.grad = p.detach() - 1
    optimizer.step()
    assert captured[type(tuner).floats().index("steps")] == 9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "base"), [("fused", "adamw"), ("triton", "told adamw")])
def test_every_launch_is_made_on_its_tensors_device(
    backend: Any, base: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current GPU, which after `model.to("cuda:1")` is not that of the tensors."""
    current, launches = list[torch.device](), list[torch.device]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    for module in (triton_batch, gpu_tuner):
        monkeypatch.setattr(module, "on", on)
    watch_launches(monkeypatch, lambda name: launches.append(current[-1]))
    train(base, 6, torch.float32, backend=backend, late=False, **RULES[rule])
    assert len(launches) > 6
    assert set(launches) == {torch.device("cpu")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "base"), WAYS)
def test_each_group_may_have_its_own_scale(backend: Any, base: str, rule: str) -> None:
    ends = []
    settings = replace(RULES[rule].get("settings", Settings()), scope="group")
    for way in ("foreach", backend):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(16))]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (1e-2, 2e-2), strict=True)]
        optimizer = mechanize((BASES | TOLD)[base](groups), backend=way, settings=settings)
        for step in range(10):
            for index, p in enumerate(params):
                p.grad = (1 + index) * (p.detach() - 0.5 * math.cos(step))
            optimizer.step()
        ends.append((torch.cat([p.detach().flatten() for p in params]), optimizer.scales))
    assert ends[0][1][0] != ends[0][1][1]
    torch.testing.assert_close(ends[0], ends[1], rtol=2e-5, atol=2e-6, check_dtype=False)
