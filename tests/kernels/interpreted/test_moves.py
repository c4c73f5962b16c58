"""The kernels that move weights, against torch's own optimizers in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from kernel_tensors import DEVICE, EPS, SCALE, SHAPES, Tensors, made, row
from torch import Tensor, nn

from mechanic_plugins.kernels.dither import dithered
from mechanic_plugins.kernels.triton_batch import ADAM, ADAMW, LION, SGD, TritonBatch, Update
from mechanic_plugins.lion import Lion

LR = 0.01
ROWS = [
    row(0.5, clip=0.25, step=1),
    row(9.9, old=0.5, made=False, step=1),
    row(0.8, old=0.5, step=2),
    row(0.8, old=0.8, clip=0.5, step=3),
]
BASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Update]] = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, weight_decay=0.1), Update(ADAMW, 0.1, 0.9, 0.999, 1e-8)),
    "adam": (
        lambda ps: torch.optim.Adam(ps, weight_decay=0.1, maximize=True),
        Update(ADAM, 0.1, 0.9, 0.999, 1e-8, maximize=True),
    ),
    "sgd": (lambda ps: torch.optim.SGD(ps, weight_decay=0.1), Update(SGD, 0.1)),
    "nesterov": (lambda ps: torch.optim.SGD(ps, momentum=0.9, nesterov=True), Update(SGD, 0.0, 0.9, nesterov=True)),
    "lion": (lambda ps: Lion(ps, weight_decay=0.1), Update(LION, 0.1, 0.9, 0.99)),
}


class Ends(NamedTuple):
    xs: list[Tensor]
    kept: list[Tensor]
    others: list[Tensor | None]
    moments: list[Tensor]


def gradients(tensors: Tensors, step: int) -> list[Tensor | None]:
    """Another tensor has none in each step."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in tensors.xs]
    return [None if index == step else grad for index, grad in enumerate(grads)]


def by_kernel(tensors: Tensors, update: Update, *, summed: bool) -> Ends:
    xs, grads, kept = tensors
    kept = [
        each._replace(
            moment1=torch.zeros_like(x, dtype=torch.float32),
            moment2=torch.zeros_like(x, dtype=torch.float32),
            step=torch.zeros((), device=DEVICE),
        )
        for x, each in zip(xs, kept, strict=True)
    ]
    batch = TritonBatch(xs, grads, kept, summed=summed)
    for step, decided in enumerate(ROWS):
        given = gradients(tensors, step)
        assert batch.addresses.refresh(xs, given)
        batch.step(update, decided, torch.tensor(LR, dtype=torch.float64, device=DEVICE))
    moments = [each.moment1 for each in kept if each.moment1 is not None]
    return Ends(xs, [each.kept for each in kept], [each.other for each in kept], moments)


def by_torch(tensors: Tensors, make: Callable[[Any], torch.optim.Optimizer], *, summed: bool) -> Ends:
    dtype = tensors.xs[0].dtype
    kept, others = [each.kept.double() for each in tensors.kept], [each.other for each in tensors.kept]
    starts = [
        x.double() if each is None or summed else each.double() for x, each in zip(tensors.xs, others, strict=True)
    ]
    if not summed:  # the masters that do not belong to their weights
        starts = [torch.where(x == a.to(dtype), a, x.double()) for x, a in zip(tensors.xs, starts, strict=True)]
    params = [nn.Parameter(x.clone()) for x in starts]
    refs = [None if each is None else each.double() for each in others]
    base = make(params)
    for step, (new, is_made, clip, old, _) in enumerate(decided.tolist() for decided in ROWS):
        if not is_made:
            continue
        olds = [p.detach().clone() for p in params]
        for p, grad in zip(params, gradients(tensors, step), strict=True):
            p.grad = None if grad is None else clip * grad.double()
        base.param_groups[0]["lr"] = LR if summed else LR * new
        base.step()
        for p, x, delta, ref in zip(params, olds, kept, refs, strict=True) if summed else ():
            u = p.detach() - x
            if ref is None:
                p.data = x + (new - old) * delta + new * u
            else:
                moved = x != (ref + old * delta).to(dtype)
                ref.copy_(torch.where(moved, x - old * delta, ref).to(dtype))
                p.data = (ref + new * (delta + u)).to(dtype).double()
            delta += u
    first = [base.state[p].get("exp_avg", base.state[p].get("momentum_buffer", torch.zeros_like(p))) for p in params]
    found = [p.detach() for p in params]
    return Ends([x.to(dtype) for x in found], kept, list(refs) if summed else list(found), first)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_a_base_and_its_move_in_one(base: str, summed: bool) -> None:
    make, update = BASES[base]
    plain = by_torch(made(SHAPES, torch.float32, 3, summed=summed), make, summed=summed)
    kernel = by_kernel(made(SHAPES, torch.float32, 3, summed=summed), update, summed=summed)
    for name in ("xs", "kept", "moments"):
        for a, b in zip(getattr(plain, name), getattr(kernel, name), strict=True):
            torch.testing.assert_close(a.float(), b, rtol=3e-6, atol=3e-6, msg=name)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_weights(dtype: torch.dtype, summed: bool) -> None:
    """Are the roundings of their masters, or of reference + scale * Delta; also after changes from outside."""
    make, update = BASES["adamw"]
    plain = by_torch(made(SHAPES, dtype, 4, summed=summed), make, summed=summed)
    kernel = by_kernel(made(SHAPES, dtype, 4, summed=summed), update, summed=summed)
    eps = EPS[dtype] * (4 if dtype == torch.bfloat16 else 2)  # the interpreter truncates it where GPUs round
    for a, b in zip(plain.xs, kernel.xs, strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=eps)
    for a, b in zip(plain.others, kernel.others, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a.float(), b.float(), rtol=eps, atol=eps)
    for a, b in zip(plain.kept, kernel.kept, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-4, atol=1e-4)


