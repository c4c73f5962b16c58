"""A run whose length is known: a short one starts from a longer first move, and its scale rises sooner."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from problems import descend
from reference import Reference
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.core.run_length import settings_for_run
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import haste_of
from mechanic_plugins.lion import Lion

BASES = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def trained(base: str, steps: int = 30, **options: Any) -> tuple[Tensor, MechanicOptimizer]:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, dtype=torch.float64))
    optimizer = mechanize(BASES[base]([p]), **options)
    descend(optimizer, p, steps)
    return p.detach(), optimizer


@pytest.mark.parametrize(
    ("total_steps", "first_move", "smoothing", "hindsight", "haste", "usual_loss"),
    [
        (1, 3e-3 / 0.14**0.5, 0.97, 0.021, 0.5 / 0.28**3, 1.0),
        (140, 3e-3 / 0.14**0.5, 0.97, 0.021, 0.5 / 0.28**3, 1.0),
        (250, 6e-3, 0.97, 0.0375, 4.0, 0.6),
        (640, 3.75e-3, 0.97, 0.096, 0.5, 0.3),
        (1000, 3e-3, 0.97, 0.15, 0.5, 0.3),
        (1250, 2.2e-3, 0.98, 0.15, 0.5, 0.3),
        (10**6, 1.4e-3, 0.99, 0.15, 0.5, 0.3),
        (None, 3e-3, 0.97, 0.15, 0.5, 0.3),
    ],
)
def test_the_shorter_a_run_the_further_out_it_starts_and_the_sooner_it_rises(
    total_steps: int | None, first_move: float, smoothing: float, hindsight: float, haste: float, usual_loss: float
) -> None:
    found = settings_for_run(Settings(), total_steps)
    expected = (first_move, smoothing, hindsight, haste, usual_loss)
    seen = (found.first_move, found.smoothing, found.hindsight, haste_of(found), found.usual_loss)
    assert seen == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("total_steps", [75, 250, 640, 1200, 10_000])
@pytest.mark.parametrize("base", [*BASES, "Lion"])
def test_it_leads_where_the_reference_does(base: str, total_steps: int) -> None:
    build = {**BASES, "Lion": lambda params: Lion(params, lr=1e-3)}[base]
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, dtype=torch.float64))
    reference = Reference([p], build, total_steps=total_steps)
    optimizer = mechanize(build([p]), total_steps=total_steps)
    for _ in range(30):
        p.grad = p.detach() - 1
        reference.step([p.grad])
        optimizer.step()
        torch.testing.assert_close(p.detach(), reference.x[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("SGD", {}),
        ("AdamW", {"preset": "0.1"}),
        ("AdamW", {"rule": "paper"}),
    ],
    ids=str,
)
def test_it_changes_nothing_for_sgd_and_published_rules(base: str, options: dict[str, Any]) -> None:
    """SGD diverges from a long first move; a published rule is what was published."""
    assert torch.equal(trained(base, **options)[0], trained(base, total_steps=75, **options)[0])


@pytest.mark.parametrize("total_steps", [75, 10_000])
@pytest.mark.parametrize("chosen", [{"first_move": 3e-3, "hindsight": 0.15, "smoothing": 0.97}, {"smoothing": 0.0}])
def test_what_was_chosen_stays(chosen: dict[str, float], total_steps: int) -> None:
    """The defaults too, if they were named."""
    settings = settings_for_run(Settings.from_preset(None, **chosen), total_steps)
    assert {name: getattr(settings, name) for name in chosen} == chosen


def test_it_may_be_set_before_the_first_steps() -> None:
    """As plugins do, which learn it when the run begins."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, dtype=torch.float64))
    optimizer = mechanize(BASES["AdamW"]([p]))
    optimizer.total_steps = 75
    descend(optimizer, p, 30)
    assert torch.equal(p.detach(), trained("AdamW", total_steps=75)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copy", "pickle"])
def test_copies_know_it(copied: Any) -> None:
    twin = copied(mechanize(BASES["AdamW"]([nn.Parameter(torch.ones(2))]), total_steps=75))
    assert (twin.total_steps, twin._units.settings.first_move) == (75, 3e-3 / 0.14**0.5)


@pytest.mark.parametrize(("first", "then"), [(75, 10_000), (10_000, 75), (75, None)])
def test_a_resumed_run_may_be_given_another_length(first: int, then: int | None) -> None:
    """The scale goes on from where it was, and the checkpoint's settings are no others."""
    weights, before = trained("AdamW", 40, total_steps=first)
    p = nn.Parameter(weights.clone())
    after = mechanize(BASES["AdamW"]([p]), total_steps=then)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after.load_state_dict(before.state_dict())
    scales = [after.scale.item()]
    for _ in range(60):
        descend(after, p, 1)
        scales.append(after.scale.item())
    assert scales[0] == before.scale.item() > 0
    assert all(0.5 < b / a < 2 for a, b in pairwise(scales))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "100"])
def test_a_length_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"total_steps must be None or a whole number > 0, got .* Leave it None"):
        trained("AdamW", total_steps=wrong)
    optimizer = trained("AdamW")[1]
    with pytest.raises(ValueError, match="total_steps must be"):
        optimizer.total_steps = wrong
    assert optimizer.total_steps is None
