"""Processes that live as long as the test run, since starting a pair for every test takes seconds.

They are forked from a process that has only imported what the test run has imported. A test passes a top-level
function to `Ranks.__call__`; every rank calls it with its rank as the first argument, and the test gets the ranks'
plain return values to assert on.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

_PATIENCE = datetime.timedelta(seconds=120)
"""Longer than a loaded machine needs. A rank that fails is noticed at once by its closed pipe."""


NEEDED = ["torch._dynamo"]
"""Imported by the first optimizer; done once for all ranks."""

SLOW_IMPORTS = (
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "pytorch_lightning",
    "peft",
    "transformers.trainer",
)
"""Also imported, if the test run has imported them. Not DeepSpeed, which reads a rank's environment."""


def serve(rank: int, world_size: int, store: str, environment: dict[str, str], pipe: Connection) -> None:
    """A rank's main loop: calls the functions from the pipe and sends back results or failures."""
    os.setpgrp()  # with the processes that it starts: see `Ranks.stop`
    faulthandler.enable()
    gc.freeze()  # freeze the parent's imports: see conftest.py
    os.environ.update(environment)
    torch.set_num_threads(1)
    _keep_meshes()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=_PATIENCE
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(rank, *args, **kwargs), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            return


def _keep_meshes() -> None:
    """Shares a mesh per shape among all tests, since every process group has a thread that polls 100 times a second."""
    make = device_mesh.init_device_mesh

    @functools.cache
    def kept(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> device_mesh.DeviceMesh:
        return make(device_type, shape, mesh_dim_names=names)

    def init_device_mesh(
        device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
    ) -> device_mesh.DeviceMesh:
        return kept(device_type, tuple(mesh_shape), mesh_dim_names and tuple(mesh_dim_names))

    device_mesh.init_device_mesh = dist.init_device_mesh = init_device_mesh


class KilledError(AssertionError):
    """A rank was ended by a signal: memory was corrupted below Python, or used up."""


class Ranks:
    """`world_size` processes in one gloo group, started when first needed and again after a failure."""

    environment: ClassVar[dict[str, str]] = {}
    """Environment variables added to the test run's."""
    imports: ClassVar[list[str]] = []
    """Additional imports."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size
        self._starts = 0
        self._ranks: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the function's results by rank. The first failure on any rank fails the caller and ends all ranks.

        After a signal it runs once more on new ranks, with a warning; a real fault would recur. A corrupted heap was
        seen once in code that only calls torch, and its cause was never found.
        """
        try:
            return self._ask(function, args, kwargs)
        except KilledError as killed:
            warnings.warn(f"a rank was killed and {function.__name__} is run once more: {killed}", stacklevel=2)
            return self._ask(function, args, kwargs)

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self._start()
        try:
            return self._answers(function, args, kwargs)
        except BaseException:  # even for a timeout: a late answer must not reach the next caller
            self.stop()
            raise

    def _answers(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        for _, pipe in self._ranks:
            pipe.send((function, args, kwargs))
        results: list[Any] = [None] * self.world_size
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            for pipe in multiprocessing.connection.wait(list(waiting)):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                results[rank] = self._received(rank, pipe)  # type: ignore[arg-type]
        return results

    def _received(self, rank: int, pipe: Connection) -> Any:
        try:
            value, failure = pipe.recv()
        except EOFError:
            value, failure = None, "the process ended"
        if failure is not None:
            self._raise_if_killed()
            raise AssertionError(f"on rank {rank}:\n{failure}")
        return value

    def _raise_if_killed(self) -> None:
        """Reports the killed rank; the others' error, a closed connection, is only a consequence."""
        for rank, (process, _) in enumerate(self._ranks):
            process.join(timeout=0.5)
            if (process.exitcode or 0) < 0:
                raise KilledError(f"rank {rank} by {signal.Signals(-process.exitcode).name}")

    def _start(self) -> None:
        if self._ranks:
            return
        context = multiprocessing.get_context("forkserver")
        wanted = [name for name in SLOW_IMPORTS if name in sys.modules]
        context.set_forkserver_preload([*NEEDED, *self.imports, *wanted])
        store = str(self.folder / f"store{self._starts}")
        self._starts += 1
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, store, self.environment, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):  # it has not come to its setpgrp(), or has ended
                os.killpg(process.pid, signal.SIGKILL)  # a killed process leaves those that it started alive
            process.kill()
            process.join()
        self._ranks = []
