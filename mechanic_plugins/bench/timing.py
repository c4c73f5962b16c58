"""Timing steps, and counting their memory and launches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic_plugins.bench.costs import bytes_of
from mechanic_plugins.bench.optimizers import Factory, bases, rivals
from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["Result", "copy_speed", "count_launches", "measure"]

ALONE = "base alone"
MAX_NORM = 1.0
_PLACES = 6
"""Where a gradient may be; a GPT was seen to use as many, with `zero_grad()` before the forward pass."""
_QUEUEINGS = 5
"""How often each timing takes the host's time, where steps are queued. A host that others use too is now and then half
as fast."""


@dataclass(frozen=True)
class Result:
    """The cost of one optimizer on one list of tensors. Bytes are per parameter."""

    name: str
    params: int
    tensors: int
    seconds: float
    ratio: float
    host_seconds: float
    """What the host needs to queue a step."""
    state_bytes: float
    transient_bytes: float | None
    launches: int | None
    """See `count_launches`."""
    moved_bytes: int | None
    """The fewest bytes per parameter that a step can move; None where they cannot be counted."""
    of_limit: float | None
    """Time to copy `moved_bytes`, divided by the time of the step."""


def copy_speed(device: torch.device) -> float:
    """Bytes read and written per second by a copy within device memory."""
    size = 2**31 if device.type == "cuda" else 2**28
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device).unbind()
    times = []
    for _ in range(12):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[2:])


def measure(
    shapes: Sequence[tuple[int, ...]],
    base: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    repeats: int = 25,
    queued: int | None = None,
    clip: bool = False,
) -> Iterator[Result]:
    """The cost of the base and of each rival. Base and rival are timed alternately, under the same load.

    Args:
        shapes: The parameters' shapes.
        base: A key of `bases`.
        device: The parameters' device.
        dtype: The parameters' dtype.
        repeats: Number of timings; medians are reported.
        queued: Steps queued between synchronisations. 10 on a GPU, as in training, where the host runs ahead; 1 adds
            the host's share of every step, which a backward pass hides.
        clip: Count clipping in: Mechanic's own, and `clip_grad_norm_` before the step of everyone else.
    """
    queued = queued or (10 if device.type == "cuda" else 1)
    plain, speed = {ALONE: bases(device)[base]}, copy_speed(device)
    found = rivals(base, device, max_grad_norm=MAX_NORM if clip else None)
    for others in ({}, *({name: factory} for name, factory in found.items())):
        factories = {**plain, **others}
        runs = {
            name: _Run(shapes, factory, device=device, dtype=dtype, clip=clip) for name, factory in factories.items()
        }
        *_, result = _compare(runs, repeats=repeats, queued=queued)
        yield _against_limit(result, base, speed, itemsize=dtype.itemsize)


def count_launches(
    shapes: Sequence[tuple[int, ...]],
    base: str,
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    clip: bool = False,
) -> int | None:
    """Kernels and copies that a step of this rival launches; only CUDA counts them.

    To be called after all timings: what a profiler leaves behind in the process must not be timed.
    """
    if device.type != "cuda":
        return None
    found = {ALONE: bases(device)[base], **rivals(base, device, max_grad_norm=MAX_NORM if clip else None)}
    run = _Run(shapes, found[name], device=device, dtype=dtype, clip=clip)
    run.timed(queued=20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.timed(queued=1)
    return sum(int(event.count) for event in profile.key_averages() if event.device_type.name != "CPU")


def _against_limit(result: Result, base: str, speed: float, *, itemsize: int) -> Result:
    path = "alone" if result.name == ALONE and base != "lion" else result.name.removeprefix("mechanic, ")
    moved = bytes_of(base, path, itemsize=itemsize)
    if moved is None:
        return result
    return replace(result, moved_bytes=moved, of_limit=moved * result.params / speed / result.seconds)


def _compare(runs: dict[str, _Run], *, repeats: int, queued: int) -> Iterator[Result]:
    for run in runs.values():
        run.warm_up()
    times: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run.timed(queued))
            hosts[name] += (run.queueing() for _ in range(min(queued, _QUEUEINGS)))
    for name, run in runs.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[ALONE], strict=True))
        yield Result(
            name=name,
            params=run.count,
            tensors=len(run.params),
            seconds=statistics.median(times[name]),
            ratio=ratio,
            host_seconds=statistics.median(hosts[name]),
            state_bytes=run.state_bytes() / run.count,
            transient_bytes=run.transient_bytes(),
            launches=None,
            moved_bytes=None,
            of_limit=None,
        )


class _Run:
    """Parameters with gradients, and their optimizer.

    Every step finds its gradients elsewhere, as after a `zero_grad()`: parameters of one shape hand them around.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        factory: Factory,
        *,
        device: torch.device,
        dtype: torch.dtype,
        clip: bool = False,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.params = [
            nn.Parameter(0.02 * torch.randn(shape, device=device, generator=generator).to(dtype)) for shape in shapes
        ]
        grads = [1e-3 * torch.randn(p.shape, device=device, generator=generator).to(dtype) for p in self.params]
        self.rounds = itertools.cycle([_handed_on(grads, count) for count in range(_PLACES)])
        self.move_gradients()
        self.optimizer: Optimizer = factory(self.params)
        self.clips = clip and not isinstance(self.optimizer, MechanicOptimizer)
        self.count = sum(p.numel() for p in self.params)

    def move_gradients(self) -> None:
        for p, grad in zip(self.params, next(self.rounds), strict=True):
            p.grad = grad

    def step(self) -> None:
        if self.clips:
            nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.optimizer.step()

    def warm_up(self) -> None:
        for _ in range(3):
            self.move_gradients()
            self.step()
        self._wait()

    def timed(self, queued: int) -> float:
        """Seconds per step, over several steps between synchronisations."""
        self._wait()
        start = time.perf_counter()
        for _ in range(queued):
            self.move_gradients()
            self.step()
        self._wait()
        return (time.perf_counter() - start) / queued

    def queueing(self) -> float:
        """Seconds until a step returns, with nothing queued before it."""
        self.move_gradients()
        self._wait()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def state_bytes(self) -> int:
        tensors = (t for state in self.optimizer.state.values() for t in _tensors(state))
        return sum(t.numel() * t.element_size() for t in tensors)

    def transient_bytes(self) -> float | None:
        """Peak memory of a step beyond what it keeps, in bytes per parameter; only CUDA counts it."""
        if self.device.type != "cuda":
            return None
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step()
        self._wait()
        return (torch.cuda.max_memory_allocated(self.device) - before) / self.count

    def _wait(self) -> None:
        _wait(self.device)


def _handed_on(grads: Sequence[Tensor], count: int) -> list[Tensor]:
    """Each parameter gets the gradient of the one that comes so many places after it among those of its shape."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, grad in enumerate(grads):
        alike.setdefault(tuple(grad.shape), []).append(index)
    found = list(grads)
    for indices in alike.values():
        for place, index in enumerate(indices):
            found[index] = grads[indices[(place + count) % len(indices)]]
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
