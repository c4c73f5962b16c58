"""The cost of a step on this machine: `python examples/benchmarks/optimizer_step.py`.

Times the base alone and Mechanic around it in turn, by the default rule and the paper's, on tensors with the shapes
of a small MLP, GPT-2 or LoRA, and reports ratios. Similar packages are measured too if they are installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic_plugins.api import mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.rule.default import is_due

__all__ = ["BACKENDS", "SHAPES", "Result", "main", "measure", "rivals"]

Shapes = list[tuple[int, ...]]
Factory = Callable[[list[nn.Parameter]], Any]

ALONE, MAX_NORM = "base alone", 1.0
BACKENDS = ("fused", "triton", "foreach")
"""On a GPU: our own kernels, torch's fused base between our kernels, and torch operations that the host waits for."""
_PLACES = 6
"""Number of addresses that a gradient cycles through, as after `zero_grad()`."""


def _mlp(*widths: int) -> Shapes:
    return [shape for i, o in itertools.pairwise(widths) for shape in ((o, i), (o,))]


def _gpt2(width: int, layers: int, vocabulary: int = 50257) -> Shapes:
    layer: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *(layer * layers), (width,), (width,)]


def _lora(width: int = 4096, inner: int = 11008, layers: int = 32, rank: int = 8) -> Shapes:
    """LoRA on every linear layer of a 7B Llama."""
    linear = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    return [shape for outputs, inputs in linear * layers for shape in ((rank, inputs), (outputs, rank))]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "mlp6": lambda: _mlp(64, 128, 128, 10),
    "mlp26": lambda: _mlp(64, *[128] * 12, 10),
    "lora": _lora,
    "tiny": lambda: _gpt2(8, 1, 8),
    "10M": lambda: _gpt2(256, 8),
    "124M": lambda: _gpt2(768, 12),
    "355M": lambda: _gpt2(1024, 24),
    "774M": lambda: _gpt2(1280, 36),
    "1.56B": lambda: _gpt2(1600, 48),
}


@dataclass(frozen=True)
class Result:
    """The cost of one optimizer on one list of tensors. Bytes are per parameter."""

    shapes: str
    name: str
    params: int
    tensors: int
    seconds: float
    ratio: float
    """Of its time to that of the base alone in the same run."""
    host_seconds: float
    """Seconds until a step returns, with nothing queued before it."""
    state_bytes: float
    transient_bytes: float | None
    """Peak extra memory during a step; CUDA only."""
    launches: int | None
    """Number of kernels and copies; CUDA only."""
    measured_seconds: float | None = None
    """The time of a step that the default rule measures."""


def _base(name: str, form: str | None) -> Factory:
    """Builds a base; `form` is "fused", "foreach", or None for torch's choice."""
    fast: dict[str, Any] = {} if form is None else {form: True}
    built: dict[str, Factory] = {
        "adam": lambda params: torch.optim.Adam(params, lr=1e-3, **fast),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, **fast),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, **fast),
        "lion": lambda params: Lion(params, lr=1e-3),
    }
    return built[name]


def rivals(
    base: str, device: torch.device, *, small: bool, clip: bool = False, backends: Sequence[str] = BACKENDS
) -> dict[str, Factory]:
    """The base alone, Mechanic around it by either rule and with every backend, and similar installed packages."""
    on_gpu = device.type == "cuda"
    plain = _base(base, None if small else "fused" if on_gpu else "foreach")
    found: dict[str, Factory] = {ALONE: plain}

    def add(name: str, base: Factory = plain, **options: Any) -> None:
        norm = MAX_NORM if clip else None
        found[name] = lambda params: mechanize(base(params), max_grad_norm=norm, **options)

    for name, rule in (("mechanic", "relative"), ("mechanic, paper", "paper")):
        if not on_gpu:
            add(name, _base(base, None), rule=rule)
            continue
        for backend in backends:
            add(f"{name}, {backend}", rule=rule, backend=backend)
        add(f"{name}, bf16 delta", rule=rule, kept_dtype=torch.bfloat16)
    peers: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
        "mechanic_pytorch": lambda module, params: module.mechanize(torch.optim.AdamW)(params, lr=1.0),
        "prodigyopt": lambda module, params: module.Prodigy(params),
        "dadaptation": lambda module, params: module.DAdaptAdam(params),
        "schedulefree": lambda module, params: module.AdamWScheduleFree(params),
    }
    for name, build in peers.items() if base.startswith("adam") else ():
        try:
            found[name] = functools.partial(build, importlib.import_module(name))
        except ImportError:
            continue
    return found


