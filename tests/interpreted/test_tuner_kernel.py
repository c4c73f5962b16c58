"""The tuner's kernel against the tuner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import (
    Sums,
    advance,
    column,
    delta_factor,
    gradient_limit,
    initial_state,
    noted,
    rescale_to_lr,
)
from mechanic_plugins.kernels import gpu_tuner

CPU = torch.device("cpu")


# Each with the default rule, which has branches of its own in most of them, and with one of the others.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"s_init": "auto", "first_move": 1e-2}, "paper"),
    ({"smoothing": 0.9}, "experiments"),
    ({"max_scale": 1e-3}, "optax"),
    ({"s_init": 1e-3}, "theory"),
    ({"hindsight": 0.6}, "paper"),
    ({"s_decay": 0.1}, "theory"),
    ({"own_warmup": True, "hindsight": 0.6}, "optax"),
    ({"own_warmup": True, "smoothing": 0.9, "s_init": 1e-3}, "experiments"),
]
CASES = [(rule, options) for options, other in OPTIONS for rule in ("optimistic", other)]


@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_tuner_equals_torchs(rule: str, options: dict[str, Any]) -> None:
    tuners = 1 if options.get("s_init") == 1e-3 else 2  # one gets its lr as a number, two theirs as a tensor
    chosen = Settings.from_preset(rule=rule, **options)  # type: ignore[arg-type]
    betas = torch.tensor(chosen.betas, dtype=torch.float64)
    constants = torch.tensor(gpu_tuner.constants_of(chosen), dtype=torch.float64)
    plain = kernel = initial_state(chosen, tuners=tuners, device=CPU)
    counters = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        lrs: list[float | torch.Tensor] = [0.1 * min(step, 8) + row for row in range(tuners)]
        sums = torch.randn(tuners, 5, dtype=torch.float64, generator=generator)
        sums[:, [1, 2, 4]] = sums[:, [1, 2, 4]].abs()
        if step == 0:
            sums[:, [0, 3, 4]] = 0
        if step == 10:
            sums[-1, 1] = 1e12  # an outlier for one of the tuners
        vector = torch.cat([sums.flatten(), torch.ones(1, dtype=torch.float64)])
        if step == 6:
            vector[3] = float("nan")
        before, kept, lr = plain, torch.ones_like(plain.lr), column(lrs, CPU)
        is_skipped = step == 6 or (step == 10 and rule == "optimistic")
        if step == 9:  # frozen
            plain = noted(before, lr)
        elif not is_skipped:
            state, known, fall = noted(before, lr), Sums.of(sums), torch.ones_like(lr)
            if chosen.own_warmup:
                state, known, fall = rescale_to_lr(before, known, lr)
            plain = advance(state, known, settings=chosen, betas=betas, lr=lr)
            kept = delta_factor(state, plain, hindsight=chosen.hindsight) / fall
        if rule == "optimistic" and step != 6:
            plain = plain._replace(longest=gradient_limit(before.longest, Sums.of(sums).gg.sqrt())[1])
        kernel, counters, scales = gpu_tuner.advance(
            kernel,
            vector,
            counters,
            settings=chosen,
            betas=betas,
            constants=constants,
            lrs=lrs,
            hold=step == 9,
            in_place=False,
        )
        expected = torch.cat([before.played, plain.played, torch.full_like(kept, float(not is_skipped)), kept], dim=1)
        torch.testing.assert_close(scales, expected, rtol=1e-11, atol=0)
    for name, a, b in zip(plain._fields, plain, kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=0, msg=name)
    assert counters.tolist() == ([10, 2] if rule == "optimistic" else [11, 1])
