"""A step is short: how many functions it enters on a CPU."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import mechanic_plugins
from mechanic_plugins import mechanize

HOME = mechanic_plugins.__path__[0]


@pytest.mark.parametrize("rule", ["relative", "paper"])
def test_a_step_of_six_tensors_is_a_short_walk(rule: Any) -> None:
    """At most 25 of the package's own functions, and 120 Python calls, torch's own and comprehensions included.

    A step that is measured takes more, but after the first ones these are rare.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = mechanize(torch.optim.Adam(params, lr=1e-3), rule=rule)
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(12):
        optimizer.step()
    assert not optimizer.is_step_measured
    entered: list[CodeType] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        optimizer.step()
    finally:
        sys.setprofile(before)
    own = {code for code in entered if code.co_filename.startswith(HOME) and not code.co_name.endswith(">")}
    assert len(own) <= 25, [code.co_name for code in own]
    assert len(entered) <= 120
