"""The passes over memory as GPU kernels, each one launch for any number of tensors.

A table of pointers names the tensors: one int64 row for each, one column for each thing a kernel reads. `grads` points
to their gradients (0: there is none). A list of blocks says which tensor each program works on, `firsts` which block
is a tensor's first. All of this is built by `mechanic_plugins.kernels.table`.

Columns: the weights x, delta, the reference (low-precision weights only), two moments and the step count of the base,
the tensor's place in a snapshot of them all (in elements), and the number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

X, DELTA, REF, MOMENT1, MOMENT2, STEP, PLACE, NUMEL, COLUMNS = range(9)

_X = tl.constexpr(X)
_DELTA = tl.constexpr(DELTA)
_REF = tl.constexpr(REF)
_MOMENT1 = tl.constexpr(MOMENT1)
_MOMENT2 = tl.constexpr(MOMENT2)
_STEP = tl.constexpr(STEP)
_PLACE = tl.constexpr(PLACE)
_NUMEL = tl.constexpr(NUMEL)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _pointer(row, COLUMN: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    return _as_pointer(tl.load(row + COLUMN), dtype, ALIGNED)


@triton.jit
def _as_pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _place(table, blocks, firsts, block, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """The table's row of a block's tensor, the elements that the block covers, and which of them there are."""
    index = tl.load(blocks + block)
    row = table + index.to(tl.int64) * _COLUMNS
    offset = (block - tl.load(firsts + index)) * SIZE
    numel = tl.load(row + _NUMEL)
    if ALIGNED:  # or else the mask has Triton read every element by itself
        numel = tl.multiple_of(numel, 16)
    at = offset + tl.arange(0, SIZE)
    return row, at, at < numel


@triton.jit
def sums_kernel(
    table, grads, blocks, firsts, out, count, xtype: tl.constexpr, gtype: tl.constexpr, dtype: tl.constexpr,
    acc: tl.constexpr, NORMS: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """<d, g>, <g, g> and, with NORMS, <x, x>, <d, x>, <d, d>: five partial sums for each program."""
    program = tl.program_id(0)
    dg = tl.zeros([SIZE], acc)
    gg = tl.zeros([SIZE], acc)
    xx = tl.zeros([SIZE], acc)
    dx = tl.zeros([SIZE], acc)
    dd = tl.zeros([SIZE], acc)
    for block in range(program, count, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        grad = tl.load(grads + tl.load(blocks + block))
        d = tl.load(_pointer(row, _DELTA, dtype, ALIGNED) + at, mask, 0.0).to(acc)
        g = tl.load(_as_pointer(grad, gtype, ALIGNED) + at, mask & (grad != 0), 0.0).to(acc)
        dg += d * g
        gg += g * g
        if NORMS:
            x = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, mask, 0.0).to(acc)
            xx += x * x
            dx += d * x
            dd += d * d
    out += program * 5
    tl.store(out + 0, tl.sum(dg))
    tl.store(out + 1, tl.sum(gg))
    if NORMS:
        tl.store(out + 2, tl.sum(xx))
        tl.store(out + 3, tl.sum(dx))
        tl.store(out + 4, tl.sum(dd))


@triton.jit
def _old(snapshot, row, at, first):
    """Where a snapshot that begins with the element `first` holds these."""
    return snapshot + tl.multiple_of(tl.load(row + _PLACE) - first, 16) + at


@triton.jit
def snapshot_kernel(
    table, blocks, firsts, first_block, last_block, snapshot, first, xtype: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Copies the weights of some tensors of a list, end to end."""
    for block in range(first_block + tl.program_id(0), last_block, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        x = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, mask)
        tl.store(_old(snapshot, row, at, first), x, mask)


@triton.jit
def _dithered(d, row, at, scales):
    """Delta rounded to bfloat16, up or down at random, so that it is right on average: see `kernels.dither`."""
    seed = tl.load(scales + 5).to(tl.int64).to(tl.uint32)
    bits = (tl.load(row + _PLACE) + at).to(tl.uint32) ^ (seed * 0x9E3779B9)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    rounded = (d.to(tl.float32).to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True).to(d.dtype)


