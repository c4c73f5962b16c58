from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import ClassVar

import build_ops
import pytest
from ranks import Ranks
from warm import Warm

os.environ["WANDB_MODE"] = "disabled"  # transformers 4 reports to every installed logger

POOLS = ("engines", "ranks")
"""The fixtures that keep processes alive, each to be started by only one worker."""

LONGEST = ("test_probe", "test_interpreted", "test_quality_benchmark", "test_short_runs", "test_run_launchers")
"""Files without these fixtures that take half a minute or more, longest first."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that run on ranks, and groups tests for the workers of `make test` by process pool or file.

    Done here because xdist reads the groups before a conftest's `pytest_collection_modifyitems`.
    """
    if pool := _pool(item):
        item.add_marker(pytest.mark.ranks)
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(pool or item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs long tests first, so that small files at the end even out the workers."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not _pool(item), _place(item), item.path not in slow_files))


def pytest_collection() -> None:
    """Disables garbage collection during imports, since whatever is imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freezes what was imported: the Trainer collects garbage in every run and would scan all of it."""
    gc.enable()
    gc.freeze()


def _place(item: pytest.Item) -> int:
    return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)


def _pool(item: pytest.Item) -> str | None:
    return next((pool for pool in POOLS if pool in getattr(item, "fixturenames", ())), None)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)(function, ...)` runs the function on two ranks that live as long as the test run."""
    yield from _of_any_size(Ranks, tmp_path_factory, "ranks")


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs `mechanic-run` from a process that has imported torch."""
    process = Warm()
    yield process
    process.stop()


class DeepSpeedRanks(Ranks):
    """Ranks with the compiled operators in their environment."""

    environment = build_ops.environment()
    imports: ClassVar[list[str]] = ["cpuinfo", "torch._inductor.compile_fx"]


@pytest.fixture(scope="session")
def compiled() -> None:
    """DeepSpeed's CPU operators, compiled by `make test`, or here under a bare pytest."""
    if reason := build_ops.why_not():
        assert not os.environ.get("CI"), f"{reason}: continuous integration must run these tests"
        pytest.skip(reason)
    if not build_ops.are_compiled():
        build_ops.build_in_subprocess()


@pytest.fixture(scope="session")
def engines(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """Like `ranks`, but only for DeepSpeed, whose modules keep state that other distributed tests should not see."""
    yield from _of_any_size(DeepSpeedRanks, tmp_path_factory, "deepspeed")


def _of_any_size(
    kind: type[Ranks], tmp_path_factory: pytest.TempPathFactory, name: str
) -> Iterator[Callable[[int], Ranks]]:
    made: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in made:
            made[world_size] = kind(tmp_path_factory.mktemp(f"{name}{world_size}"), world_size)
        return made[world_size]

    yield of
    for group in made.values():
        group.stop()