def test_a_step_that_is_not_made_writes_nothing() -> None:
    tensors = made(SHAPES, torch.float16, 5, summed=True)
    before = [t.clone() for x, each in zip(tensors.xs, tensors.kept, strict=True) for t in (x, each.kept, each.other)]  # type: ignore[union-attr]
    batch = TritonBatch(*tensors, summed=True)
    assert batch.addresses.refresh(tensors.xs, tensors.grads)
    batch.step(Update(SGD), row(2.0, made=False), torch.tensor(LR, dtype=torch.float64, device=DEVICE))
    after = [t for x, each in zip(tensors.xs, tensors.kept, strict=True) for t in (x, each.kept, each.other)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize(
    ("dtype", "ktype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
        (torch.float64,) * 2,
    ],
    ids=str,
)
@pytest.mark.parametrize(("first", "last"), [(0, 6), (2, 5), (1, 2), (2, 3)])
def test_the_move_after_any_bases_step(
    dtype: torch.dtype, ktype: torch.dtype, first: int, last: int, is_made: bool
) -> None:
    tensors = made(SHAPES, dtype, 6, ktype=ktype, summed=True)
    xs, deltas = tensors.xs, [each.kept for each in tensors.kept]
    olds, old_deltas = [x.clone() for x in xs], [delta.clone() for delta in deltas]
    batch = TritonBatch(*tensors, summed=True)
    assert batch.addresses.refresh(xs, tensors.grads)
    snapshot = batch.snapshot(first, last)
    assert snapshot.nbytes == sum(batch.snapshot_bytes[first:last])
    for index, x in enumerate(xs[first:last]) if is_made else ():
        x += 0.1 * (index + 1)
    stepped = [x.clone() for x in xs]
    batch.move(first, last, snapshot, row(0.5, made=is_made, step=7))
    for index, (x, delta, old, old_delta) in enumerate(zip(xs, deltas, olds, old_deltas, strict=True)):
        if not (is_made and first <= index < last):
            assert torch.equal(x, stepped[index])
            assert torch.equal(delta, old_delta)
            continue
        u = stepped[index] - old
        torch.testing.assert_close(x, old + ((0.5 - SCALE) * old_delta.to(dtype) + 0.5 * u))
        summed = old_delta.to(dtype) + u
        if ktype == torch.bfloat16:
            summed = dithered(summed, place=batch.places[index], step=7)
        assert torch.equal(delta, summed.to(ktype))


def test_delta_in_bfloat16_is_right_on_average() -> None:
    """Updates far below its rounding add up all the same."""
    tensors = made([(64, 64)], torch.float32, 7, ktype=torch.bfloat16, summed=True)
    (x,), ((delta, *_),) = tensors.xs, tensors.kept
    delta.fill_(1.0)
    grad = torch.ones_like(x)
    batch = TritonBatch([x], [grad], tensors.kept, summed=True)
    assert batch.addresses.refresh([x], [grad])
    lr = torch.tensor(-1e-4, dtype=torch.float64, device=DEVICE)
    for step in range(20):
        batch.step(Update(SGD), row(1.0, old=1.0, step=step), lr)
    assert delta.double().mean().item() == pytest.approx(1 + 20e-4, abs=2e-4)
    assert len(delta.unique()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dithering_by_torch(dtype: torch.dtype) -> None:
    wide = torch.randn(1000, dtype=dtype, device=DEVICE) * 10
    found = dithered(wide, place=0, step=3)
    assert torch.equal(found, found.bfloat16().float())
    assert ((found - wide).abs() <= wide.abs() * 2**-7).all()
    assert torch.equal(found, dithered(wide, place=0, step=3))
    assert not torch.equal(found, dithered(wide, place=0, step=4))
    assert torch.equal(found[16:], dithered(wide[16:], place=16, step=3))
    assert torch.equal(dithered(found, place=5, step=9), found)
