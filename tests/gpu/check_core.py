"""Checks of the core that need a GPU; run by hand: `python tests/gpu/check_core.py`. Exits with 1 if a check fails.

Needs one CUDA GPU, torch with Triton, and this repository.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.passes.fused import FusedPlan

Build = Callable[[Any], torch.optim.Optimizer]
DEVICE = torch.device("cuda")
STEPS = 60
CLIP = 0.3

BASES: dict[str, Build] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True, weight_decay=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, fused=True, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}
LION_STEPS = 8
"""If a momentum is near 0, Lion's sign turns a rounding error into a whole step. Later, all weights differ a little."""


def make_net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def three_params() -> list[nn.Parameter]:
    """Parameters with preallocated zero gradients, as a CUDA graph needs."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((64, 33), (7,), (128, 128))]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def train(
    build: Build,
    *,
    dtype: torch.dtype = torch.float32,
    sync_free: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> Any:
    net = make_net(dtype)
    optimizer = mechanize(build(net.parameters()), **options)
    lrs = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in range(steps):
        x = torch.randn(128, 64, device=DEVICE, generator=generator).to(dtype)
        loss = nn.functional.cross_entropy(net(x).float(), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        with _no_synchronisation() if sync_free and step > 5 else _anything_goes():
            optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in net.parameters()]), optimizer


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _anything_goes() -> Iterator[None]:
    yield


def check_paths() -> Iterator[tuple[str, bool]]:
    """The paths end at the same weights, and do not wait for the device if the base takes its numbers there."""
    for name, build in BASES.items():
        steps = LION_STEPS if name == "lion" else STEPS
        expected, _ = train(build, backend="foreach", steps=steps)
        for backend in ("triton", "fused"):
            sync_free = backend == "fused" or name != "lion"
            weights, optimizer = train(build, backend=backend, sync_free=sync_free, steps=steps)
            said = "no synchronisation" if sync_free else "waits once a step"
            assert any(isinstance(p, FusedPlan) for p in optimizer._planner._plans.values()) == (backend == "fused")
            if name == "lion":
                apart = share_apart(weights, expected)
                yield f"lion, {backend}: {apart:.1e} of the weights apart after {steps} steps, {said}", apart < 1e-2
                continue
            distance = ((weights - expected).norm() / expected.norm()).item()
            yield f"{name}, {backend}: {distance:.1e} from torch operations, {said}", distance < 1e-5


def share_apart(weights: torch.Tensor, expected: torch.Tensor) -> float:
    return ((weights - expected).abs() > 1e-6).double().mean().item()


def train_clipped(build: Build, *, by_hand: bool, **options: Any) -> Any:
    """Trains with a quarter of the gradients shorter than the norm."""
    net, sync_free = make_net(options.pop("dtype", torch.float32)), options.pop("sync_free", False)
    steps = options.pop("steps", STEPS)
    if not by_hand:
        options["max_grad_norm"] = CLIP
    optimizer = mechanize(build(net.parameters()), **options)
    generator, norms = torch.Generator(DEVICE).manual_seed(1), []
    for step in range(steps):
        x = torch.randn(128, 64, device=DEVICE, generator=generator).to(next(net.parameters()).dtype)
        loss = nn.functional.cross_entropy(net(x).float(), x[:, :10].argmax(1))
        optimizer.zero_grad()
        (loss if step % 4 else 0.01 * loss).backward()
        if by_hand:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP))
        with _no_synchronisation() if sync_free and step > 5 else _anything_goes():
            optimizer.step()
            if not by_hand:
                norms.append(optimizer.grad_norm)
    weights = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    return weights, torch.stack(norms).double(), optimizer


def check_clipping() -> Iterator[tuple[str, bool]]:
    """A step with max_grad_norm equals clip_grad_norm_ before a step, and waits no more often for the device."""
    for name, build in BASES.items():
        # float64 for Lion, where rounding the factor differently changes a whole step if a momentum is near 0
        dtype = torch.float64 if name == "lion" else torch.float32
        expected, norms, _ = train_clipped(build, by_hand=True, backend="foreach", dtype=dtype)
        some_are_clipped = bool((norms > CLIP).any() and (norms < CLIP).any())
        for backend in ("foreach", "triton", "fused"):
            sync_free = backend == "fused" or (backend == "triton" and name != "lion")
            if name == "lion" and backend == "fused":
                continue  # supports only float32
            weights, seen, _ = train_clipped(build, by_hand=False, backend=backend, sync_free=sync_free, dtype=dtype)
            distance = ((weights - expected).norm() / expected.norm()).item()
            off = ((seen - norms).norm() / norms.norm()).item()
            yield (
                f"clipping, {name}, {backend}: weights {distance:.1e}, norms {off:.1e} from clip_grad_norm_",
                some_are_clipped and distance < 1e-5 and off < 1e-5,
            )
    by_hand, by_itself = (
        train_clipped(BASES["lion"], by_hand=by_hand, backend="fused", steps=LION_STEPS)[0] for by_hand in (True, False)
    )
    apart = share_apart(by_hand, by_itself)
    yield f"clipping, lion, fused: {apart:.1e} of the weights apart after {LION_STEPS} steps", apart < 1e-2
    for backend in ("triton", "fused"):
        ends = [
            train_clipped(BASES["adamw"], by_hand=by_hand, backend=backend, dtype=torch.bfloat16)[0]
            for by_hand in (True, False)
        ]
        distance = ((ends[0] - ends[1]).norm() / ends[0].norm()).item()
        yield f"clipping bf16 gradients, {backend}: {distance:.1e} from clip_grad_norm_", distance < 2e-2


def check_skipped_clipping() -> Iterator[tuple[str, bool]]:
    """A non-finite norm leaves weights, state and gradients alone, without waiting for the device."""
    for backend in ("triton", "fused"):
        params = [nn.Parameter(torch.randn(300, 7, device=DEVICE)), nn.Parameter(torch.randn(5, device=DEVICE))]
        optimizer = mechanize(torch.optim.AdamW(params, fused=True), backend=backend, max_grad_norm=CLIP)
        for step in range(6):
            for p in params:
                p.grad = torch.ones_like(p)
            if step == 5:
                params[0].grad[7, 3] = float("inf")  # type: ignore[index]
            before = [*_everything(optimizer), params[0].grad.clone(), params[1].grad.clone()]  # type: ignore[union-attr]
            optimizer.step()
        after = [*_everything(optimizer), params[0].grad, params[1].grad]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)
        yield f"clipping an infinity, {backend}: nothing is touched: {same}", same


def check_clipping_in_a_graph() -> Iterator[tuple[str, bool]]:
    """Replays clip by the norm of their own gradients, and `grad_norm` follows them."""
    ends, norms = [], []
    for capture in (False, True):
        params, lr = three_params(), torch.tensor(1e-2, device=DEVICE)
        base = torch.optim.AdamW(params, lr=lr, fused=True, capturable=True)
        optimizer, graph = mechanize(base, max_grad_norm=100.0), torch.cuda.CUDAGraph()
        for step in range(20):
            for p in params:
                p.grad.copy_((p.detach() - step) / (1 + step % 4) ** 4)  # type: ignore[union-attr]
            if capture and step == 5:
                with torch.cuda.graph(graph):
                    optimizer.step()
            if capture and step >= 5:
                graph.replay()
            else:
                optimizer.step()
            norms.append(optimizer.grad_norm.item())
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    distance = ((ends[0] - ends[1]).norm() / ends[0].norm()).item()
    alike = all(abs(a - b) <= 1e-4 * a for a, b in zip(norms[:20], norms[20:], strict=True))
    said = f"clipping in a CUDA graph: {distance:.1e} from uncaptured steps, norms alike: {alike}"
    yield said, distance < 1e-6 and alike


def check_bf16() -> Iterator[tuple[str, bool]]:
    for backend in ("triton", "fused"):
        _, optimizer = train(BASES["adamw"], dtype=torch.bfloat16, backend=backend, sync_free=True)
        off = sum(int((optimizer.state[p]["mechanic_master"].to(p.dtype) != p).sum()) for p in optimizer._params())
        yield f"bf16 weights, {backend}: {off} of them not the rounding of their masters", off == 0


def check_references_in_bf16() -> Iterator[tuple[str, bool]]:
    expected, plain = train(BASES["adamw"], backend="foreach", delta_dtype=torch.bfloat16)
    for backend in ("triton", "fused"):
        weights, optimizer = train(BASES["adamw"], backend=backend, sync_free=True, delta_dtype=torch.bfloat16)
        kept = {state["mechanic_ref"].dtype for state in optimizer.state.values()}
        distance = ((weights - expected).norm() / expected.norm()).item()
        scales = (optimizer.scale / plain.scale).item()
        said = f"references in bf16, {backend}: {distance:.1e} from torch operations, scale {scales:.4f} of theirs"
        yield said, kept == {torch.bfloat16} and distance < 1e-3 and abs(scales - 1) < 0.02


def check_skipped_step() -> Iterator[tuple[str, bool]]:
    for backend in ("triton", "fused"):
        params = [nn.Parameter(torch.randn(300, 7, device=DEVICE)), nn.Parameter(torch.randn(5, device=DEVICE))]
        optimizer = mechanize(torch.optim.AdamW(params, lr=1e-2, fused=True), backend=backend)
        before: list[Tensor] = []
        for step in range(5):
            for p in params:
                p.grad = torch.ones_like(p)
            if step == 4:
                params[0].grad[7, 3] = float("nan")  # type: ignore[index]
                before = _everything(optimizer)
            with _no_synchronisation() if step > 2 else _anything_goes():
                optimizer.step()
        same = all(map(torch.equal, before, _everything(optimizer)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skipped = optimizer.metrics()["mechanic/skipped_steps"]
        yield (
            f"a NaN, {backend}: weights, moments, tuner untouched: {same}, counted: {skipped:.0f}",
            same and skipped == 1,
        )


def _everything(optimizer: MechanicOptimizer) -> list[Tensor]:
    states = [t for p in optimizer._params() for t in optimizer.state[p].values()]
    return [t.clone() for t in (*optimizer._params(), *states, *optimizer.tuner)]


def check_graph() -> Iterator[tuple[str, bool]]:
    """Replays of a captured step end at the same weights as uncaptured steps."""
    results = []
    for capture in (False, True):
        params, lr = three_params(), torch.tensor(1e-2, device=DEVICE)
        optimizer = mechanize(torch.optim.AdamW(params, lr=lr, fused=True, capturable=True))
        graph = torch.cuda.CUDAGraph()
        for step in range(30):
            for p in params:
                p.grad.copy_(p.detach() - step)  # type: ignore[union-attr]
            lr.fill_(1e-2 * min(1.0, (step + 1) / 15))  # a warm-up visible to the graph
            if capture and step == 5:
                with torch.cuda.graph(graph):
                    optimizer.step()
            if capture and step >= 5:
                graph.replay()
            else:
                optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in params]))
    distance = ((results[0] - results[1]).norm() / results[0].norm()).item()
    yield f"CUDA graph: {distance:.1e} from uncaptured steps", distance < 1e-6


def check_compile() -> Iterator[tuple[str, bool]]:
    net = nn.Linear(8, 8, device=DEVICE)
    optimizer = mechanize(torch.optim.AdamW(net.parameters(), fused=True))

    @torch.compile
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(5):
        step(torch.randn(4, 8, device=DEVICE))
    steps = optimizer.metrics()["mechanic/steps"]
    yield f"torch.compile around a training step: {steps:.0f} steps of 5", steps == 5


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = False
    clipping = (check_clipping, check_skipped_clipping, check_clipping_in_a_graph)
    for check in (
        check_paths,
        *clipping,
        check_bf16,
        check_references_in_bf16,
        check_skipped_step,
        check_graph,
        check_compile,
    ):
        for said, holds in check():
            print("ok    " if holds else "FAILED", said, flush=True)
            failed |= not holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
