"""The passes over memory as GPU kernels, each one launch for any number of tensors.

A table of pointers names the tensors: one int64 row for each, one column for each thing a kernel reads. A list of
blocks says which tensor each program works on, `firsts` which block is a tensor's first. All three are built by
`mechanic_plugins.kernels.multi_tensor`.

Columns: the weights x, the gradient (0: there is none), delta, the reference (low-precision weights only), two moments
and the step count of the base, the tensor's place in a snapshot of them all (in elements), and the number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

X, GRAD, DELTA, REF, MOMENT1, MOMENT2, STEP, PLACE, NUMEL, COLUMNS = range(10)

_X = tl.constexpr(X)
_GRAD = tl.constexpr(GRAD)
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
    address = tl.load(row + COLUMN)
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
    table, blocks, firsts, out, count, xtype: tl.constexpr, gtype: tl.constexpr, dtype: tl.constexpr, acc: tl.constexpr,
    NORMS: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
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
        has_gradient = tl.load(row + _GRAD) != 0
        d = tl.load(_pointer(row, _DELTA, dtype, ALIGNED) + at, mask, 0.0).to(acc)
        g = tl.load(_pointer(row, _GRAD, gtype, ALIGNED) + at, mask & has_gradient, 0.0).to(acc)
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
def _rounded(row, at, mask, x, d, u, before, after, kept, xtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Low-precision weights: the rounding of ref + scale * delta, where ref follows what somebody else has moved.

    Returns weights and delta.
    """
    pointer = _pointer(row, _REF, xtype, ALIGNED) + at
    ref = tl.load(pointer, mask, 0.0).to(tl.float32)
    moved_outside = x != (ref + before * d).to(xtype).to(tl.float32)
    ref = tl.where(moved_outside, x - before * d, ref).to(xtype).to(tl.float32)
    d = kept * d + u
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
    LOW: tl.constexpr, APART: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
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
            played, d = _rounded(row, at, mask, old, d, u, before, after, kept, xtype, ALIGNED)
        else:
            played = (old + (step * d + after * u)).to(xtype)
            d = kept * d + u
        tl.store(place, played, mask)
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
    """Adds the programs' partial sums, in float64 and always in the same order, to a tuner's five.

    `constants` holds the weight they are counted with, and the number of gradients.
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
    tl.store(count, tl.load(count) + tl.load(constants + 1))


@triton.jit
def adam_steps_kernel(table, count, scales, constants, corrections, SIZE: tl.constexpr):
    """Counts the step, where it is made, and takes Adam's bias corrections in float64."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    row = table + index.to(tl.int64) * _COLUMNS
    used = inside & (tl.load(row + _GRAD, inside, 0) != 0)
    pointer = tl.load(row + _STEP, used, 0).to(tl.pointer_type(tl.float32))
    step = tl.load(pointer, used, 0.0) + tl.load(scales + 2).to(tl.float32)
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
    table, blocks, firsts, count, scales, norms, corrections, lr, lr_factor, wd, a, b, c, LR_IS_TENSOR: tl.constexpr,
    KIND: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    xtype: tl.constexpr, gtype: tl.constexpr, mtype: tl.constexpr,
    LOW: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The base's update and Mechanic's move in one pass. a, b and c are the base's own constants.

    Where the step is not made (a gradient somewhere is not finite) nothing is written but the norms.
    """
    is_made = tl.load(scales + 2).to(tl.int32) != 0
    before = tl.load(scales + 0).to(tl.float32)
    step = (tl.load(scales + 1) * tl.load(scales + 3) - tl.load(scales + 0)).to(tl.float32)
    after = tl.load(scales + 1).to(tl.float32)
    kept = tl.load(scales + 3).to(tl.float32)
    if LR_IS_TENSOR:
        lr = tl.load(lr).to(tl.float32) * lr_factor
    xx = tl.zeros([SIZE], tl.float32)
    dx = tl.zeros([SIZE], tl.float32)
    dd = tl.zeros([SIZE], tl.float32)
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        row, at, mask = _place(table, blocks, firsts, block, ALIGNED, SIZE)
        place = _pointer(row, _X, xtype, ALIGNED) + at
        delta = _pointer(row, _DELTA, tl.float32, ALIGNED) + at
        x = tl.load(place, mask, 0.0).to(tl.float32)
        d = tl.load(delta, mask, 0.0)
        moved = mask & is_made
        used = moved & (tl.load(row + _GRAD) != 0)
        g = tl.load(_pointer(row, _GRAD, gtype, ALIGNED) + at, used, 0.0).to(tl.float32)
        if MAXIMIZE:
            g = -g
        index = tl.load(blocks + block)
        if KIND == 0:
            u = _adam(row, at, used, index, x, g, corrections, lr, wd, a, b, c, mtype, False, ALIGNED)
        elif KIND == 1:
            u = _adam(row, at, used, index, x, g, corrections, lr, wd, a, b, c, mtype, True, ALIGNED)
        elif KIND == 2:
            u = _sgd(row, at, used, x, g, lr, wd, a, mtype, MOMENTUM, NESTEROV, ALIGNED)
        else:
            u = _lion(row, at, used, x, g, lr, wd, a, b, mtype, ALIGNED)
        u = tl.where(used, u, 0.0)
        if LOW:
            played, d = _rounded(row, at, moved, x, d, u, before, after, kept, xtype, ALIGNED)
        else:
            played = x + (step * d + after * u)
            d = kept * d + u
        tl.store(place, played, moved)
        tl.store(delta, d, moved)
        x = tl.where(moved, played.to(tl.float32), x)
        xx += x * x
        dx += d * x
        dd += d * d
    _store_norms(norms, xx, dx, dd)


@triton.jit
def tuner_kernel(
    sums, old, new, betas, constants, counters, new_counters, scales, lrs, lr_high, lr_low, tuners,
    RULE: tl.constexpr, AUTO: tl.constexpr, SMOOTHING: tl.constexpr, CAPPED: tl.constexpr, FROZEN: tl.constexpr,
    HINDSIGHT: tl.constexpr, RESTATES: tl.constexpr, LR_AS_NUMBER: tl.constexpr,
    LOSS_WEIGHT: tl.constexpr, RELATIVE_EPS: tl.constexpr, START: tl.constexpr, WINDOW: tl.constexpr,
    OUTLIER: tl.constexpr,
    NUMBERS: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`rescale_to_lr` and `advance` of `mechanic_plugins.core.tuner`, a tuner a program, and whether the step is made.

    A row of `old` and `new` holds s, r, m, v, q, w0 (n each), s_init, played, h, lr, gradients and longest. `lrs` has
    the base's lr of each tuner, or the two halves are that of the only one. `counters` holds steps and skipped.
    `scales` gets, for each tuner, before, after, whether the step is made and what delta is multiplied by.
    """
    program = tl.program_id(0)
    every = tl.arange(0, NUMBERS)
    seen = tl.load(sums + every, every < tuners * 5 + 1, 0.0)
    is_finite = tl.sum(tl.where(seen - seen == 0, 0, 1)) == 0
    has_gradients = is_finite & (tl.load(sums + tuners * 5) > 0)
    width: tl.constexpr = 6 * n + 6
    outliers = tl.zeros_like(every)
    if RULE == 4:  # optimistic
        norms = tl.sqrt(tl.where(is_finite, tl.load(sums + every * 5 + 1, every < tuners, 0.0), 0.0))
        longests = tl.load(old + every * width + 6 * n + 5, every < tuners, 0.0)
        outliers = tl.where((longests > 0) & (norms > OUTLIER * longests), 1, 0)
    is_outlier = has_gradients & (tl.sum(outliers) > 0)
    old += program * width
    new += program * width
    longest = tl.load(old + 6 * n + 5)
    squares = tl.load(sums + program * 5 + 1)
    norm = tl.sqrt(tl.where(is_finite, squares, 0.0))
    made = has_gradients & (is_outlier == 0)
    if program == 0:
        tl.store(new_counters + 0, tl.load(counters + 0) + tl.where(made, 1.0, 0.0))
        tl.store(new_counters + 1, tl.load(counters + 1) + tl.where(is_finite & (is_outlier == 0), 0.0, 1.0))
    remembered = longest
    if RULE == 4:
        mine = (longest > 0) & (norm > OUTLIER * longest)
        remembered = tl.where(mine, 10.0 * longest, tl.maximum(0.999 * longest, norm))
    tl.store(new + 6 * n + 5, tl.where(has_gradients, remembered, longest))
    scales += program * 4
    lane = tl.arange(0, N)
    inside = lane < n
    s = tl.load(old + lane, inside, 0.0)
    r = tl.load(old + n + lane, inside, 0.0)
    m = tl.load(old + 2 * n + lane, inside, 0.0)
    v = tl.load(old + 3 * n + lane, inside, 0.0)
    q = tl.load(old + 4 * n + lane, inside, 0.0)
    w0 = tl.load(old + 5 * n + lane, inside, 0.0)
    s_init = tl.load(old + 6 * n)
    played = tl.load(old + 6 * n + 1)
    last_h = tl.load(old + 6 * n + 2)
    last_lr = tl.load(old + 6 * n + 3)
    count = tl.load(old + 6 * n + 4)
    beta = tl.load(betas + lane, inside, 0.5)
    s_decay = tl.load(constants + 0)
    eps = tl.load(constants + 1)
    sums += program * 5
    dg = tl.load(sums)
    gg = tl.load(sums + 1)
    xx = tl.load(sums + 2)
    dx = tl.load(sums + 3)
    dd = tl.load(sums + 4)

    was_s, was_m, was_v, was_init, was_played, lr = s, m, v, s_init, played, last_lr
    lr_ratio = tl.zeros_like(last_lr) + 1.0
    if LR_AS_NUMBER:
        now = tl.zeros_like(last_lr) + lr_high + lr_low
    else:
        now = tl.load(lrs + program)
    lr = tl.where(now > last_lr, now, last_lr)
    if RESTATES and not FROZEN:
        rises = (last_lr > 0) & (lr > last_lr)
        lr_ratio = tl.where(rises, last_lr / tl.where(rises, lr, 1.0), 1.0)
        s = s * lr_ratio
        m = m / lr_ratio
        v = v / (lr_ratio * lr_ratio)
        s_init = s_init * lr_ratio
        played = played * lr_ratio
        dg = dg / lr_ratio
        dx = dx / lr_ratio
        dd = dd / (lr_ratio * lr_ratio)

    h = dg + s_decay * played * tl.sqrt(gg) * tl.where(xx > 0, dx / tl.sqrt(tl.where(xx > 0, xx, 1.0)), 0.0)
    if AUTO:
        measured = tl.load(constants + 2) * (1.0 + tl.sqrt(xx)) / tl.sqrt(tl.where(dd > 0, dd, 1.0))
        if RULE == 4:
            measured = measured * tl.maximum(count, START) / START
            growth = tl.where(longest > 0, norm / tl.where(longest > 0, longest, 1.0), float("inf"))
            first = tl.where((count >= START) & (dd > 0) & (gg > 0), measured / tl.maximum(growth, 1.0), 0.0)
            lowered = tl.where(dd > 0, tl.minimum(s_init, measured), s_init)
            new_init = tl.where(s_init > 0, lowered, first)
        else:
            new_init = tl.where(s_init > 0, s_init, tl.where(dd > 0, measured, 0.0))
    else:
        new_init = tl.load(constants + 2) + tl.zeros_like(s_init)
    total = tl.sum(s)
    bet = s
    if SMOOTHING:
        bet = s * tl.where(total > 0, played / tl.where(total > 0, total, 1.0), 1.0)

    new_count = count + tl.where(gg > 0, 1.0, 0.0)
    seen_h = h
    if RULE == 4:
        seen_h = tl.where(new_init > 0, h, 0.0)
    size = tl.abs(seen_h)
    rewarded = seen_h + tl.zeros_like(m)
    if RULE == 4:
        share = tl.where(lr > 0, now / tl.where(lr > 0, lr, 1.0), 1.0)
        weight = 1.0 - (1.0 - LOSS_WEIGHT) * tl.sqrt(tl.minimum(tl.maximum(share, 0.0), 1.0))
        rewarded = tl.where(rewarded > 0, weight * rewarded, rewarded)
    if RULE == 2 or RULE == 3:  # optax, theory
        rewarded = tl.minimum(tl.maximum(rewarded, -m), m)
    if RULE == 0 or RULE == 3 or RULE == 4:  # paper, theory, optimistic
        new_m = tl.maximum(beta * m, size)
    else:
        new_m = tl.maximum(beta * m, size + eps)
    new_r = beta * r - bet * rewarded
    if RULE == 0 or RULE == 4:
        new_r = tl.maximum(new_r, 0.0)
    if RULE == 3:
        new_v = beta * beta * v + rewarded * rewarded
        new_q = beta * q - rewarded
        new_w0 = tl.where(w0 > 0, w0, new_init * new_m / n)
        root = tl.sqrt(4.0 * new_m * new_m + new_v)
        share = tl.minimum(tl.maximum(new_q / tl.where(root > 0, root, 1.0), 0.0), 1.0)
        wealth = (new_w0 + new_r) * share
        new_s = tl.where(new_m > 0, wealth / (root + eps), 0.0)
    else:
        new_v = beta * beta * v + seen_h * seen_h
        new_q = q
        new_w0 = w0
        wealth = new_init * new_m / n + tl.maximum(new_r, 0.0)
        divisor = tl.sqrt(new_v) + eps
        if RULE == 4:
            divisor += RELATIVE_EPS * tl.max(tl.where(inside, tl.sqrt(new_v), 0.0))
        new_s = wealth / tl.where(divisor > 0, divisor, 1.0)
        if RULE == 0 or RULE == 4:
            new_s = tl.where(new_v > 0, new_s, 0.0)
    new_s = tl.where(inside, new_s, 0.0)
    if CAPPED:
        sum_of_s = tl.sum(new_s)
        cap = tl.load(constants + 3)
        new_s = new_s * tl.where(sum_of_s > cap, cap / tl.where(sum_of_s > 0, sum_of_s, 1.0), 1.0)
    next_total = tl.sum(new_s)
    next_played = next_total
    if SMOOTHING:
        c = tl.load(constants + 4)
        if RULE == 4:
            c = tl.minimum(c, new_count / (new_count + WINDOW))
        one = tl.zeros_like(played) + 1.0
        average = tl.exp(
            c * tl.log(tl.where(played > 0, played, one))
            + (1.0 - c) * tl.log(tl.where(next_total > 0, next_total, one))
        )
        average = tl.where(next_total > 0, average, 0.0)
        next_played = tl.where(played > 0, average, next_total)

    keep = made
    if FROZEN:
        keep = made & False
    tl.store(new + lane, tl.where(keep, new_s, was_s), inside)
    tl.store(new + n + lane, tl.where(keep, new_r, r), inside)
    tl.store(new + 2 * n + lane, tl.where(keep, new_m, was_m), inside)
    tl.store(new + 3 * n + lane, tl.where(keep, new_v, was_v), inside)
    tl.store(new + 4 * n + lane, tl.where(keep, new_q, q), inside)
    tl.store(new + 5 * n + lane, tl.where(keep, new_w0, w0), inside)
    tl.store(new + 6 * n, tl.where(keep, new_init, was_init))
    tl.store(new + 6 * n + 1, tl.where(keep, next_played, was_played))
    tl.store(new + 6 * n + 2, tl.where(keep, h, last_h))
    tl.store(new + 6 * n + 3, tl.where(made, lr, last_lr))
    tl.store(new + 6 * n + 4, tl.where(keep, new_count, count))
    after = tl.where(keep, next_played, was_played)
    kept = tl.zeros_like(after) + 1.0
    if HINDSIGHT:
        share = tl.load(constants + 5)
        rescaled = share + (1.0 - share) * played / tl.where(after > 0, after, 1.0)
        kept = tl.where(keep & (played > 0) & (after > 0), rescaled, 1.0)
    if RESTATES:
        kept = tl.where(keep, kept / lr_ratio, 1.0)
    tl.store(scales + 0, was_played)
    tl.store(scales + 1, after)
    tl.store(scales + 2, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(scales + 3, kept)
