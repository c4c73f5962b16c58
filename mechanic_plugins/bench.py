"""What a step costs on this machine: `python -m mechanic_plugins.bench`.

One run measures the base alone and Mechanic around it, step by step in turn, over the tensor shapes of GPT-2, and shows
ratios to the base, and to the time that the bytes alone take at the speed of a copy on the same device. Packages with
the same aim are measured beside it where they are installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic_plugins import mechanize
from mechanic_plugins.costs import bytes_of, ranks_table
from mechanic_plugins.lion import Lion

__all__ = ["Result", "gpt2_shapes", "main", "measure"]

SIZES = {
    "tiny": (64, 2),
    "10M": (256, 8),
    "124M": (768, 12),
    "355M": (1024, 24),
    "774M": (1280, 36),
    "1.56B": (1600, 48),
}
"""Width and layers."""

ALONE = "base alone"
Factory = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True)
class Result:
    """One optimizer over one list of tensors."""

    name: str
    params: int
    tensors: int
    seconds: float
    ratio: float
    state_bytes: float
    transient_bytes: float | None
    launches: int | None
    collectives: int
    moved_bytes: int | None
    """Bytes a parameter that a step must move at least, where it is so simple that they can be counted."""
    of_limit: float | None
    """The time that a copy of as many bytes takes, over the time that the step took."""


def gpt2_shapes(width: int, layers: int, *, vocabulary: int = 50257) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2 of this size, in its order."""
    layer: list[tuple[int, ...]] = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *(layer * layers), (width,), (width,)]


def bases(device: torch.device) -> dict[str, Factory]:
    """The plain optimizers: fused on a GPU, foreach on a CPU, which is what is mostly used there."""
    return _bases("fused" if device.type == "cuda" else "foreach")


def _bases(form: str | None) -> dict[str, Factory]:
    fast: dict[str, Any] = {} if form is None else {form: True}
    return {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, **fast),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, **fast),
        "lion": lambda params: Lion(params, lr=1e-3),
    }


def rivals(base: str, device: torch.device) -> dict[str, Factory]:
    """Mechanic in each way that works here, and other packages where they are installed."""
    plain = bases(device)[base]
    backends = ("fused", "triton", "foreach") if device.type == "cuda" else ("foreach",)
    found: dict[str, Factory] = {
        f"mechanic, {backend}": lambda params, backend=backend: mechanize(plain(params), backend=backend)  # type: ignore[misc]
        for backend in backends
    }
    if device.type != "cuda" and base != "lion":
        as_it_comes = _bases(None)[base]
        found["base alone, fused"] = _bases("fused")[base]
        found["mechanic"] = lambda params: mechanize(as_it_comes(params))
    if base != "adamw":
        return found
    peers: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
        "mechanic_pytorch": lambda module, params: module.mechanize(torch.optim.AdamW)(params, lr=1.0),
        "prodigyopt": lambda module, params: module.Prodigy(params),
        "dadaptation": lambda module, params: module.DAdaptAdam(params),
        "schedulefree": _schedule_free,
    }
    for name, build in peers.items():
        module = _installed(name)
        if module is not None:
            found[name] = functools.partial(build, module)
    return found


