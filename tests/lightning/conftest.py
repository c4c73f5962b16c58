from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lightning_helpers import NAMESPACES, lightning_of
from ranks import Ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "deepspeed_plugin"))
import build_ops


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the two packages that Lightning comes in."""
    return lightning_of(request.param)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lightning ignores further interrupts once it has met one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def engine_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of their own, which find DeepSpeed's compiled operators in their environment."""
    if reason := build_ops.why_not():
        assert not os.environ.get("CI"), f"{reason}: continuous integration must run these tests"
        pytest.skip(reason)
    if not build_ops.are_compiled():
        build_ops.build_in_subprocess()
    ranks = Ranks(tmp_path_factory.mktemp("lightning_deepspeed"), 2)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in build_ops.environment().items():
            patch.setenv(name, value)
        ranks._start()
    yield ranks
    ranks.stop()
