"""What Mechanic knows about the optimizers it wraps, and which of them it refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import Factored, Overriding
from optimizers import Lion as TextbookLion
from problems import descend, differences
from torch import Tensor, nn

from mechanic_plugins import demechanize, mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.weights import facts

ADAMW = torch.optim.AdamW
Build = Callable[[Any], torch.optim.Optimizer]


UNFIT = [
    (lambda p: torch.optim.LBFGS([p]), "line search .* Use torch.optim.Adam, or LBFGS alone"),
    (lambda p: torch.optim.SparseAdam([p]), "every weight in every step. Use sparse=False"),
    (lambda p: ADAMW([p], differentiable=True), "outside autograd. Build the base with differentiable=False"),
    (lambda p: mechanize(ADAMW([p])), "mechanized already"),
]


@pytest.mark.parametrize(("build", "message"), UNFIT, ids=["LBFGS", "SparseAdam", "differentiable", "twice"])
def test_bases_that_cannot_be_scaled_are_refused(build: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mechanize(build(torch.zeros(2, requires_grad=True)))


WITH_WEIGHT_DECAY = [
    getattr(torch.optim, name)
    for name in [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adadelta",
        "RMSprop",
        "Adagrad",
        "Adafactor",
        "ASGD",
        "Muon",
    ]
    if hasattr(torch.optim, name)
]


DECOUPLED = {"decoupled_weight_decay": True}
CAN_DECOUPLE = [kind for kind in WITH_WEIGHT_DECAY if "decoupled_weight_decay" in inspect.signature(kind).parameters]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in (*WITH_WEIGHT_DECAY, Lion)), *((kind, DECOUPLED) for kind in CAN_DECOUPLE)],
    ids=str,
)
def test_weight_decay_that_is_added_to_the_gradient(kind: Any, options: dict[str, Any]) -> None:
    """Adding the decay to the gradient by hand then gives the same weights. RAdam normalises from its sixth step on."""
    start, gradient, decay = torch.eye(3).double() + 0.5, torch.linspace(-1, 1, 9).view(3, 3).double(), 0.1
    stepped = []
    for added, given in ((decay, 0.0), (0.0, decay)):
        p = nn.Parameter(start.clone())
        base = kind([p], lr=0.1, weight_decay=given, **options)
        for _ in range(8):
            p.grad = gradient + added * p.detach()
            base.step()
        stepped.append(p.detach())
    is_added = torch.allclose(*stepped, rtol=1e-12, atol=0)
    assert facts.l2_penalty(base, base.param_groups[0]) == (decay if is_added else 0.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Overriding], ids=lambda kind: kind.__name__)
def test_a_base_that_is_not_known_has_no_penalty(kind: Any) -> None:
    base = kind([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)
    assert facts.l2_penalty(base, base.param_groups[0]) == (0.1 if kind is torch.optim.SGD else 0.0)


def test_lion_passes_over_a_group_without_gradients() -> None:
    """torch's grouping refuses empty lists, and ZeRO-3 steps one group at a time with the others empty."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    opt = mechanize(Lion([{"params": [a]}, {"params": [b]}], lr=1.0))
    for _ in range(5):
        a.grad = torch.ones(3)
        opt.step()
    assert (a < 1).all()
    assert (b == 1).all()


class AdamWScheduleFree(torch.optim.SGD): ...


class ScheduleFreeAdamW(torch.optim.SGD): ...


class Mine(AdamWScheduleFree): ...


class Prodigy(torch.optim.SGD): ...


class DAdaptLion(torch.optim.SGD): ...


class Ranger21(torch.optim.SGD): ...


class AccSGD(torch.optim.SGD): ...


class FTRL(torch.optim.SGD): ...


OWN_ITERATES = [AdamWScheduleFree, ScheduleFreeAdamW, Mine, Prodigy, DAdaptLion, Ranger21, FTRL, AccSGD]


@pytest.mark.parametrize("cls", OWN_ITERATES)
def test_bases_with_iterates_of_their_own_are_refused_by_name(cls: Any) -> None:
    """These names are from schedulefree, pytorch_optimizer, prodigyopt and dadaptation, which used to train wrongly."""
    with pytest.raises(ValueError, match=r"cannot be mechanized: it computes the weights from .* such as AdamW or SGD"):
        mechanize(cls([nn.Parameter(torch.ones(2))], lr=0.1))


class Remembers(torch.optim.SGD):
    """Keeps its initial weights under a name that gives no hint of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("first", p.clone())
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_of_the_weights_in_the_state_of_a_base_is_warned_of_once(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.linspace(1, 2, 8).to(dtype))
    opt = mechanize(Remembers([p], lr=0.1))
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"Remembers keeps a copy of the weights in its state \('first'\)"):
        opt.step()
    for _ in range(3):
        opt.step()  # a warning would be an error


@pytest.mark.parametrize("cls", [TextbookLion, Overriding, Factored])
@pytest.mark.parametrize("start", [torch.zeros(4), torch.ones(4), torch.linspace(0, 1, 4)], ids=str)
def test_other_state_is_not_taken_for_a_copy_of_the_weights(cls: Any, start: Tensor) -> None:
    p = nn.Parameter(start.clone())
    opt = mechanize(cls([p], lr=0.1))
    for grad in (start, torch.zeros(4), torch.zeros(4)):
        p.grad = grad.clone()
        opt.step()
    assert (p.detach() <= start).all()


class Counts(torch.optim.SGD):
    """Keeps entries in `state` that belong to no parameter, as MADGRAD and SPAM do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.state["total_step"] = 1  # type: ignore[index]
        self.state["k"] = torch.tensor([3])  # type: ignore[index]


def test_a_base_may_keep_state_that_belongs_to_no_parameter() -> None:
    """Every key of `state` used to be taken for a parameter."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    opts = [mechanize(Counts([p])) for p in params[:1] * 2]
    for _ in range(3):
        params[0].grad = torch.ones(3)
        opts[0].step()
    saved = copy.deepcopy(opts[0].state_dict())
    opts[1].load_state_dict(saved)
    assert not differences(saved, opts[1].state_dict())
    opts[1].add_param_group({"params": [params[1]]})
    assert demechanize(opts[1]).state["total_step"] == 1  # type: ignore[index]


@pytest.mark.parametrize("keep", [True, False], ids=["both kept", "the first one gone"])
def test_a_base_that_is_mechanized_again_goes_on_with_its_tuner(keep: bool) -> None:
    """Its param groups hold the tuner as last saved, or a new one; reading that lost the learned scale."""
    p = nn.Parameter(torch.ones(8))
    base = torch.optim.AdamW([p])
    first: Any = mechanize(base)
    descend(first, p, 30)
    scale, saved = first.scale.item(), copy.deepcopy(first.state_dict())
    descend(first, p, 10)
    tuner, later = first.tuner, first.scale.item()
    if not keep:
        del first
    second = mechanize(base)
    assert second.scale.item() == later != scale > 0
    assert all(map(torch.equal, second.tuner, tuner))
    second.load_state_dict(saved)
    assert mechanize(base).scale.item() == scale
    assert mechanize(demechanize(second)).scale.item() == 0
