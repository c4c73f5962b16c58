"""Runs the script on ranks that live as long as the test run, and enables what accelerate refuses on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hf_script import run
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel

import mechanic_plugins.transformers  # noqa: F401


def train(rank: int, argv: Sequence[str], shim: str = "none") -> dict[str, Any]:
    with as_if_launched(rank), SHIMS[shim]():
        return run(argv)


@contextmanager
def as_if_launched(rank: int) -> Iterator[None]:
    """Sets the environment that torchrun gives a process, for the existing process group."""
    before = dict(os.environ)
    world = dist.get_world_size()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="localhost",
        OMP_NUM_THREADS="1",
    )
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def no_shim() -> Iterator[None]:
    yield


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Enables FSDP on a CPU, where accelerate would silently run DDP because it looks for several GPUs."""
    original = PartialState.__init__

    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    wrap = FullyShardedDataParallel.__init__

    def without_device(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **{**kwargs, "device_id": torch.device("cpu")})  # accelerate passes an index

    with ExitStack() as stack:
        stack.enter_context(replaced(PartialState, "__init__", init))
        stack.enter_context(replaced(FullyShardedDataParallel, "__init__", without_device))
        # FSDP1 "offloading" from CPU to CPU frees the only copy, or makes all states share one
        never = property(lambda self: False, lambda self, value: None)
        for config in (FullStateDictConfig, FullOptimStateDictConfig):
            stack.enter_context(replaced(config, "offload_to_cpu", never))
        yield


@contextmanager
def deepspeed_on_cpu() -> Iterator[None]:
    """Enables DeepSpeed on a CPU, as it and accelerate look for a GPU first."""

    def backend(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_CPU

    os.environ["DS_ACCELERATOR"] = "cpu"
    with replaced(PartialState, "_prepare_backend", backend):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


SHIMS: dict[str, Callable[[], Any]] = {"none": no_shim, "fsdp": fsdp_on_cpu, "deepspeed": deepspeed_on_cpu}