@triton.jit
def _rounded(
    row, at, mask, x, d, u, before, after, kept, scales, xtype: tl.constexpr,
    DITHERED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Low-precision weights: the rounding of ref + scale * delta, where ref follows what somebody else has moved.

    Returns weights and delta.
    """
    pointer = _pointer(row, _REF, xtype, ALIGNED) + at
    ref = tl.load(pointer, mask, 0.0).to(tl.float32)
    moved_outside = x != (ref + before * d).to(xtype).to(tl.float32)
    ref = tl.where(moved_outside, x - before * d, ref).to(xtype).to(tl.float32)
    d = kept * d + u
    if DITHERED:
        d = _dithered(d, row, at, scales)
    tl.store(pointer, ref.to(xtype), mask)
    return (ref + after * d).to(xtype), d


@triton.jit
def _store_norms(norms, xx, dx, dd):
    norms += tl.program_id(0) * 3
    tl.store(norms + 0, tl.sum(xx))
    tl.store(norms + 1, tl.sum(dx))
    tl.store(norms + 2, tl.sum(dd))


@triton.jit
def move_kernel(
    table, blocks, firsts, first_block, last_block, snapshot, first, scales, norms,
    xtype: tl.constexpr, dtype: tl.constexpr, acc: tl.constexpr,
    LOW: tl.constexpr, DITHERED: tl.constexpr, APART: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """After any base's step: from its weights to Mechanic's, for the tensors that the snapshot holds.

    With APART the base has stepped the snapshot and left the weights alone.
    """
    before = tl.load(scales + 0).to(acc)
    step = (tl.load(scales + 1) * tl.load(scales + 3) - tl.load(scales + 0)).to(acc)
    after = tl.load(scales + 1).to(acc)
    kept = tl.load(scales + 3).to(acc)
    xx = tl.zeros([SIZE], acc)
    dx = tl.zeros([SIZE], acc)
    dd = tl.zeros([SIZE], acc)
    for block in range(first_block + tl.program_id(0), last_block, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        place = _pointer(row, _X, xtype, ALIGNED) + at
        old = tl.load(place, mask, 0.0).to(acc)
        stepped = tl.load(_old(snapshot, row, at, first), mask, 0.0).to(acc)
        if not APART:
            old, stepped = stepped, old
        u = stepped - old
        delta = _pointer(row, _DELTA, dtype, ALIGNED) + at
        d = tl.load(delta, mask, 0.0).to(acc)
        if LOW:
            played, d = _rounded(row, at, mask, old, d, u, before, after, kept, scales, xtype, DITHERED, ALIGNED)
        else:
            played = (old + (step * d + after * u)).to(xtype)
            d = kept * d + u
            if DITHERED:
                d = _dithered(d, row, at, scales)
        tl.store(place, played, mask)
        if DITHERED:
            tl.store(delta, d.to(tl.float32).to(dtype), mask)
        else:
            tl.store(delta, d, mask)
        x = played.to(acc)
        xx += x * x
        dx += d * x
        dd += d * d
    _store_norms(norms, xx, dx, dd)


@triton.jit
def collect_kernel(
    sums, programs, norms, norm_programs, constants, out, count,
    NORMS_APART: tl.constexpr, MAXIMIZE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the programs' partial sums, in float64 and always in the same order, to a tuner's six.

    `constants` holds the weight they are counted with, the number of gradients, and the weight decay of the penalty.
    """
    weight = tl.load(constants)
    lane = tl.arange(0, SIZE)
    dg = tl.zeros([SIZE], tl.float64)
    gg = tl.zeros([SIZE], tl.float64)
    xx = tl.zeros([SIZE], tl.float64)
    dx = tl.zeros([SIZE], tl.float64)
    dd = tl.zeros([SIZE], tl.float64)
    for start in range(0, programs, SIZE):
        inside = start + lane < programs
        place = sums + (start + lane) * 5
        dg += tl.load(place, inside, 0.0).to(tl.float64)
        gg += tl.load(place + 1, inside, 0.0).to(tl.float64)
        if not NORMS_APART:
            xx += tl.load(place + 2, inside, 0.0).to(tl.float64)
            dx += tl.load(place + 3, inside, 0.0).to(tl.float64)
            dd += tl.load(place + 4, inside, 0.0).to(tl.float64)
    if NORMS_APART:
        for start in range(0, norm_programs, SIZE):
            inside = start + lane < norm_programs
            place = norms + (start + lane) * 3
            xx += tl.load(place, inside, 0.0).to(tl.float64)
            dx += tl.load(place + 1, inside, 0.0).to(tl.float64)
            dd += tl.load(place + 2, inside, 0.0).to(tl.float64)
    if MAXIMIZE:
        dg = -dg
    tl.store(out + 0, tl.load(out + 0) + tl.sum(dg) * weight)
    tl.store(out + 1, tl.load(out + 1) + tl.sum(gg) * weight)
    tl.store(out + 2, tl.load(out + 2) + tl.sum(xx) * weight)
    tl.store(out + 3, tl.load(out + 3) + tl.sum(dx) * weight)
    tl.store(out + 4, tl.load(out + 4) + tl.sum(dd) * weight)
    tl.store(out + 5, tl.load(out + 5) + tl.sum(dx) * weight * tl.load(constants + 2))
    tl.store(count, tl.load(count) + tl.load(constants + 1))
