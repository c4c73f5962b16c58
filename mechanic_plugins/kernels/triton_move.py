"""The move of a published rule as GPU kernels: from x_ref + S * Delta to the next scale and the next Delta.

Around any base, `snapshot_kernel` copies the weights, the base steps, and `move_kernel` reads its update off them. The
copy is one flat tensor, in which the table's column for places says where each tensor lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_passes import _KEPT, _OTHER, _PLACE, _X, _place, _pointer


@triton.jit
def snapshot_kernel(
    table, blocks, firsts, first_block, last_block, snapshot, first_place,
    xtype: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Copies the weights in some blocks."""
    for block in range(first_block + tl.program_id(0), last_block, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        x = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, mask)
        tl.store(_copy(snapshot, row, first_place) + at, x, mask)


@triton.jit
def move_kernel(
    table, blocks, firsts, first_block, last_block, snapshot, first_place, scales, shrink,
    xtype: tl.constexpr, ktype: tl.constexpr, acc: tl.constexpr,
    DITHERED: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Moves the weights in some blocks after the base has stepped them. If the step is not made, nothing is written.

    The base has made its update 1 / shrink times as long, a power of two.
    """
    is_made = tl.load(scales + 1).to(tl.int32) != 0
    for block in range(first_block + tl.program_id(0), last_block, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        moved = mask & is_made
        stepped = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, moved, 0.0).to(acc)
        x = tl.load(_copy(snapshot, row, first_place) + at, moved, 0.0).to(acc)
        u = (stepped - x) * shrink
        _move(row, at, moved, x, u, scales, xtype, ktype, acc, False, DITHERED, ALIGNED)


@triton.jit
def _copy(snapshot, row, first_place):
    return snapshot + tl.multiple_of(tl.load(row + _PLACE) - first_place, 16)


@triton.jit
def _move(
    row, at, mask, x, u, scales, xtype: tl.constexpr, ktype: tl.constexpr, acc: tl.constexpr,
    LOW: tl.constexpr, DITHERED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds the update to Delta, and moves the weights from the old scale to the new one: rounded only once."""
    new, old = tl.load(scales + 0), tl.load(scales + 3)
    delta = _pointer(row, _KEPT, ktype, ALIGNED) + at
    d = tl.load(delta, mask, 0.0).to(acc)
    if LOW:
        ref = _reference(row, at, mask, x, d, old.to(acc), xtype, ALIGNED)
        d += u
        x = ref + new.to(acc) * d
    else:
        x += (new - old).to(acc) * d + new.to(acc) * u
        d += u
    tl.store(_pointer(row, _X, xtype, ALIGNED) + at, x.to(xtype), mask)
    if DITHERED:
        d = _dithered(d.to(tl.float32), row, at, scales)
    tl.store(delta, d.to(ktype), mask)


@triton.jit
def _reference(row, at, mask, x, d, scale, xtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where 16-bit weights start from. It follows weights that were changed from outside."""
    place = _pointer(row, _OTHER, xtype, ALIGNED) + at
    ref = tl.load(place, mask, 0.0).to(tl.float32)
    are_changed = x != (ref + scale * d).to(xtype).to(tl.float32)
    ref = tl.where(are_changed, (x - scale * d).to(xtype).to(tl.float32), ref)
    tl.store(place, ref.to(xtype), mask & are_changed)
    return ref


@triton.jit
def _dithered(d, row, at, scales):
    """Delta rounded to bfloat16, up or down at random: see `mechanic_plugins.kernels.dither`."""
    step = tl.load(scales + 4).to(tl.int64).to(tl.uint32)
    bits = (tl.load(row + _PLACE) + at).to(tl.uint32) ^ (step * 0x9E3779B9)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    rounded = (d.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True)
