"""The cost of a step on this machine: `python -m mechanic_plugins.bench`.

One run times the base alone and Mechanic around it, alternately, on tensors with the shapes of GPT-2. It reports ratios
to the base, and to the time that a copy of the same number of bytes takes on the same device. Similar packages are
measured too if they are installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mechanic_plugins.bench.costs import ranks_table
from mechanic_plugins.bench.optimizers import bases, rivals
from mechanic_plugins.bench.report import plot, table
from mechanic_plugins.bench.timing import Result, copy_speed, measure

__all__ = ["Result", "bases", "copy_speed", "gpt2_shapes", "main", "measure", "plot", "rivals", "table"]

SIZES = {
    "tiny": (64, 2),
    "10M": (256, 8),
    "124M": (768, 12),
    "355M": (1024, 24),
    "774M": (1280, 36),
    "1.56B": (1600, 48),
}
"""Width and layers."""


def gpt2_shapes(width: int, layers: int, *, vocabulary: int = 50257) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2 of this size, in its order."""
    layer: list[tuple[int, ...]] = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *(layer * layers), (width,), (width,)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mechanic_plugins.bench", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--base", choices=("adamw", "sgd", "lion"), default="adamw")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["124M"] if default == "cuda" else ["10M"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=25)
    help_queued = "steps queued between synchronisations: 10 on a GPU; 1 adds the host's share of every step"
    parser.add_argument("--queued", type=int, help=help_queued)
    parser.add_argument("--json", type=Path, help="write the results here, one JSON object per line")
    parser.add_argument("--plot", type=Path, help="plot time and launches here (needs matplotlib)")
    parser.add_argument("--ranks", action="store_true", help="only print NCCL's latency model of the all-reduce")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}: a median needs a value")
    if arguments.queued is not None and arguments.queued < 1:
        parser.error(f"--queued must be at least 1, got {arguments.queued}: no step would be timed")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes the files asked for."""
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
        f"torch {torch.__version__}, {where}, {arguments.base}, {arguments.dtype}. "
        "Ratio: to the base alone in the same run. Limit: a copy of as many bytes."
    )
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0
