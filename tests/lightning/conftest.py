from __future__ import annotations

from types import ModuleType

import pytest
from lightning_helpers import NAMESPACES, lightning_of


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the two packages that Lightning comes in."""
    return lightning_of(request.param)
