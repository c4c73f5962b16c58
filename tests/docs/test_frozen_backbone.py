"""examples/frozen_backbone.py, whose table is in the FAQ."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
example: Any = importlib.import_module("frozen_backbone")
sys.path.pop(0)

pytestmark = pytest.mark.slow

OURS = ["default rule, one scale", "default rule, scope='group'"]


def test_the_loss_does_not_jump_when_the_body_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one scale, the body used to start at the head's rate: the loss rose from 0.9 to 8."""
    methods = {name: build for name, build in example.METHODS.items() if name in (*OURS, "plain AdamW at 1e-2")}
    monkeypatch.setattr(example, "METHODS", methods)
    losses = example.measure(seeds=1, steps=400, release=150)
    for name in OURS:
        before, highest, last = losses[name]
        assert highest < 1.2 * before, name
        assert last < 0.3 * before, name
    before, highest, _ = losses["plain AdamW at 1e-2"]
    assert highest > 1.5 * before  # so the problem is there


def test_the_body_stays_where_it_is_until_its_release() -> None:
    start, data = example.pretrained(seed=0, steps=5), example.digits([5, 6, 7, 8, 9], seed=0)
    before = [p.clone() for p in start[0].parameters()]
    optimizer = example.METHODS[OURS[0]](start[0].parameters(), start[1].parameters())
    losses = example.train(start, optimizer, data, steps=30, seed=0, release=30)
    assert all(map(lambda p, old: p.equal(old), start[0].parameters(), before))
    assert len(losses) == 1


def test_it_prints_a_row_for_each_method(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["frozen_backbone.py", "--seeds", "1", "--steps", "30", "--release", "5"])
    example.main()
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row[: len(name)] for row, name in zip(rows, example.METHODS, strict=True)] == list(example.METHODS)
    assert all(0 < float(loss) < 10 for row in rows for loss in row[30:].split())
    assert all(len(row[30:].split()) == 3 for row in rows)


def test_a_release_that_leaves_no_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["frozen_backbone.py", "--steps", "100", "--release", "90"])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert "got 90 of 100" in capsys.readouterr().err
