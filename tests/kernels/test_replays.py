"""What is recorded as a CUDA graph, when, and how many are kept. tests/gpu/check_recording.py has real graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mechanic_plugins.core.param_state import IndexRange, ParamState
from mechanic_plugins.core.tuner_state import empty_sums
from mechanic_plugins.kernels import foreach, foreach_sums, replays
from mechanic_plugins.kernels.foreach import ForeachBatch
from mechanic_plugins.kernels.replays import Replays

STEPS = 40


class Script:
    """Launches and replays, in the order they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        self.replayed: list[str] = []
        self.captures = 0
        self.error: Exception | None = None
        self.replays = Replays(torch.device("cuda"))
        monkeypatch.setattr(replays, "captured", self._captured)
        monkeypatch.setattr(replays, "is_capturing", lambda device: False)
        monkeypatch.setattr(Replays, "_a_stream_and_a_pool", lambda self: {})

    def _captured(self, launch: Callable[[], str], device: torch.device) -> tuple[Any, str]:
        if self.error is not None:
            raise self.error
        self.captures += 1
        name = launch()
        self.launched.remove(name)  # captured, not run
        return Graph(self, name), name

    def step(self, key: str) -> None:
        def launch() -> str:
            self.launched.append(key)
            return key

        assert self.replays(key, launch) == key


class Graph:
    def __init__(self, script: Script, name: str) -> None:
        self._script, self._name = script, name

    def replay(self) -> None:
        self._script.replayed.append(self._name)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_what_comes_again_is_recorded(script: Script) -> None:
    for _ in range(10):
        for key in "ab":
            script.step(key)
    assert script.launched == list("ababab")
    assert script.replayed == list("ab") * 7
    assert script.captures == 2


def test_what_never_comes_again_is_not(script: Script) -> None:
    for index in range(300):
        script.step(str(index))
    assert len(script.launched) == 300
    assert len(script.replays._seen) <= 64


def test_graphs_in_use_are_kept_and_others_launched(script: Script) -> None:
    for _ in range(30):
        for key in "abcdefghijkl":
            script.step(key)
    assert script.captures == 8
    assert set(script.replayed) == set("abcdefgh")
    assert set(script.launched[-4:]) == set("ijkl")


def test_graphs_that_are_no_longer_used_make_room(script: Script) -> None:
    for key in "abcdefgh" * 5 + "ijkl" * 60:
        script.step(key)
    assert set(script.replayed[-4:]) == set("ijkl")
    assert len(script.replays._graphs) == 8


def test_what_cannot_be_captured_is_launched(script: Script) -> None:
    script.error = RuntimeError("operation not permitted when stream is capturing")
    for _ in range(6):
        script.step("a")
    script.error = None
    script.step("a")
    assert script.launched == ["a"] * 7
    assert script.captures == 0


def test_a_cpu_launches() -> None:
    replays, count = Replays(torch.device("cpu")), 0
    for _ in range(9):
        count = replays("a", lambda count=count: count + 1)
    assert count == 9


class Relaunch:
    """As a CUDA graph: a replay launches the same again, with the tensors of then, and writes over the result."""

    def __init__(self, launch: Callable[[], Any], replayed: list[Any]) -> None:
        self._launch, self.result, self._replayed = launch, launch(), replayed

    def replay(self) -> None:
        self._replayed.append(self.result)
        found = self._launch()
        if found is not None:
            self.result.copy_(found)


@pytest.mark.parametrize("with_dx", [True, False])
def test_recorded_passes_end_where_launched_ones_do(with_dx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in three places, a snapshot in two, and other numbers everywhere in every step."""
    for module in (foreach, foreach_sums):
        monkeypatch.setattr(module, "waits_for_host", lambda device: True)
    monkeypatch.setattr(foreach, "has_fused_sgd", lambda x: True)
    launched = passes(with_dx=with_dx)
    replayed: list[Any] = []

    def captured(launch: Callable[[], Any], device: torch.device) -> tuple[Relaunch, Any]:
        kept = [t.clone() for t in memory]
        graph = Relaunch(launch, replayed)
        for t, old in zip(memory, kept, strict=True):
            t.copy_(old)  # nothing runs while it is captured
        return graph, graph.result

    memory: list[Tensor] = []
    Script(monkeypatch)
    monkeypatch.setattr(replays, "captured", captured)
    monkeypatch.setattr(foreach, "Replays", lambda device: Replays(torch.device("cuda")))
    told: list[Any] = []
    monkeypatch.setattr(torch.autograd.graph, "increment_version", told.append)
    recorded = passes(with_dx=with_dx, memory=memory)
    assert len(replayed) > STEPS
    assert all(map(torch.equal, recorded, launched))
    assert len(told) == STEPS  # autograd, which sees no replay


def passes(*, with_dx: bool, memory: list[Tensor] | None = None) -> list[Tensor]:
    """All sums, and the weights and deltas at the end."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (7,), (2, 2, 2))]

    xs, deltas, grads, snapshots = numbers(), numbers(), [numbers() for _ in range(3)], [numbers() for _ in range(2)]
    if memory is not None:
        memory += [t for each in (xs, deltas, *grads, *snapshots) for t in each]
    batch = ForeachBatch([ParamState(x, None, delta, None) for x, delta in zip(xs, deltas, strict=True)])
    found = []
    for step in range(STEPS):
        here, old = grads[step % 3], snapshots[step % 2]
        for x, grad, kept in zip(xs, here, old, strict=True):
            kept.copy_(x)
            grad.normal_(generator=generator)
            x.add_(grad, alpha=0.1)
        out = empty_sums(1, torch.device("cpu"))
        how: dict[str, Any] = {"maximize": step % 5 == 0, "penalty": 0.5 if step % 7 == 0 else 0.0, "with_dx": with_dx}
        batch.add_sums(xs, here, out, tuner_index=0, weight=1.0, **how)
        scales = torch.rand(6, generator=generator, dtype=torch.float64)
        batch.move(IndexRange(0, len(xs)), xs, old, scales)
        found.append(out)
    return [*found, *xs, *deltas]
