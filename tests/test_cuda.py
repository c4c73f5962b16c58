from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mechanic_plugins.core import tuner
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import initial_state
from mechanic_plugins.kernels import cuda, recorded_tuner


def test_another_gpu_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or contextlib.nullcontext())
    for name in ("cpu", "cuda:0", "cuda"):
        with cuda.on(torch.device(name)):
            assert not asked
    with cuda.on(torch.device("cuda:1")):
        assert asked == [torch.device("cuda:1")]


def test_a_habit_is_what_comes_again_and_again() -> None:
    habit = cuda.Habit()
    assert [habit.has(key) for key in "aaaaabaaaaa"] == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2


class Graph:
    """As a CUDA graph: a replay launches the same again, and leaves the results where the first were."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self.launch, self.results = launch, launch()

    def replay(self) -> None:
        (old, row), (new, after) = self.results, self.launch()
        row.copy_(after)
        for name in ("applied", "delta_factor"):
            getattr(old, name).copy_(getattr(new, name))


def test_a_recorded_tuner_decides_as_one_that_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/check_recording.py has real graphs. What is handed in stays: a step that fails goes back to it."""
    monkeypatch.setattr(recorded_tuner, "captured", lambda launch, device: ((g := Graph(launch)), g.results))
    settings, cpu = Settings(), torch.device("cpu")
    betas = torch.tensor(settings.betas, dtype=torch.float64)
    how: dict[str, Any] = {"settings": settings, "betas": betas, "hold": False, "max_grad_norm": None}
    state, counters = initial_state(settings, tuners=2, device=cpu), torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.rand(20, 13, generator=generator, dtype=torch.float64) + 0.1
    vectors[:, [0, 6]] -= 0.6  # <d, g>: gains and losses
    recorded = recorded_tuner.RecordedTuner("key", state, vectors[0], counters, **how)
    for step, vector in enumerate(vectors):
        kept, lrs = [t.clone() for t in (*state, counters)], [1 - step / 40, 0.5]
        lr = torch.tensor(lrs, dtype=torch.float64)[:, None]
        expected = tuner.decide(state, vector, counters, lr=lr, **how)
        found = recorded.decide(state, vector, counters, lrs)
        for a, b in zip((*found.state, found.counters), (*expected.state, expected.counters), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(found.delta_factor, expected.delta_factor)
        assert all(map(torch.equal, kept, (*state, counters)))
        state, counters = found.state, found.counters
    assert state.played.min() > 0
    assert counters.tolist() == [20, 0]
