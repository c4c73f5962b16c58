from __future__ import annotations

import signal
from collections.abc import Iterator
from types import ModuleType

import pytest
from lightning_helpers import NAMESPACES, lightning_of


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    """Each of Lightning's two packages."""
    return lightning_of(request.param)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restores the handler, since Lightning ignores further interrupts after the first."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