def _schedule_free(module: Any, params: list[nn.Parameter]) -> Any:
    optimizer = module.AdamWScheduleFree(params)
    optimizer.train()
    return optimizer


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy from device memory to device memory."""
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
) -> Iterator[Result]:
    """Each rival's cost beside the base's, measured in turn so that both see the same machine.

    Args:
        shapes: Of the parameters.
        base: A key of `bases`.
        device: Where they are.
        dtype: Of the parameters.
        repeats: How often each is timed; the median counts.
        queued: Steps that are started before the device is waited for: 10 on a GPU, as in training, where the host
            runs ahead. 1 counts the host's part of every step, which a backward pass hides.
    """
    queued = queued or (10 if device.type == "cuda" else 1)
    plain, speed = {ALONE: bases(device)[base]}, copy_speed(device)
    for others in ({}, *({name: factory} for name, factory in rivals(base, device).items())):
        *_, result = _compare(shapes, {**plain, **others}, device=device, dtype=dtype, repeats=repeats, queued=queued)
        yield _against_limit(result, base, speed, itemsize=dtype.itemsize)


def _against_limit(result: Result, base: str, speed: float, *, itemsize: int) -> Result:
    path = "alone" if result.name == ALONE and base != "lion" else result.name.removeprefix("mechanic, ")
    moved = bytes_of(base, path, itemsize=itemsize)
    if moved is None:
        return result
    return replace(result, moved_bytes=moved, of_limit=moved * result.params / speed / result.seconds)


def _compare(
    shapes: Sequence[tuple[int, ...]],
    factories: dict[str, Factory],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    queued: int,
) -> Iterator[Result]:
    runs = {name: _Run(shapes, factory, device, dtype) for name, factory in factories.items()}
    for run in runs.values():
        run.warm_up()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run.timed(queued))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, run in runs.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[ALONE], strict=True))
        yield Result(
            name=name,
            params=run.count,
            tensors=len(shapes),
            seconds=medians[name],
            ratio=ratio,
            state_bytes=run.state_bytes() / run.count,
            transient_bytes=run.transient_bytes(),
            launches=run.launches(),
            collectives=0,
            moved_bytes=None,
            of_limit=None,
        )


class _Run:
    """Parameters with gradients, and an optimizer over them."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], factory: Factory, device: torch.device, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.params = [
            nn.Parameter(0.02 * torch.randn(shape, device=device, generator=generator).to(dtype)) for shape in shapes
        ]
        for p in self.params:
            p.grad = 1e-3 * torch.randn(p.shape, device=device, generator=generator).to(dtype)
        self.optimizer: Optimizer = factory(self.params)
        self.count = sum(p.numel() for p in self.params)

    def warm_up(self) -> None:
        for _ in range(3):
            self.optimizer.step()
        self._wait()

    def timed(self, queued: int) -> float:
        """Seconds a step, of several that are started before the device is waited for."""
        self._wait()
        start = time.perf_counter()
        for _ in range(queued):
            self.optimizer.step()
        self._wait()
        return (time.perf_counter() - start) / queued

    def state_bytes(self) -> int:
        tensors = (t for state in self.optimizer.state.values() for t in _tensors(state))
        return sum(t.numel() * t.element_size() for t in tensors)

    def transient_bytes(self) -> float | None:
        """The most that a step holds beyond what stays, in bytes a parameter; only CUDA keeps count."""
        if self.device.type != "cuda":
            return None
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.optimizer.step()
        self._wait()
        return (torch.cuda.max_memory_allocated(self.device) - before) / self.count

    def launches(self) -> int | None:
        """Kernels and copies that a step starts."""
        if self.device.type != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.optimizer.step()
            self._wait()
        return sum(int(event.count) for event in profile.key_averages() if event.device_type.name != "CPU")

    def _wait(self) -> None:
        _wait(self.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def table(results: Sequence[Result]) -> str:
    """Plain text, for a terminal."""
    head = ("params", "tensors", "optimizer", "ms a step", "ratio", "B/param", "of the limit", "state B/param",
            "transient B/param", "launches")  # fmt: skip
    rows = [head]
    for r in results:
        rows.append(
            (
                f"{r.params / 1e6:.0f}M",
                str(r.tensors),
                r.name,
                f"{r.seconds * 1e3:.3f}",
                f"{r.ratio:.3f}",
                "-" if r.moved_bytes is None else str(r.moved_bytes),
                "-" if r.of_limit is None else f"{r.of_limit:.2f}",
                f"{r.state_bytes:.2f}",
                "-" if r.transient_bytes is None else f"{r.transient_bytes:.3f}",
                "-" if r.launches is None else str(r.launches),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def plot(results: Sequence[Result], path: Path) -> None:
    """Time against parameters, and launches against tensors."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for name in dict.fromkeys(r.name for r in results):
        mine = sorted((r for r in results if r.name == name), key=lambda r: r.params)
        left.loglog([r.params for r in mine], [r.seconds * 1e3 for r in mine], "o-", label=name)
        if mine[0].launches is not None:
            right.plot([r.tensors for r in mine], [r.launches for r in mine], "o-", label=name)
    sizes = sorted({r.params for r in results})
    left.set_xticks(sizes, [f"{size / 1e6:.0f}M" if size >= 1e6 else str(size) for size in sizes])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    left.set(xlabel="parameters", ylabel="ms a step", title="time against parameters")
    right.set(xlabel="tensors", ylabel="launches a step", yscale="log", title="launches against tensors")
    if not right.lines:
        right.set_title("launches: counted on GPUs only")
    left.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mechanic_plugins.bench", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--base", choices=("adamw", "sgd", "lion"), default="adamw")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["124M"] if default == "cuda" else ["10M"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=25)
    help_queued = "steps started before the device is waited for: 10 on a GPU; 1 counts the host's part of every step"
    parser.add_argument("--queued", type=int, help=help_queued)
    parser.add_argument("--json", type=Path, help="write the results here, one object a line")
    parser.add_argument("--plot", type=Path, help="draw time and launches here (needs matplotlib)")
    parser.add_argument("--ranks", action="store_true", help="show only what the all-reduce costs, by NCCL's own model")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}: a median needs a value")
    if arguments.queued is not None and arguments.queued < 1:
        parser.error(f"--queued must be at least 1, got {arguments.queued}: no step would be timed")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes what was asked for."""
    arguments = _arguments(argv)
    if arguments.ranks:
        print(ranks_table())
        return 0
    device = torch.device(arguments.device)
    results: list[Result] = []
    for size in arguments.sizes:
        dtype, shapes = getattr(torch, arguments.dtype), gpt2_shapes(*SIZES[size])
        how: dict[str, Any] = {"dtype": dtype, "repeats": arguments.repeats, "queued": arguments.queued}
        for result in measure(shapes, arguments.base, device=device, **how):
            results.append(result)
            print(f"{size}: {result.name}: {result.ratio:.3f}", file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {where}, {arguments.base}, {arguments.dtype}. Ratio: to the base alone, same run. "
        "Limit: a copy of as many bytes."
    )
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
