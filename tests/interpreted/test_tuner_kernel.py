"""The tuner's kernel against the tuner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mechanic_plugins.core import tuner
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import column, initial_state
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
    ({"steps": "growing", "betas": (0.5, 0.9, 0.98)}, "optax"),
    ({"steps": "signs", "first_move": 8e-3}, "optax"),
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
    counted = counters = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        lrs: list[float | torch.Tensor] = [0.1 * min(step, 8, 15 - step) + row for row in range(tuners)]
        sums = torch.randn(tuners, 6, dtype=torch.float64, generator=generator)
        sums[:, [1, 2, 4]] = sums[:, [1, 2, 4]].abs()
        if step == 0:
            sums[:, [0, 3, 4]] = 0
        if step == 10:
            sums[-1, 1] = 1e12  # an outlier for one of the tuners
        vector = torch.cat([sums.flatten(), torch.ones(1, dtype=torch.float64)])
        if step == 6:
            vector[3] = float("nan")
        before, hold = plain.played, step == 9
        shared = {"settings": chosen, "betas": betas, "hold": hold}
        by_torch = tuner.decide(plain, vector, counted, lr=column(lrs, CPU), **shared)
        by_kernel, scales = gpu_tuner.decide(kernel, vector, counters, lrs=lrs, constants=constants, **shared)
        plain, counted, kernel, counters = by_torch.state, by_torch.counters, by_kernel.state, by_kernel.counters
        applied = by_torch.applied.double().expand_as(before)
        clip = torch.ones_like(before) if by_torch.clip is None else by_torch.clip.unsqueeze(1)
        steps = counted[0].expand_as(before)
        expected = torch.cat([before, plain.played, applied, by_torch.delta_factor, clip, steps], dim=1)
        torch.testing.assert_close(scales, expected, rtol=1e-11, atol=0)
        is_skipped = step == 6 or (step == 10 and rule == "optimistic")
        assert bool(by_torch.applied) is not is_skipped
    for name, a, b in zip(plain._fields, plain, kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=0, msg=name)
    assert counted.tolist() == counters.tolist() == ([10, 2] if rule == "optimistic" else [11, 1])
