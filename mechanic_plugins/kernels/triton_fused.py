"""The update of Adam, AdamW, SGD and Lion, and with a published rule Mechanic's move, as one GPU kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_move import _move
from mechanic_plugins.kernels.triton_passes import (
    _COLUMNS,
    _MOMENT1,
    _MOMENT2,
    _OTHER,
    _STEP,
    _X,
    _as_pointer,
    _place,
    _pointer,
    _weights,
)


@triton.jit
def adam_steps_kernel(table, grads, count, scales, constants, corrections, SIZE: tl.constexpr):
    """Increments the step counts, if the step is made, and computes Adam's bias corrections in float64."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    row = table + index.to(tl.int64) * _COLUMNS
    used = inside & (tl.load(grads + index, inside, 0) != 0)
    pointer = tl.load(row + _STEP, used, 0).to(tl.pointer_type(tl.float32))
    step = tl.load(pointer, used, 0.0) + tl.load(scales + 1).to(tl.float32)
    tl.store(pointer, step, used)
    exponent = tl.maximum(step, 1.0).to(tl.float64)
    first = 1.0 - tl.exp(exponent * tl.load(constants + 0))
    second = tl.sqrt(1.0 - tl.exp(exponent * tl.load(constants + 1)))
    tl.store(corrections + index * 2, first.to(tl.float32), inside)
    tl.store(corrections + index * 2 + 1, second.to(tl.float32), inside)


@triton.jit
def _adam(row, at, mask, index, x, g, corrections, lr, wd, beta1, beta2, eps, mtype: tl.constexpr,
          DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    place1 = _pointer(row, _MOMENT1, mtype, ALIGNED) + at
    place2 = _pointer(row, _MOMENT2, mtype, ALIGNED) + at
    first = tl.load(place1, mask, 0.0).to(tl.float32)
    second = tl.load(place2, mask, 0.0).to(tl.float32)
    if not DECOUPLED:
        g += wd * x
    first = first + (1.0 - beta1) * (g - first)
    second = beta2 * second + (1.0 - beta2) * g * g
    tl.store(place1, first.to(mtype), mask)
    tl.store(place2, second.to(mtype), mask)
    correction1 = tl.load(corrections + index * 2)
    correction2 = tl.load(corrections + index * 2 + 1)
    u = -(lr / correction1) * first / (tl.sqrt(second) / correction2 + eps)
    if DECOUPLED:
        u -= lr * wd * x
    return u


@triton.jit
def _sgd(row, at, mask, x, g, lr, wd, momentum, mtype: tl.constexpr, MOMENTUM: tl.constexpr,
         NESTEROV: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    g += wd * x
    if MOMENTUM:
        place = _pointer(row, _MOMENT1, mtype, ALIGNED) + at
        buffer = tl.load(place, mask, 0.0).to(tl.float32)
        buffer = momentum * buffer + g
        tl.store(place, buffer.to(mtype), mask)
        if NESTEROV:
            g += momentum * buffer
        else:
            g = buffer
    return -lr * g


@triton.jit
def _lion(row, at, mask, x, g, lr, wd, beta1, beta2, mtype: tl.constexpr, ALIGNED: tl.constexpr):
    place = _pointer(row, _MOMENT1, mtype, ALIGNED) + at
    average = tl.load(place, mask, 0.0).to(tl.float32)
    direction = average + (1.0 - beta1) * (g - average)
    average = average + (1.0 - beta2) * (g - average)
    tl.store(place, average.to(mtype), mask)
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
    return -lr * (sign + wd * x)


@triton.jit
def fused_kernel(
    table, grads, blocks, firsts, count, scales, corrections, lr, wd, a, b, c,
    KIND: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    xtype: tl.constexpr, gtype: tl.constexpr, ktype: tl.constexpr, mtype: tl.constexpr,
    SUMMED: tl.constexpr, LOW: tl.constexpr, DITHERED: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The base's update in place, at lr times the scale; with SUMMED, at lr, and the move to x_ref + scale * Delta.

    `lr` is a pointer; a, b and c are the base's own constants. If the step is not made, nothing is written.
    """
    is_made = tl.load(scales + 1).to(tl.int32) != 0
    rate = tl.load(lr).to(tl.float32)
    if not SUMMED:
        rate = (tl.load(lr) * tl.load(scales + 0)).to(tl.float32)
    clip = tl.load(scales + 2).to(tl.float32)
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        index = tl.load(blocks + block)
        grad = tl.load(grads + index)
        moved = mask & is_made
        used = moved & (grad != 0)
        if SUMMED:  # weights without a gradient move too
            x = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, moved, 0.0).to(tl.float32)
        else:
            x = _weights(row, at, used, xtype, tl.float32, LOW, ALIGNED)
        g = tl.load(_as_pointer(grad, gtype, ALIGNED) + at, used, 0.0).to(tl.float32) * clip
        if MAXIMIZE:
            g = -g
        if KIND <= 1:
            u = _adam(row, at, used, index, x, g, corrections, rate, wd, a, b, c, mtype, KIND == 1, ALIGNED)
        elif KIND == 2:
            u = _sgd(row, at, used, x, g, rate, wd, a, mtype, MOMENTUM, NESTEROV, ALIGNED)
        else:
            u = _lion(row, at, used, x, g, rate, wd, a, b, mtype, ALIGNED)
        if SUMMED:
            u = tl.where(used, u, 0.0)
            _move(row, at, moved, x, u, scales, xtype, ktype, tl.float32, LOW, DITHERED, ALIGNED)
        else:
            x += u
            if LOW:
                tl.store(_pointer(row, _OTHER, tl.float32, ALIGNED) + at, x, used)
            tl.store(_pointer(row, _X, xtype, ALIGNED) + at, x.to(xtype), used)