def measure(
    name: str,
    base: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    repeats: int = 25,
    queued: int | None = None,
    clip: bool = False,
    backends: Sequence[str] = BACKENDS,
) -> Iterator[Result]:
    """Times every rival, alternating with the base alone so that both see the same load. Reports medians.

    Args:
        name: A key of `SHAPES`. The small MLPs are timed on one thread.
        base: "adam", "adamw", "sgd" or "lion".
        device: The parameters' device.
        dtype: The parameters' dtype.
        repeats: Number of timings.
        queued: Steps between synchronisations [10 on a GPU, as in training; 20 for the MLPs; 1].
        clip: Include clipping: Mechanic's own, or `clip_grad_norm_` before the step for all others.
        backends: Those to measure on a GPU.
    """
    small = name.startswith("mlp")
    queued = queued or (20 if small else 10 if device.type == "cuda" else 1)
    factories = rivals(base, device, small=small, clip=clip, backends=backends)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if small else threads)
    try:
        for rival, factory in factories.items():
            build = functools.partial(_Run, SHAPES[name](), device=device, dtype=dtype, clip=clip)
            run, alone = build(factory), build(factories[ALONE])
            times = [(run.timed(queued), alone.timed(queued)) for _ in range(repeats)]
            yield Result(
                shapes=name,
                name=rival,
                params=run.count,
                tensors=len(run.params),
                seconds=statistics.median(mine for mine, _ in times),
                ratio=1.0 if rival == ALONE else statistics.median(mine / other for mine, other in times),
                host_seconds=statistics.median(run.queueing() for _ in range(repeats)),
                state_bytes=run.state_bytes() / run.count,
                transient_bytes=run.transient_bytes(),
                launches=run.launches(),
                measured_seconds=run.measured(),
            )
    finally:
        torch.set_num_threads(threads)


