"""The tuner's step as one GPU kernel: `mechanic_plugins.core.tuner` in Triton's dialect."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tuner_kernel(
    sums, old, new, betas, constants, counters, new_counters, scales, lrs, norm_high, norm_low, tuners,
    RULE: tl.constexpr, AUTO: tl.constexpr, SMOOTHING: tl.constexpr, CAPPED: tl.constexpr, FROZEN: tl.constexpr,
    HINDSIGHT: tl.constexpr, RESTATES: tl.constexpr, CLIPS: tl.constexpr, CLIP_EPS: tl.constexpr, LIMITS: tl.constexpr,
    LOSS_WEIGHT: tl.constexpr, LONG_STEP: tl.constexpr, SIGNS: tl.constexpr,
    RECENT: tl.constexpr, RELATIVE_EPS: tl.constexpr, START: tl.constexpr, GROWTH: tl.constexpr, OUTLIER: tl.constexpr,
    GRADIENT_GROWTH: tl.constexpr, NUMBERS: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`rescale_to_lr` and `advance` of `mechanic_plugins.core.tuner`, a tuner a program, and whether the step is made.

    A row of `old` and `new` holds s, r, m, v, q, w0 (n each), s_init, played, h, lr, gradients and longest. `lrs` has
    the base's lr of each tuner, `counters` steps and skipped. With CLIPS the gradients are taken for clipped to the
    norm that has its two halves. `scales` gets, for each tuner, before, after, whether the step is made, what delta and
    the gradients are multiplied by, and the steps so far. With LIMITS no gradient is much longer than any before it.
    """
    program = tl.program_id(0)
    every = tl.arange(0, NUMBERS)
    seen = tl.load(sums + every, every < tuners * 6 + 1, 0.0)
    is_finite = tl.sum(tl.where(seen - seen == 0, 0, 1)) == 0
    has_gradients = is_finite & (tl.load(sums + tuners * 6) > 0)
    width: tl.constexpr = 6 * n + 6
    all_squares = tl.where(is_finite, tl.load(sums + every * 6 + 1, every < tuners, 0.0), 0.0)
    clip = tl.zeros_like(tl.load(sums)) + 1.0
    if CLIPS:
        largest = tl.zeros_like(clip) + norm_high + norm_low
        clip = tl.minimum(largest / (tl.sqrt(tl.sum(all_squares)) + CLIP_EPS), 1.0)
    outliers = tl.zeros_like(every)
    if RULE == 4:  # optimistic
        norms = clip * tl.sqrt(all_squares)
        longests = tl.load(old + every * width + 6 * n + 5, every < tuners, 0.0)
        outliers = tl.where((longests > 0) & (norms > OUTLIER * longests), 1, 0)
    is_outlier = has_gradients & (tl.sum(outliers) > 0)
    old += program * width
    new += program * width
    longest = tl.load(old + 6 * n + 5)
    squares = tl.load(sums + program * 6 + 1)
    norm = clip * tl.sqrt(tl.where(is_finite, squares, 0.0))
    made = has_gradients & (is_outlier == 0)
    if program == 0:
        tl.store(new_counters + 0, tl.load(counters + 0) + tl.where(made, 1.0, 0.0))
        tl.store(new_counters + 1, tl.load(counters + 1) + tl.where(is_finite & (is_outlier == 0), 0.0, 1.0))
    remembered = longest
    if RULE == 4:
        mine = (longest > 0) & (norm > OUTLIER * longest)
        if LIMITS:
            is_too_long = (longest > 0) & (norm > GRADIENT_GROWTH * longest)
            share = tl.where(is_too_long, GRADIENT_GROWTH * longest / tl.where(norm > 0, norm, 1.0), 1.0)
            clip = share * clip
            norm = tl.where(is_outlier, norm, share * norm)
        remembered = tl.where(mine, 10.0 * longest, tl.maximum(0.999 * longest, norm))
    tl.store(new + 6 * n + 5, tl.where(has_gradients, remembered, longest))
    scales += program * 6
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
    sums += program * 6
    dg = clip * tl.load(sums)
    gg = clip * clip * tl.load(sums + 1)
    xx = tl.load(sums + 2)
    dx = tl.load(sums + 3)
    dd = tl.load(sums + 4)
    dp = tl.load(sums + 5)

    was_s, was_m, was_v, was_init, was_played, lr = s, m, v, s_init, played, last_lr
    lr_ratio = tl.zeros_like(last_lr) + 1.0
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
        dp = dp / lr_ratio

    h = dg + s_decay * played * tl.sqrt(gg) * tl.where(xx > 0, dx / tl.sqrt(tl.where(xx > 0, xx, 1.0)), 0.0)
    if RULE == 4:
        h += dp
    if AUTO:
        measured = tl.load(constants + 2) * (1.0 + tl.sqrt(xx)) / tl.sqrt(tl.where(dd > 0, dd, 1.0))
        if RULE == 4:
            growth = tl.where(longest > 0, norm / tl.where(longest > 0, longest, 1.0), float("inf"))
            first = measured * count / tl.maximum(growth, 1.0)
            first = tl.where((count >= START) & (dd > 0) & (gg > 0), first, 0.0)
            later = GROWTH * measured * tl.maximum(count - START, 1.0)
            lowered = tl.where(dd > 0, tl.minimum(s_init, later), s_init)
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
        share = tl.minimum(tl.maximum(share, 0.0), 1.0)
        root = tl.where(share > 0, tl.exp(tl.log(tl.where(share > 0, share, 1.0)) / 3.0), 0.0)
        weight = 1.0 - (1.0 - LOSS_WEIGHT) * root
        gain_weight = tl.zeros_like(weight) + 1.0
        if AUTO:
            step = tl.load(constants + 2) * played / tl.where(new_init > 0, new_init, 1.0)
            step = tl.where(new_init > 0, step, 0.0)
            long = tl.minimum(step / LONG_STEP, 1.0)
            weight = tl.maximum(weight, long * long)
            allowed = LONG_STEP + tl.zeros_like(step)
            if SIGNS:
                allowed = tl.load(constants + 2)
            short = allowed / tl.maximum(step, allowed)
            gain_weight = short * short
        if RECENT < 0:
            usual = tl.load(constants + 7) * tl.max(tl.where(inside, m, 0.0))
        else:
            usual = tl.load(constants + 7) * tl.sum(tl.where(lane == RECENT, m, 0.0))
        loss = weight * tl.minimum(rewarded, usual) + tl.maximum(rewarded - usual, 0.0)
        rewarded = tl.where(rewarded > 0, loss, gain_weight * rewarded)
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
            c = tl.minimum(c, new_count / (new_count + tl.load(constants + 6)))
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
    if RULE == 4:
        kept = tl.where(keep & (played == 0) & (after > 0), 0.0, kept)
    if RESTATES:
        kept = tl.where(keep, kept / lr_ratio, 1.0)
    tl.store(scales + 0, was_played)
    tl.store(scales + 1, after)
    tl.store(scales + 2, tl.where(made, 1.0, 0.0).to(tl.float64))
    tl.store(scales + 3, kept)
    tl.store(scales + 4, tl.where(made, clip, 1.0))
    tl.store(scales + 5, tl.load(counters + 0) + tl.where(made, 1.0, 0.0))
