"""What a step must cost: the bytes it moves, counted, and the time its one all-reduce takes, modelled."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["all_reduce_microseconds", "bytes_of", "ranks_table"]

_MOMENTS = {"adamw": 2, "sgd": 1, "lion": 1}

# Assumed, not measured: what NCCL's own tuner takes for small messages (its LL protocol; `baseLat` and `hwLat` in
# src/graph/tuning.cc), in microseconds: once, for each hop inside a node (NVLink), for each hop between nodes.
_TREE = 6.8, 0.6, 5.0
_RING = 6.6, 0.6, 2.7


def bytes_of(base: str, path: str, *, itemsize: int = 4) -> int | None:
    """Bytes a parameter that a step moves through memory at least, each thing read or written once.

    Args:
        base: "adamw", "sgd" (with momentum) or "lion".
        path: "alone", "fused" or "triton" (around any base); None is the answer for paths of many small operations.
        itemsize: Of weights, gradients and moments; delta has 4 bytes, and weights below that a reference beside it.
    """
    if path not in ("alone", "fused", "triton"):
        return None
    update = itemsize * (2 + 1 + 2 * _MOMENTS[base])  # weights and moments both ways, the gradient one
    delta = 4 + 4 + (2 * itemsize if itemsize < 4 else 0)
    sums = itemsize + 4  # the gradient and delta: the move leaves what else they need
    if path == "alone":
        return update
    if path == "fused":
        return sums + update + delta
    snapshot, move = 2 * itemsize, 3 * itemsize + delta
    return sums + snapshot + update + move


def all_reduce_microseconds(ranks: int, *, gpus: int = 8) -> dict[str, float]:
    """Latency of an all-reduce of a few bytes on nodes of so many GPUs.

    NCCL's model of a tree and of a ring, without its surcharge on a ring's hops inside nodes; levels are rounded up.
    """
    nodes = max(1, math.ceil(ranks / gpus))
    inside = min(ranks, gpus) - 1
    base, near, far = _TREE
    tree = base + 2 * (inside * near + math.ceil(math.log2(nodes)) * far)
    base, near, far = _RING
    between = 2 * (nodes - 1)
    return {"tree": tree, "ring": base + (2 * (ranks - 1) - between) * near + between * far}


def ranks_table(ranks: Sequence[int] = (8, 64, 256, 1024, 4096, 10000)) -> str:
    """Markdown."""
    lines = ["| ranks, 8 a node | tree | ring | faster |", "|---|---|---|---|"]
    for count in ranks:
        times = all_reduce_microseconds(count)
        best = min(times, key=times.__getitem__)
        lines.append(f"| {count:,} | {times['tree']:.0f} us | {times['ring']:,.0f} us | {best} |")
    return "\n".join(lines)