class _Run:
    """Parameters with gradients, and their optimizer. Each step finds the gradients at other addresses."""

    def __init__(
        self, shapes: Shapes, factory: Factory, *, device: torch.device, dtype: torch.dtype, clip: bool
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        random = functools.partial(torch.randn, device=device, generator=generator)
        self.device = device
        self.params = [nn.Parameter(0.02 * random(shape).to(dtype)) for shape in shapes]
        grads = [1e-3 * random(p.shape).to(dtype) for p in self.params]
        self.rounds = itertools.cycle([_rotated(grads, count) for count in range(_PLACES)])
        self.optimizer: Optimizer = factory(self.params)
        if hasattr(self.optimizer, "train"):  # Schedule-Free
            self.optimizer.train()
        self.clips = clip and not isinstance(self.optimizer, MechanicOptimizer)
        self.count = sum(p.numel() for p in self.params)
        self.timed(4)

    def step(self) -> None:
        for p, grad in zip(self.params, next(self.rounds), strict=True):
            p.grad = grad
        if self.clips:
            nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=True)
        self.optimizer.step()

    def timed(self, queued: int) -> float:
        """Seconds per step, of steps that the default rule does not measure."""
        while any(self._is_measured(later) for later in range(queued)):
            self.step()
        self._wait()
        start = time.perf_counter()
        for _ in range(queued):
            self.step()
        self._wait()
        return (time.perf_counter() - start) / queued

    def _is_measured(self, later: int = 0) -> bool:
        if not isinstance(self.optimizer, MechanicOptimizer) or self.optimizer.settings.rule != "relative":
            return False
        return is_due(int(self.optimizer.metrics()["mechanic/steps"]) + 1 + later)

    def measured(self) -> float | None:
        """Seconds of the next step that the default rule measures, or None with another optimizer."""
        if not isinstance(self.optimizer, MechanicOptimizer) or self.optimizer.settings.rule != "relative":
            return None
        while not self._is_measured():
            self.step()
        self._wait()
        start = time.perf_counter()
        self.step()
        self._wait()
        return time.perf_counter() - start

    def queueing(self) -> float:
        while self._is_measured():
            self.step()
        self._wait()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def state_bytes(self) -> int:
        kept = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        return sum(t.numel() * t.element_size() for t in kept)

    def transient_bytes(self) -> float | None:
        if self.device.type != "cuda":
            return None
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.timed(1)
        return (torch.cuda.max_memory_allocated(self.device) - before) / self.count

    def launches(self) -> int | None:
        if self.device.type != "cuda":
            return None
        self.timed(20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.timed(1)
        return sum(int(event.count) for event in profile.key_averages() if event.device_type.name != "CPU")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rotated(grads: Sequence[Tensor], count: int) -> list[Tensor]:
    """The gradients, rotated by `count` places among parameters of the same shape."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, grad in enumerate(grads):
        alike.setdefault(tuple(grad.shape), []).append(index)
    found = list(grads)
    for indices in alike.values():
        for place, index in enumerate(indices):
            found[index] = grads[indices[(place + count) % len(indices)]]
    return found


def _table(results: Sequence[Result]) -> str:
    head = "shapes,params,tensors,optimizer,ms/step,ratio,ms host,state B/param,transient B/param,launches,ms measured"
    rows = [head.split(",")]
    for r in results:
        extra = ["-" if x is None else f"{x:.2f}" for x in (r.state_bytes, r.transient_bytes)]
        times = f"{r.seconds * 1e3:.3f}", f"{r.ratio:.3f}", f"{r.host_seconds * 1e3:.3f}"
        size = r.shapes, f"{r.params / 1e6:.2f}M", str(r.tensors), r.name
        measured = "-" if r.measured_seconds is None else f"{r.measured_seconds * 1e3:.2f}"
        rows.append([*size, *times, *extra, str(r.launches or "-"), measured])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    shapes_help = "mlp6 and mlp26: small MLPs; lora: a 7B Llama's, rank 8; others: GPT-2's of that size"
    default = ["124M"] if gpu else ["mlp6", "mlp26", "10M"]
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=default, help=shapes_help)
    parser.add_argument("--base", choices=("adam", "adamw", "sgd", "lion"), help="[adam for an MLP, else adamw]")
    parser.add_argument("--clip", action="store_true", help="clip to norm 1: clip_grad_norm_, or Mechanic itself")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="Mechanic's, on a GPU [all]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--queued", type=int, help="steps between synchronisations")
    parser.add_argument("--json", type=Path, help="write the results here, one JSON object per line")
    args = parser.parse_args(argv)
    for name in ("repeats", "queued"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    device, results = torch.device(args.device), []
    how = {"device": device, "dtype": getattr(torch, args.dtype), "clip": args.clip, "backends": args.backends}
    for name in args.shapes:
        base = args.base or ("adam" if name.startswith("mlp") else "adamw")
        for result in measure(name, base, repeats=args.repeats, queued=args.queued, **how):
            results.append(result)
            print(f"{name}: {result.name}: {result.ratio:.3f}", file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    clipped = ", clipped" if args.clip else ""
    print(f"torch {torch.__version__}, {where}, {args.dtype}{clipped}. Ratio: to the base alone in the same run.")
    print(_table(results))
    if args.json is not None:
        args.json.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
