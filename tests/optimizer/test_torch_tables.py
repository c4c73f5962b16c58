"""torch's own optimizer tests, with Mechanic around each optimizer.

The tables are torch.testing._internal.common_optimizers.optim_db, which is in the wheel: the inputs that torch tests
each optimizer with. They run here in our own runner. What does not fit, and why:

- torch's test bodies: they compare with fixed numbers of steps at the table's learning rate.
- LBFGS and SparseAdam: refused, with an alternative (test_bases.py).
- `differentiable` implementations: refused; `capturable` on a CPU: torch itself refuses it.
- the tables of errors: these are raised by the base's constructor, before Mechanic sees it.
- inputs with weight_decay 0.1 or more: they end away from the loss's minimum, but still go downhill.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from problems import differences, everything
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

from mechanic_plugins import MechanicOptimizer, mechanize

pytestmark = pytest.mark.slow
REFUSED = {"LBFGS", "SparseAdam"}
CASES = [
    pytest.param(info, i, id=f"{info.optim_cls.__name__}-{case.desc}".replace(" ", "-"))
    for info in optim_db
    if info.optim_cls.__name__ not in REFUSED
    for i, case in enumerate(info.optim_inputs_func(device="cpu"))
    if not case.kwargs.get("capturable")
]


def inputs(info: Any, index: int) -> dict[str, Any]:
    """The inputs, built anew for every use, as two optimizers must not share a tensor lr."""
    return dict(info.optim_inputs_func(device="cpu")[index].kwargs)


def params(info: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """torch's own start: a matrix and a vector, or only matrices for Muon."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(10, 5), (5, 10)] if info.optim_cls.__name__ == "Muon" else [(10, 5), (10,)]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def loss_of(weights: list[Tensor], *, maximize: bool) -> Tensor:
    loss = sum(((w - 0.5) ** 2).sum() for w in weights)
    assert isinstance(loss, Tensor)
    return -loss if maximize else loss


def descend(
    opt: torch.optim.Optimizer, weights: list[Tensor], steps: int, *, without: int | None = None
) -> list[float]:
    """Steps on a quadratic bowl, upside down for a group that maximizes. The parameter `without` gets no gradient."""
    maximize = bool(opt.param_groups[0].get("maximize"))
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of(weights, maximize=maximize)
        loss.backward()
        if without is not None:
            weights[without].grad = None
        opt.step()
        losses.append(-loss.item() if maximize else loss.item())
    return losses


def mechanized(base: torch.optim.Optimizer) -> MechanicOptimizer:
    return mechanize(base)


def build(info: Any, index: int, weights: list[Tensor]) -> MechanicOptimizer:
    return mechanized(info.optim_cls(weights, **inputs(info, index)))


@pytest.mark.slow
@pytest.mark.parametrize(("info", "index"), CASES)
def test_it_goes_downhill_and_foreach_and_fused_equal_the_for_loop(info: Any, index: int) -> None:
    """Within the base's own differences: one of torch's ASGD variants keeps its rate in float32."""
    kinds = [kind for kind in ("foreach", "fused") if kind in info.supported_impls]
    if isinstance(inputs(info, index).get("lr"), Tensor):  # torch refuses foreach with a tensor lr on a CPU
        kinds = [kind for kind in kinds if kind != "foreach"]
    loop = {"foreach": False} if "foreach" in info.supported_impls else {}

    def end(wrap: Any, steps: int = 6, **kwargs: Any) -> list[Tensor]:
        weights = params(info, torch.float64)
        descend(wrap(info.optim_cls(weights, **{**inputs(info, index), **kwargs})), weights, steps)
        return [w.detach() for w in weights]

    def plain(steps: int, **kwargs: Any) -> list[Tensor]:
        return end(lambda base: base, steps, **kwargs)

    start, ours = params(info, torch.float64), end(mechanized, **loop)
    for before, after in zip(start, ours, strict=True):
        assert loss_of([after], maximize=False) < loss_of([before], maximize=False)
    for kind in kinds:
        own = max(apart(plain(steps, **{kind: True}), plain(steps, **loop)) for steps in range(1, 7))
        for a, b in zip(end(mechanized, **{kind: True}), ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9 + 10 * own)


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).detach().abs().max().item() for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(("info", "index"), CASES)
def test_a_parameter_that_never_has_a_gradient_stays(info: Any, index: int) -> None:
    weights = params(info)
    start = weights[1].detach().clone()
    opt = build(info, index, weights)
    descend(opt, weights, 4, without=1)
    assert torch.equal(weights[1], start)
    assert opt.scale.item() > 0


@pytest.mark.parametrize(("info", "index"), CASES)
def test_a_state_dict_continues_exactly(info: Any, index: int) -> None:
    weights = params(info)
    opt = build(info, index, weights)
    descend(opt, weights, 4)
    twins = [w.detach().clone().requires_grad_() for w in weights]
    twin = build(info, index, twins)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert not differences(everything(opt), everything(twin))
    descend(opt, weights, 4)
    descend(twin, twins, 4)
    assert not differences(everything(opt), everything(twin))


def test_the_tables_were_read() -> None:
    """An empty table would silently remove every test above."""
    names = {case.values[0].optim_cls.__name__ for case in CASES}
    assert names >= {"Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"}
    assert len(CASES) > 60
