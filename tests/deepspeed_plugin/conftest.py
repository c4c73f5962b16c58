"""Ranks of their own: DeepSpeed keeps state in its modules that other distributed tests should not meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import build_ops
import pytest
from ranks import Ranks


class DeepSpeedRanks(Ranks):
    """They alone find the compiled operators in their environment."""

    def _start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in build_ops.environment().items():
                patch.setenv(name, value)
            super()._start()


@pytest.fixture(scope="session")
def compiled() -> None:
    """DeepSpeed's CPU operators. `make test` has compiled them; a bare pytest does it here."""
    if reason := build_ops.why_not():
        assert not os.environ.get("CI"), f"{reason}: continuous integration must run these tests"
        pytest.skip(reason)
    if not build_ops.are_compiled():
        build_ops.build_in_subprocess()


@pytest.fixture(scope="session")
def engines(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`engines(n)`: n ranks that stay alive for the whole test run."""
    started: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = DeepSpeedRanks(tmp_path_factory.mktemp(f"deepspeed{world_size}"), world_size)
        return started[world_size]

    yield of
    for ranks in started.values():
        ranks.stop()
