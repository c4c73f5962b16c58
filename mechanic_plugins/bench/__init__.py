"""The cost of a step on this machine: `python -m mechanic_plugins.bench`.

One run times the base alone and Mechanic around it, alternately, on tensors with the shapes of GPT-2 or of LoRA, with
or without clipping. It reports ratios to the base, and to the time that a copy of the same number of bytes takes on the
same device. Similar packages are measured too if they are installed. `--scale` measures one rank of many.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mechanic_plugins.bench.costs import ranks_table
from mechanic_plugins.bench.optimizers import bases, rivals
from mechanic_plugins.bench.report import plot, table
from mechanic_plugins.bench.scale import NODE, scale_table
from mechanic_plugins.bench.shapes import SIZES, gpt2_shapes, lora_shapes
from mechanic_plugins.bench.timing import Result, copy_speed, count_launches, measure

__all__ = ["Result", "bases", "copy_speed", "count_launches", "main", "measure", "plot", "rivals", "table"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mechanic_plugins.bench", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--base", choices=("adamw", "sgd", "lion"), default="adamw")
    parser.add_argument("--shapes", choices=("gpt2", "lora"), default="gpt2", help="lora: all of a 7B Llama, rank 8")
    sizes = ["124M"] if default == "cuda" else ["10M"]
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=sizes, help="of a GPT-2")
    parser.add_argument("--clip", action="store_true", help="clip to norm 1: clip_grad_norm_, or Mechanic by itself")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=25)
    help_queued = "steps queued between synchronisations: 10 on a GPU; 1 adds the host's share of every step"
    parser.add_argument("--queued", type=int, help=help_queued)
    parser.add_argument("--json", type=Path, help="write the results here, one JSON object per line")
    parser.add_argument("--plot", type=Path, help="plot time and launches here (needs matplotlib)")
    parser.add_argument("--ranks", action="store_true", help="only print NCCL's latency model of the all-reduce")
    help_scale = (
        "only measure the host's share of a sharded step of a GPT-2 124M on so many ranks, of which one is real"
    )
    parser.add_argument("--scale", type=int, nargs="+", metavar="RANKS", help=help_scale)
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}: a median needs a value")
    if arguments.queued is not None and arguments.queued < 1:
        parser.error(f"--queued must be at least 1, got {arguments.queued}: no step would be timed")
    if odd := [ranks for ranks in arguments.scale or () if ranks < 1 or ranks % NODE]:
        parser.error(f"--scale must be multiples of {NODE}, got {odd[0]}: ranks come in nodes of {NODE}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes the files asked for."""
    arguments = _arguments(argv)
    if arguments.ranks:
        print(ranks_table())
        return 0
    if arguments.scale:
        print(scale_table(arguments.scale, repeats=arguments.repeats))
        return 0
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    how: dict[str, Any] = {"device": device, "dtype": dtype, "clip": arguments.clip}
    lists = {size: gpt2_shapes(*SIZES[size]) for size in arguments.sizes}
    timed: list[tuple[list[tuple[int, ...]], Result]] = []
    for size, shapes in ({"LoRA": lora_shapes()} if arguments.shapes == "lora" else lists).items():
        for result in measure(shapes, arguments.base, repeats=arguments.repeats, queued=arguments.queued, **how):
            timed.append((shapes, result))
            print(f"{size}: {result.name}: {result.ratio:.3f}", file=sys.stderr, flush=True)
    results = [
        replace(result, launches=count_launches(shapes, arguments.base, result.name, **how)) for shapes, result in timed
    ]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {where}, {arguments.base}, {arguments.dtype}"
        f"{', clipped' if arguments.clip else ''}. "
        "Ratio: to the base alone in the same run. Limit: a copy of as many bytes."
    )
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0
