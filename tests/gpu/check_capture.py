"""A step that the user captures in a CUDA graph. Exits with 1 on a failure.

Run by hand: `python tests/gpu/check_capture.py`. Needs one CUDA GPU and torch with Triton. Every check
runs under both rules, with our own fused kernels and around torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from check_core import DEVICE, RULES, measured_at, relative, run
from torch import Tensor, nn

from mechanic_plugins import mechanize

BACKENDS = ("fused", "triton")
FIRST = range(1, 6)
WAYS: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {
    "to the end": (range(5, 30), FIRST, range(1, 30)),
    "for a while": (range(10, 20), FIRST, FIRST),
    "with measured steps between": ((*range(5, 9), *range(13, 30)), (*FIRST, 10, 11, 12, 13), range(1, 11)),
}
"""Which steps are replayed, counted from 0; and which ones are measured, counted from 1: without a graph, and with one,
which is never measured and counts as one step, however often it is replayed."""


def three_params() -> list[nn.Parameter]:
    """Parameters with preallocated zero gradients, as a CUDA graph needs."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((64, 33), (7,), (128, 128))]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def train(*, captured: Sequence[int], steps: int = 30, **options: Any) -> tuple[Tensor, list[float], float]:
    """Weights, norms and scale at the end. The steps in `captured` replay a graph; the gradients have many lengths."""
    params, lr = three_params(), torch.tensor(1e-2, device=DEVICE)
    optimizer = mechanize(torch.optim.AdamW(params, lr=lr, fused=True, capturable=True), **options)
    graph, norms = torch.cuda.CUDAGraph(), []
    for step in range(steps):
        for p in params:
            assert p.grad is not None
            p.grad.copy_((p.detach() - step) / (1 + step % 4) ** 2)
        lr.fill_(1e-2 * min(1.0, (step + 1) / 15))  # a warm-up that the graph sees
        if captured and step == captured[0]:
            with torch.cuda.graph(graph):
                optimizer.step()
        if step in captured:
            graph.replay()
        else:
            optimizer.step()
        norms.append(optimizer.grad_norm.item())
        if captured and step == captured[-1]:  # the graph must keep reading what it was captured with
            optimizer.zero_grad()
            for p in params:
                p.grad = torch.zeros_like(p)
    return torch.cat([p.detach().flatten() for p in params]), norms, optimizer.scale.item()


def check_replays(rule: str) -> Iterator[tuple[str, bool]]:
    """Replays end where uncaptured steps do: to the last step, followed by uncaptured ones, and clipped."""
    for backend in BACKENDS:
        for clip in (None, 100.0):
            options = {"backend": backend, "max_grad_norm": clip, **RULES[rule]}
            for said, (captured, due, counted) in WAYS.items():
                with measured_at(*due):
                    weights, norms, scale = train(captured=(), **options)
                with measured_at(*counted):
                    replayed, seen, other = train(captured=captured, **options)
                distance, alike = relative(replayed, weights), torch.allclose(torch.tensor(seen), torch.tensor(norms))
                yield (
                    f"{backend}, clipped to {clip}, replays {said}: {distance:.1e} from uncaptured steps, norms alike: "
                    f"{alike}, scale {other:.6g}",
                    distance < 1e-6 and alike and abs(other - scale) <= 1e-6 * scale,
                )


def check_too_early(rule: str) -> Iterator[tuple[str, bool]]:
    """The first step needs the host, and says so in a capture."""
    optimizer = mechanize(torch.optim.AdamW(three_params(), fused=True, capturable=True), **RULES[rule])
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    except RuntimeError as error:
        said = str(error)
    yield f"a capture of the first step is refused: {said[:60]}", "can be captured" in said


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    sys.exit(run(CHECKS))
