"""Lower bounds on the cost of a step: the bytes it moves, and a latency model of its one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["all_reduce_microseconds", "bytes_of", "ranks_table"]

_MOMENTS = {"adamw": 2, "sgd": 1, "lion": 1}

# Not measured: the constants of NCCL's own tuner for small messages (LL protocol; `baseLat` and `hwLat` in
# src/graph/tuning.cc), in microseconds: fixed, per hop inside a node (NVLink), per hop between nodes.
_TREE = 6.8, 0.6, 5.0
_RING = 6.6, 0.6, 2.7


def bytes_of(base: str, path: str, *, itemsize: int = 4) -> int | None:
    """The fewest bytes per parameter that a step can move, with every value read or written once.

    Args:
        base: "adamw", "sgd" (with momentum) or "lion".
        path: "alone", "fused" or "triton" (around any base). For any other path the answer is None: it consists of many
            small operations.
        itemsize: Bytes per weight, gradient and moment. Delta takes 4, and 16-bit weights need a reference copy.
    """
    if path not in ("alone", "fused", "triton"):
        return None
    update = itemsize * (2 + 1 + 2 * _MOMENTS[base])  # weights and moments are read and written, the gradient is read
    delta = 4 + 4 + (2 * itemsize if itemsize < 4 else 0)
    sums = itemsize + 4  # gradient and delta; the move caches the rest
    if path == "alone":
        return update
    if path == "fused":
        return sums + update + delta
    snapshot, move = 2 * itemsize, 3 * itemsize + delta
    return sums + snapshot + update + move


def all_reduce_microseconds(ranks: int, *, gpus: int = 8) -> dict[str, float]:
    """Latency of an all-reduce of a few bytes, on nodes with `gpus` GPUs each.

    NCCL's model of a tree and of a ring, without its surcharge for a ring's hops inside nodes. Tree levels are rounded
    up.
    """
    nodes = max(1, math.ceil(ranks / gpus))
    inside = min(ranks, gpus) - 1
    base, near, far = _TREE
    tree = base + 2 * (inside * near + math.ceil(math.log2(nodes)) * far)
    base, near, far = _RING
    between = 2 * (nodes - 1)
    return {"tree": tree, "ring": base + (2 * (ranks - 1) - between) * near + between * far}


def ranks_table(ranks: Sequence[int] = (8, 64, 256, 1024, 4096, 10000)) -> str:
    """`all_reduce_microseconds` as a Markdown table."""
    lines = ["| ranks, 8 a node | tree | ring | faster |", "|---|---|---|---|"]
    for count in ranks:
        times = all_reduce_microseconds(count)
        best = min(times, key=times.__getitem__)
        lines.append(f"| {count:,} | {times['tree']:.0f} us | {times['ring']:,.0f} us | {best} |")
    return "\n".join(lines)
