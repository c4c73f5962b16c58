"""Checks of both rules that need a GPU; run by hand: `python tests/gpu/check_core.py`. Exits with 1 if a check fails.

Needs one CUDA GPU, torch with Triton, and this repository.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, Settings, mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.optimizer import step as module

Build = Callable[[Any], torch.optim.Optimizer]
DEVICE = torch.device("cuda")
STEPS = 60
CLIP = 0.3

RULES: dict[str, dict[str, Any]] = {"default": {}, "paper": {"settings": Settings(rule="paper", s_init=1e-4)}}
APART = {"default": 1e-5, "paper": 1e-4}
"""How far the weights may be from those of torch operations: a published scale also multiplies what was rounded."""
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
        may_wait = not sync_free or step <= 5 or optimizer.is_step_measured
        with _anything_goes() if may_wait else _no_synchronisation():
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


@contextmanager
def measured_at(*steps: int) -> Iterator[None]:
    """Measures only these steps, counted from 1. The host decides a measured step, usually each of the first ten."""
    before, module.is_due = module.is_due, lambda step: step in steps
    try:
        yield
    finally:
        module.is_due = before


def check_paths(rule: str) -> Iterator[tuple[str, bool]]:
    """The paths end at the same weights, and do not wait for the device if the base takes its numbers there."""
    for name, build in BASES.items():
        if name == "lion":
            with measured_at(1, 2, 6):
                yield from _check_lion(build, rule)
            continue
        expected, _ = train(build, backend="foreach", **RULES[rule])
        for backend in ("triton", "fused"):
            weights, _ = train(build, backend=backend, sync_free=True, **RULES[rule])
            said = "no synchronisation between measurements"
            distance = relative(weights, expected)
            yield f"{name}, {backend}: {distance:.1e} from torch operations, {said}", distance < APART[rule]


def _check_lion(build: Build, rule: str) -> Iterator[tuple[str, bool]]:
    expected, _ = train(build, backend="foreach", steps=LION_STEPS, **RULES[rule])
    for backend, sync_free in (("triton", False), ("fused", True)):
        weights, _ = train(build, backend=backend, sync_free=sync_free, steps=LION_STEPS, **RULES[rule])
        said, apart = "no synchronisation" if sync_free else "waits once a step", share_apart(weights, expected)
        yield f"lion, {backend}: {apart:.1e} of the weights apart after {LION_STEPS} steps, {said}", apart < 1e-2


def relative(weights: Tensor, expected: Tensor) -> float:
    return ((weights - expected).norm() / expected.norm()).item()


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
        may_wait = not sync_free or step <= 5 or optimizer.is_step_measured
        with _anything_goes() if may_wait else _no_synchronisation():
            optimizer.step()
            if not by_hand:
                norms.append(optimizer.grad_norm)
    weights = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    return weights, torch.stack(norms).double(), optimizer


def check_clipping(rule: str) -> Iterator[tuple[str, bool]]:
    """A step with max_grad_norm equals clip_grad_norm_ before a step, and waits no more often for the device."""
    options = RULES[rule]
    for name, build in BASES.items():
        # float64 for Lion, where rounding the factor differently changes a whole step if a momentum is near 0
        dtype = torch.float64 if name == "lion" else torch.float32
        expected, norms, _ = train_clipped(build, by_hand=True, backend="foreach", dtype=dtype, **options)
        some_are_clipped = bool((norms > CLIP).any() and (norms < CLIP).any())
        for backend in ("foreach", "triton", "fused"):
            sync_free = backend == "fused" or (backend == "triton" and name != "lion")
            if name == "lion" and backend == "fused":
                continue  # supports only float32
            how = {"backend": backend, "sync_free": sync_free, "dtype": dtype, **options}
            weights, seen, _ = train_clipped(build, by_hand=False, **how)
            distance, off = relative(weights, expected), relative(seen, norms)
            yield (
                f"clipping, {name}, {backend}: weights {distance:.1e}, norms {off:.1e} from clip_grad_norm_",
                some_are_clipped and max(distance, off) < APART[rule],
            )
    with measured_at(1, 2, 6):
        by_hand, by_itself = (
            train_clipped(BASES["lion"], by_hand=by_hand, backend="fused", steps=LION_STEPS, **options)[0]
            for by_hand in (True, False)
        )
    apart = share_apart(by_hand, by_itself)
    yield f"clipping, lion, fused: {apart:.1e} of the weights apart after {LION_STEPS} steps", apart < 1e-2
    for backend in ("triton", "fused"):
        ends = [
            train_clipped(BASES["adamw"], by_hand=by_hand, backend=backend, dtype=torch.bfloat16, **options)[0]
            for by_hand in (True, False)
        ]
        distance = relative(*ends)
        yield f"clipping bf16 gradients, {backend}: {distance:.1e} from clip_grad_norm_", distance < 2e-2


def check_bf16(rule: str) -> Iterator[tuple[str, bool]]:
    """16-bit weights are the rounding of their masters, or of reference + scale * Delta."""
    for backend in ("triton", "fused"):
        sync_free = rule == "default" or backend == "fused"
        _, optimizer = train(BASES["adamw"], dtype=torch.bfloat16, backend=backend, sync_free=sync_free, **RULES[rule])
        off = 0
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            kept = optimizer.state[p]
            if rule == "default":
                off += int((kept["mechanic_master"].to(p.dtype) != p).sum())
                continue
            exact = torch.addcmul(kept["mechanic_ref"].float(), kept["mechanic_delta"], optimizer.scale.float())
            off += int(((exact - p.float()).abs() > 2**-8 * exact.abs() + 1e-6).sum())
        yield f"bf16 weights, {backend}: {off} of them not roundings", off == 0


def check_what_is_kept_in_bf16(rule: str) -> Iterator[tuple[str, bool]]:
    """References by rounding to the nearest; Delta by rounding at random, and so only on average equal."""
    options, slot = {**RULES[rule], "kept_dtype": torch.bfloat16}, "ref" if rule == "default" else "delta"
    limit, off_by = (1e-3, 0.02) if rule == "default" else (2e-2, 0.1)
    expected, plain = train(BASES["adamw"], backend="foreach", **options)
    for backend in ("triton", "fused"):
        weights, optimizer = train(BASES["adamw"], backend=backend, sync_free=True, **options)
        kept = {state[f"mechanic_{slot}"].dtype for state in optimizer.state.values()}
        distance, scales = relative(weights, expected), (optimizer.scale / plain.scale).item()
        said = f"{slot} in bf16, {backend}: {distance:.1e} from torch operations, scale {scales:.4f} of theirs"
        yield said, kept == {torch.bfloat16} and distance < limit and abs(scales - 1) < off_by


def check_skipped_step(rule: str) -> Iterator[tuple[str, bool]]:
    """A non-finite gradient leaves weights, state, tuner and gradients alone, without waiting for the device."""
    for backend, clip in (("triton", None), ("fused", None), ("triton", CLIP), ("fused", CLIP)):
        params = [nn.Parameter(torch.randn(300, 7, device=DEVICE)), nn.Parameter(torch.randn(5, device=DEVICE))]
        base = torch.optim.AdamW(params, lr=1e-2, fused=True)
        optimizer = mechanize(base, backend=backend, max_grad_norm=clip, **RULES[rule])
        before: list[Tensor] = []
        for step in range(13):  # the first ten are measured
            for p in params:
                p.grad = torch.ones_like(p)
            if step == 12:
                params[0].grad[7, 3] = float("nan")  # type: ignore[index]
                before = _everything(optimizer)
            with _no_synchronisation() if step > 10 else _anything_goes():
                optimizer.step()
        same = all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, _everything(optimizer), strict=True)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skipped = optimizer.metrics()["mechanic/skipped_steps"]
        said = f"a NaN, {backend}, clipped to {clip}: nothing is touched: {same}, counted: {skipped:.0f}"
        yield said, same and skipped == 1


def check_tiny_lr(rule: str) -> Iterator[tuple[str, bool]]:
    """The update that a published rule reads off the weights keeps its digits at lr=1e-7."""
    if rule == "default":
        return
    ends = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64).to(DEVICE, dtype))
        optimizer = mechanize(torch.optim.AdamW([p], lr=1e-7, fused=True), backend="triton", **RULES[rule])
        for _ in range(8):
            p.grad = torch.randn(64, 64).to(DEVICE, dtype)
            optimizer.step()
        ends.append(optimizer.state[p]["mechanic_delta"].double())
    yield f"lr=1e-7: {relative(ends[1], ends[0]):.1e} from float64", relative(ends[1], ends[0]) < 1e-5


def check_memory(rule: str) -> Iterator[tuple[str, bool]]:
    """A step copies at most half a GiB of the weights at once, and one that is measured all of them."""
    params = [nn.Parameter(torch.zeros(1 << 26, device=DEVICE)) for _ in range(8)]  # 256 MiB each
    for p in params:
        p.grad = torch.ones_like(p)
    for backend in ("triton", "fused"):
        optimizer = mechanize(torch.optim.SGD(params, lr=1e-3, fused=True), backend=backend, **RULES[rule])
        for step in range(12):
            torch.cuda.synchronize()
            before, is_measured = torch.cuda.memory_allocated(), optimizer.is_step_measured
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            more = (torch.cuda.max_memory_allocated() - before) / 2**20
            if step in (7, 11):
                said = f"transient memory, {backend}, measured: {is_measured}: {more:.0f} MiB for 2 GiB of weights"
                yield said, more <= (2049 + 512 if is_measured else 513)


def _everything(optimizer: MechanicOptimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for t in (p.grad, *optimizer.state[p].values())]
    return [t.detach().clone() for t in (*params, *states, *optimizer.tuner)]


def check_compile(rule: str) -> Iterator[tuple[str, bool]]:
    net = nn.Linear(8, 8, device=DEVICE)
    optimizer = mechanize(torch.optim.AdamW(net.parameters(), fused=True), **RULES[rule])

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


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def run(checks: Iterable[Callable[[str], Iterator[tuple[str, bool]]]]) -> int:
    """Makes each check under both rules. Returns 1 if one fails."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = False
    for check in checks:
        for rule in RULES:
            try:
                for said, holds in check(rule):
                    print("ok    " if holds else "FAILED", f"{rule}: {said}", flush=True)
                    failed |= not holds
            except Exception:
                failed = True
                print("FAILED", f"{rule}: {check.__name__}", traceback.format_exc(), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run(CHECKS))
