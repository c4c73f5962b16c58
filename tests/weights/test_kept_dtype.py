"""`kept_dtype=torch.bfloat16` keeps the weights at the start in two bytes each."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.lion import Lion

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "Lion": lambda params: Lion(params, lr=1e-2),
}
BF16 = {"kept_dtype": torch.bfloat16}


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def train(net: nn.Sequential, optimizer: MechanicOptimizer, first: int, last: int) -> Tensor:
    for step in range(first, last):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step)).to(net[0].weight.dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), x[:, :2].sin()).backward()
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / 200)
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def loss_of(net: nn.Sequential) -> float:
    x = torch.randn(512, 6, generator=torch.Generator().manual_seed(-1)).to(net[0].weight.dtype)
    return nn.functional.mse_loss(net(x), x[:, :2].sin()).item()


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
@pytest.mark.parametrize(("base", "backend"), [*((base, "auto") for base in BASES), ("AdamW", "foreach")])
def test_it_trains_as_well_in_two_bytes(base: str, backend: Any) -> None:
    """This includes Lion, whose steps of fixed length are sensitive to the scale."""
    losses, scales = [0.0, 0.0], [0.0, 0.0]
    for seed, (place, options) in itertools.product(range(4), enumerate(({}, BF16))):
        net = network(seed=seed)
        optimizer = mechanize(BASES[base](net.parameters()), backend=backend, **options)
        train(net, optimizer, 0, 120)
        losses[place] += loss_of(net)
        scales[place] += optimizer.scale.item()
        kinds = {state["mechanic_ref"].dtype for state in optimizer.state.values()}
        assert kinds == {options.get("kept_dtype", torch.float32)}
    assert scales[1] == pytest.approx(scales[0], rel=0.02)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_the_first_steps_are_as_long_in_two_bytes() -> None:
    """The weights have moved by less than the rounding of where they started: it is in the evidence alone."""
    scales: dict[str, list[float]] = {}
    for name, options in (("four", {}), ("two", BF16)):
        net = network()
        optimizer = mechanize(BASES["AdamW"](net.parameters()), **options)
        scales[name] = []
        for step in range(100):
            x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), x[:, :2].sin()).backward()
            optimizer.step()
            scales[name].append(optimizer.scale.item())
    assert scales["two"][:9] == pytest.approx(scales["four"][:9], rel=0.02)
    assert scales["two"] == pytest.approx(scales["four"], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_dtypes_have_it_too(dtype: torch.dtype) -> None:
    """References of 16-bit weights keep the weights' dtype, which is as short, and exact."""
    net = network(dtype)
    optimizer = mechanize(BASES["SGD"](net.parameters()), **BF16)
    before = loss_of(net)
    start = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, 0, 100)
    assert loss_of(net) < 0.5 * before
    for p, x in zip(net.parameters(), start, strict=True):
        ref = optimizer.state[p]["mechanic_ref"]
        assert ref.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
        assert torch.equal(ref, x.to(ref.dtype))


def test_complex_weights_keep_theirs() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = mechanize(torch.optim.SGD([p], lr=0.1), **BF16)
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["mechanic_ref"].dtype == torch.complex64


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("base", BASES)
def test_a_resumed_run_is_the_same_to_the_last_bit(base: str, copied: str) -> None:
    net = network()
    optimizer = mechanize(BASES[base](net.parameters()), **BF16)
    train(net, optimizer, 0, 15)
    if copied == "state dict":
        saved = pickle.loads(pickle.dumps((net.state_dict(), optimizer.state_dict())))
        twin = network()
        other = mechanize(BASES[base](twin.parameters()), **BF16)
        twin.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
    else:
        both = net, optimizer
        twin, other = copy.deepcopy(both) if copied == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert torch.equal(train(net, optimizer, 15, 30), train(twin, other, 15, 30))
    assert {state["mechanic_ref"].dtype for state in other.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("wanted", [torch.bfloat16, None])
def test_a_checkpoint_may_be_loaded_into_the_other_dtype(wanted: torch.dtype | None) -> None:
    net = network()
    optimizer = mechanize(BASES["AdamW"](net.parameters()), kept_dtype=None if wanted else torch.bfloat16)
    train(net, optimizer, 0, 20)
    refs = [optimizer.state[p]["mechanic_ref"].to(wanted or torch.float32) for p in net.parameters()]
    twin = network()
    other = mechanize(BASES["AdamW"](twin.parameters()), kept_dtype=wanted)
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(other.state[p]["mechanic_ref"], r) for p, r in zip(twin.parameters(), refs, strict=True))
    train(twin, other, 20, 40)


# ------------------------------------------------------------------------------------------------ the option


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_configs_name_it(name: str) -> None:
    assert mechanize(BASES["SGD"](network().parameters()), kept_dtype=name).kept_dtype == torch.bfloat16
    assert mechanize(torch.optim.SGD, kept_dtype=name)(network().parameters()).kept_dtype == torch.bfloat16


@pytest.mark.parametrize("value", ["float8", torch.float16, 2])
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"kept_dtype must be None, torch.float32 or torch.bfloat16, got"):
        mechanize(BASES["SGD"](network().parameters()), kept_dtype=value)
