"""The sums as GPU kernels, one launch each for any number of tensors.

A table of pointers lists the tensors: one int64 row per tensor, one column per thing that a kernel reads. `grads` holds
pointers to their gradients (0 if there is none). `blocks` says which tensor each block belongs to, `firsts` which block
is a tensor's first. `mechanic_plugins.kernels.table` builds all of this.

Columns: the weights x, the reference, the master (16-bit weights only), the base's two moments and step count, and the
number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

_X, _REF, _MASTER, _MOMENT1, _MOMENT2, _STEP, _NUMEL, _COLUMNS = map(tl.constexpr, range(8))


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
    """The table row of a block's tensor, the element offsets of the block, and the mask of those inside the tensor."""
    index = tl.load(blocks + block)
    row = table + index.to(tl.int64) * _COLUMNS
    offset = (block - tl.load(firsts + index)) * SIZE
    numel = tl.load(row + _NUMEL)
    if ALIGNED:  # otherwise the mask keeps Triton from vectorising the reads
        numel = tl.multiple_of(numel, 16)
    at = offset + tl.arange(0, SIZE)
    return row, at, at < numel


@triton.jit
def _weights(row, at, mask, xtype: tl.constexpr, acc: tl.constexpr, LOW: tl.constexpr, ALIGNED: tl.constexpr):
    """The weights; for 16-bit ones their masters, except where they were changed from outside."""
    x = tl.load(_pointer(row, _X, xtype, ALIGNED) + at, mask, 0.0)
    if LOW:
        master = tl.load(_pointer(row, _MASTER, tl.float32, ALIGNED) + at, mask, 0.0)
        return tl.where(x == master.to(xtype), master, x.to(tl.float32)).to(acc)
    return x.to(acc)


@triton.jit
def sums_kernel(
    table, grads, blocks, firsts, out, count, xtype: tl.constexpr, gtype: tl.constexpr, rtype: tl.constexpr,
    acc: tl.constexpr, LOW: tl.constexpr, PENALTY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """<d, g>, <g, g>, <d, d> and, with PENALTY, <d, x>, where d is x - ref: four partial sums per program."""
    program = tl.program_id(0)
    dg = tl.zeros([SIZE], acc)
    gg = tl.zeros([SIZE], acc)
    dd = tl.zeros([SIZE], acc)
    dx = tl.zeros([SIZE], acc)
    for block in range(program, count, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        grad = tl.load(grads + tl.load(blocks + block))
        g = tl.load(_as_pointer(grad, gtype, ALIGNED) + at, mask & (grad != 0), 0.0).to(acc)
        x = _weights(row, at, mask, xtype, acc, LOW, ALIGNED)
        d = x - tl.load(_pointer(row, _REF, rtype, ALIGNED) + at, mask, 0.0).to(acc)
        dg += d * g
        gg += g * g
        dd += d * d
        if PENALTY:
            dx += d * x
    out += program * 4
    tl.store(out + 0, tl.sum(dg))
    tl.store(out + 1, tl.sum(gg))
    tl.store(out + 2, tl.sum(dd))
    tl.store(out + 3, tl.sum(dx))


@triton.jit
def collect_kernel(sums, programs, constants, out, count, MAXIMIZE: tl.constexpr, SIZE: tl.constexpr):
    """Adds the programs' partial sums to a tuner's six sums, in float64 and always in the same order.

    `constants` holds their weight in the sums, the number of gradients, and the weight decay of the penalty.
    """
    weight = tl.load(constants)
    lane = tl.arange(0, SIZE)
    dg = tl.zeros([SIZE], tl.float64)
    gg = tl.zeros([SIZE], tl.float64)
    dd = tl.zeros([SIZE], tl.float64)
    dx = tl.zeros([SIZE], tl.float64)
    for start in range(0, programs, SIZE):
        inside = start + lane < programs
        place = sums + (start + lane) * 4
        dg += tl.load(place, inside, 0.0).to(tl.float64)
        gg += tl.load(place + 1, inside, 0.0).to(tl.float64)
        dd += tl.load(place + 2, inside, 0.0).to(tl.float64)
        dx += tl.load(place + 3, inside, 0.0).to(tl.float64)
    if MAXIMIZE:
        dg = -dg
    tl.store(out + 0, tl.load(out + 0) + tl.sum(dg) * weight)
    tl.store(out + 1, tl.load(out + 1) + tl.sum(gg) * weight)
    tl.store(out + 4, tl.load(out + 4) + tl.sum(dd) * weight)
    tl.store(out + 5, tl.load(out + 5) + tl.sum(dx) * weight * tl.load(constants + 2))
    tl.store(count, tl.load(count) + tl.load(constants + 1))
