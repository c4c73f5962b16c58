"""The length of a loop's run, by transformers' own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from mechanic_plugins import mechanize

STEPS = 100
OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 30},
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", STEPS),
        ("cosine", STEPS),
        ("cosine_with_restarts", STEPS),
        ("cosine_with_min_lr", STEPS),
        ("polynomial", STEPS),
        ("warmup_stable_decay", STEPS),
        ("constant", None),
        ("constant_with_warmup", None),
        ("inverse_sqrt", None),
    ],
)
def test_the_scheduler_tells_the_optimizer(kind: str, expected: int | None) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.AdamW([p]))
    scheduler = get_scheduler(
        kind, optimizer, num_warmup_steps=10, num_training_steps=STEPS, scheduler_specific_kwargs=OPTIONS.get(kind)
    )
    for _ in range(3):
        p.square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert optimizer.total_steps == expected
