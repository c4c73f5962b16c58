from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)(function, ...)` runs the function on two ranks that live as long as the test run."""
    made: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in made:
            made[world_size] = Ranks(tmp_path_factory.mktemp(f"ranks{world_size}"), world_size)
        return made[world_size]

    yield of
    for group in made.values():
        group.stop()
