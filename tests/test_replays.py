"""What is recorded as a CUDA graph, when, and how many are kept. Graphs themselves need a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mechanic_plugins.kernels import replays
from mechanic_plugins.kernels.replays import Replays


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
