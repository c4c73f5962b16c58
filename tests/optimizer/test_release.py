"""`freeze(release=True)` keeps the learned learning rate and frees the memory used to learn it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize
from mechanic_plugins.distributed.sharding import shares_of
from mechanic_plugins.lion import Lion

pytestmark = pytest.mark.slow

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "Lion": lambda params: Lion(params, lr=1e-2, weight_decay=0.1),
}


class Run:
    """A network that learns a fixed one, with two param groups and a decaying schedule."""

    def __init__(self, base: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        groups = [{"params": list(self.net[0].parameters())}, {"params": list(self.net[2].parameters())}]
        self.optimizer = mechanize(BASES[base](groups), **options)

    def train(self, first: int, last: int, *, factor: float = 1.0) -> Run:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(self.net[0].weight.dtype)
            self.optimizer.zero_grad()
            (factor * nn.functional.mse_loss(self.net(x), x[:, :2].sin())).backward()
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / 100)
            self.optimizer.step()
        return self

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in self.net.parameters()])

    def own_names(self) -> set[str]:
        return {name for state in self.optimizer.state.values() for name in state if name.startswith("mechanic")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scope": "group"}, {"max_grad_norm": 0.05}, {"backend": "foreach"}], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_it_goes_on_as_a_frozen_run_does(base: str, options: dict[str, Any]) -> None:
    frozen, released = Run(base, **options).train(0, 30), Run(base, **options).train(0, 30)
    frozen.optimizer.freeze()
    released.optimizer.freeze(release=True)
    assert (frozen.own_names(), released.own_names()) == ({"mechanic_ref"}, set())
    ends = [run.train(30, 60) for run in (frozen, released)]
    assert ends[1].own_names() == set()
    torch.testing.assert_close(ends[0].weights, ends[1].weights, rtol=1e-11, atol=1e-13)
    theirs, ours = (run.optimizer.metrics() for run in ends)
    del theirs["mechanic/moved"]  # the released one no longer has its start
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert ours["mechanic/steps"] == 60


def test_it_is_the_base_at_the_learned_lr() -> None:
    run = Run("AdamW").train(0, 30)
    run.optimizer.freeze(release=True)
    net, scale = copy.deepcopy(run.net), run.optimizer.scale.item()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2 * scale * (1 - 30 / 100), weight_decay=0.1)
    for p, twin in zip(run.net.parameters(), net.parameters(), strict=True):
        plain.state[twin] = copy.deepcopy(dict(run.optimizer.state[p]))
    run.train(30, 31)
    for p, twin in zip(run.net.parameters(), net.parameters(), strict=True):
        twin.grad = p.grad
    plain.step()
    torch.testing.assert_close(run.weights, nn.utils.parameters_to_vector(net.parameters()), rtol=1e-14, atol=0)


def test_unfreezing_begins_there() -> None:
    run = Run("AdamW").train(0, 30)
    run.optimizer.freeze(release=True)
    run.train(30, 40)
    before, scale = run.weights, run.optimizer.scale.item()
    run.optimizer.unfreeze()
    run.train(40, 41)
    assert run.own_names() == {"mechanic_ref"}
    refs = torch.cat([run.optimizer.state[p]["mechanic_ref"].flatten() for p in run.net.parameters()])
    assert torch.equal(before, refs)
    assert run.optimizer.scale.item() == pytest.approx(scale, rel=0.1)
    run.train(41, 60)
    assert run.optimizer.scale.item() != scale


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_goes_on_exactly(base: str, copied: str) -> None:
    run = Run(base).train(0, 30)
    run.optimizer.freeze(release=True)
    run.train(30, 40)
    twin = Run(base)
    if copied == "state dict":
        saved = pickle.loads(pickle.dumps((run.net.state_dict(), run.optimizer.state_dict())))
        twin.net.load_state_dict(saved[0])
        twin.optimizer.load_state_dict(saved[1])
    else:
        both = run.net, run.optimizer
        twin.net, twin.optimizer = copy.deepcopy(both) if copied == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert torch.equal(run.train(40, 50).weights, twin.train(40, 50).weights)
    assert twin.own_names() == set()


def test_a_gradient_that_is_not_finite_is_skipped_and_the_norm_is_known() -> None:
    run = Run("AdamW").train(0, 30)
    run.optimizer.freeze(release=True)
    before = run.weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train(30, 31, factor=float("inf"))
    assert torch.equal(before, run.weights)
    run.train(31, 32)
    norm = torch.cat([p.grad.flatten() for p in run.net.parameters()]).norm()
    torch.testing.assert_close(run.optimizer.grad_norm, norm)
    assert run.optimizer.metrics()["mechanic/skipped_steps"] == 1


def test_16_bit_weights_are_stepped_as_the_base_alone_does() -> None:
    run = Run("AdamW", dtype=torch.bfloat16).train(0, 30)
    assert run.own_names() == {"mechanic_master", "mechanic_ref"}
    run.optimizer.freeze(release=True)
    before = run.weights
    run.train(30, 60)
    assert run.own_names() == set()
    assert not torch.equal(before, run.weights)
    assert run.optimizer.metrics()["mechanic/skipped_steps"] == 0


def test_a_plain_checkpoint_and_demechanize_see_the_base_alone() -> None:
    run = Run("AdamW").train(0, 30)
    run.optimizer.freeze(release=True)
    learned = run.optimizer.learned_lrs
    base = demechanize(run.optimizer)
    assert type(base) is torch.optim.AdamW
    assert [group["lr"] for group in base.param_groups] == pytest.approx(learned)


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.Adafactor])
def test_a_base_that_does_not_scale_with_its_lr_is_refused_untouched(kind: type[torch.optim.Optimizer]) -> None:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer: MechanicOptimizer = mechanize(kind([p]))
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    with pytest.raises(ValueError, match=f"updates of {kind.__name__} are not known to be proportional"):
        optimizer.freeze(release=True)
    assert "mechanic_ref" in optimizer.state[p]
    optimizer.step()


def test_an_engine_that_holds_views_of_the_state_is_not_robbed_of_it() -> None:
    """DeepSpeed's engines set `shares_by_engine` when they take over an optimizer."""
    run = Run("AdamW").train(0, 5)
    run.optimizer.shares_by_engine = shares_of
    with pytest.raises(ValueError, match="cannot give memory back under DeepSpeed"):
        run.optimizer.freeze(release=True)
    assert run.own_names() == {"mechanic_ref"}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_scale_of_zero_is_not_held(steps: int) -> None:
    run = Run("AdamW").train(0, steps)
    with pytest.raises(RuntimeError, match=r"no scale was learned yet. Call it after the first three steps"):
        run.optimizer.freeze()
    run.train(steps, 5)
    assert run.optimizer.scale > 0


def test_a_new_optimizer_is_released_to_load_but_not_to_train() -> None:
    """torch.distributed.checkpoint loads only keys that the new one has, so it must have no references."""
    run = Run("AdamW")
    run.optimizer.freeze(release=True)
    with pytest.raises(RuntimeError, match="no scale was learned yet"):
        run.train(0, 1)
    run = Run("AdamW").train(0, 1)
    with pytest.raises(RuntimeError, match="no scale was learned yet"):
        run.optimizer.freeze(release=True)
