"""The sums as GPU kernels, one launch each for any number of tensors.

A table of pointers lists the tensors: one int64 row per tensor, one column per thing that a kernel reads. `grads` holds
pointers to their gradients (0 if there is none). `blocks` says which tensor each block belongs to, `firsts` which block
is a tensor's first. `mechanic_plugins.kernels.table` builds all of this.

Columns: the weights x; what is kept of them, the reference or Delta; for 16-bit weights the master, or with Delta the
reference; the base's two moments and step count; the tensor's place in a copy of them all, and its number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic_plugins.kernels.triton_tuner import _DD, _DG, _DP, _DX, _GG, _XX

_X, _KEPT, _OTHER, _MOMENT1, _MOMENT2, _STEP, _PLACE, _NUMEL, _COLUMNS = map(tl.constexpr, range(9))


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
        master = tl.load(_pointer(row, _OTHER, tl.float32, ALIGNED) + at, mask, 0.0)
        return tl.where(x == master.to(xtype), master, x.to(tl.float32)).to(acc)
    return x.to(acc)


@triton.jit
def sums_kernel(
    table, grads, blocks, firsts, out, count, xtype: tl.constexpr, gtype: tl.constexpr, ktype: tl.constexpr,
    acc: tl.constexpr, SUMMED: tl.constexpr, LOW: tl.constexpr, DX: tl.constexpr, XX: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """<d, g>, <g, g>, <d, d> and, where asked for, <d, x> and <x, x>: five partial sums per program.

    With SUMMED, d is kept itself, else it is x - ref. LOW: 16-bit weights have masters.
    """
    program = tl.program_id(0)
    dg = tl.zeros([SIZE], acc)
    gg = tl.zeros([SIZE], acc)
    dd = tl.zeros([SIZE], acc)
    dx = tl.zeros([SIZE], acc)
    xx = tl.zeros([SIZE], acc)
    for block in range(program, count, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        grad = tl.load(grads + tl.load(blocks + block))
        g = tl.load(_as_pointer(grad, gtype, ALIGNED) + at, mask & (grad != 0), 0.0).to(acc)
        d = tl.load(_pointer(row, _KEPT, ktype, ALIGNED) + at, mask, 0.0).to(acc)
        if not SUMMED:
            x = _weights(row, at, mask, xtype, acc, LOW, ALIGNED)
            d = x - d
        elif DX:
            x = _weights(row, at, mask, xtype, acc, LOW, ALIGNED)
        dg += d * g
        gg += g * g
        dd += d * d
        if DX:
            dx += d * x
        if XX:
            xx += x * x
    out += program * 5
    tl.store(out + 0, tl.sum(dg))
    tl.store(out + 1, tl.sum(gg))
    tl.store(out + 2, tl.sum(dd))
    tl.store(out + 3, tl.sum(dx))
    tl.store(out + 4, tl.sum(xx))


@triton.jit
def collect_kernel(
    sums, programs, constants, out, count, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, SIZE: tl.constexpr
):
    """Adds the programs' partial sums to a tuner's sums, in float64 and always in the same order.

    `constants` holds their weight in the sums, the number of gradients, and the weight decay of the penalty. Only a
    rule with DECAY wants <x, x> and <d, x> themselves.
    """
    weight = tl.load(constants)
    lane = tl.arange(0, SIZE)
    dg = tl.zeros([SIZE], tl.float64)
    gg = tl.zeros([SIZE], tl.float64)
    dd = tl.zeros([SIZE], tl.float64)
    dx = tl.zeros([SIZE], tl.float64)
    xx = tl.zeros([SIZE], tl.float64)
    for start in range(0, programs, SIZE):
        inside = start + lane < programs
        place = sums + (start + lane) * 5
        dg += tl.load(place, inside, 0.0).to(tl.float64)
        gg += tl.load(place + 1, inside, 0.0).to(tl.float64)
        dd += tl.load(place + 2, inside, 0.0).to(tl.float64)
        dx += tl.load(place + 3, inside, 0.0).to(tl.float64)
        xx += tl.load(place + 4, inside, 0.0).to(tl.float64)
    if MAXIMIZE:
        dg = -dg
    _add(out + _DG, tl.sum(dg) * weight)
    _add(out + _GG, tl.sum(gg) * weight)
    _add(out + _DD, tl.sum(dd) * weight)
    _add(out + _DP, tl.sum(dx) * weight * tl.load(constants + 2))
    if DECAY:
        _add(out + _DX, tl.sum(dx) * weight)
        _add(out + _XX, tl.sum(xx) * weight)
    _add(count, tl.load(constants + 1))


@triton.jit
def _add(place, number):
    tl.store(place, tl.load(place) + number)
