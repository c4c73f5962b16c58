from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Ranks

sys.path.append(str(Path(__file__).parents[1] / "deepspeed_plugin"))
import build_ops

pytest.register_assert_rewrite("hf_tiny")


class ZeroRanks(Ranks):
    """They find DeepSpeed's compiled operators in their environment."""

    def _start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in build_ops.environment().items():
                patch.setenv(name, value)
            super()._start()


@pytest.fixture(scope="session")
def compiled() -> None:
    """DeepSpeed's CPU operators."""
    if reason := build_ops.why_not():
        assert not os.environ.get("CI"), f"{reason}: continuous integration must run these tests"
        pytest.skip(reason)
    if not build_ops.are_compiled():
        build_ops.build_in_subprocess()


@pytest.fixture(scope="session")
def zero_ranks(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks for DeepSpeed alone, which leaves state in its modules that other tests should not meet."""
    ranks = ZeroRanks(tmp_path_factory.mktemp("zero"), 2)
    yield ranks
    ranks.stop()
