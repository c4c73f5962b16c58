"""The tuner's kernel against the tuner in floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mechanic_plugins.core import tuner
from mechanic_plugins.core.row import SCALARS, VECTORS
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import TunerState, initial_state
from mechanic_plugins.kernels import gpu_tuner

CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    {},
    {"max_scale": 1e-3},
    {"rule": "paper", "s_init": 1e-2},
    {"rule": "paper", "betas": (0.5, 0.9, 0.98), "max_scale": 1e-3},
    {"rule": "experiments"},
    {"rule": "optax", "s_decay": 0.1},
    {"rule": "optax", "max_scale": 1e-7},
    {"rule": "theory", "s_init": 1e-2},
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of an infinity
@pytest.mark.parametrize("norm", [None, 0.1, 1.3, math.inf])
@pytest.mark.parametrize("tuners", [1, 2])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_kernel_equals_the_floats(options: dict[str, Any], tuners: int, norm: float | None) -> None:
    """Two tuners share one norm; steps that are not finite, without gradients, held or outliers are among them."""
    chosen = Settings(**options)
    is_default = chosen.rule == "relative"
    constants = torch.tensor(gpu_tuner.constants_of(chosen), dtype=torch.float64)
    state = initial_state(chosen, tuners=tuners, device=CPU)
    rows, counted, counters = state.rows(), [0, 0], torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(16):
        lrs: list[float | torch.Tensor] = [0.1 * min(step + 1, 8, 17 - step) + row for row in range(tuners)]
        sums = torch.randn(tuners, 6, dtype=torch.float64, generator=generator)
        sums[:, [1, 2, 4]] = sums[:, [1, 2, 4]].abs()
        if step == 0:  # what it measures
            sums[:, [0, 4]] = 0
            sums[:, [3, 5]] = torch.tensor([7.0, 5.0], dtype=torch.float64)
        sums[0, 1] *= {3: 0.0, 10: 1e12, 11: 1e12}.get(step, 1.0)
        vector = torch.cat([sums.flatten(), torch.full((1,), float(step != 5), dtype=torch.float64)])
        vector[1] = {4: math.inf, 6: math.nan}.get(step, vector[1])
        shared: dict[str, Any] = {"hold": step == 9, "max_grad_norm": norm}
        outcome = tuner.decide(rows, vector.tolist(), [float(lr) for lr in lrs], chosen, **shared)
        counted = [counted[0] + outcome.applied, counted[1] + outcome.skipped]
        state, counters, table = gpu_tuner.decide(
            state, vector, counters, settings=chosen, constants=constants, lrs=lrs, **shared
        )
        alike = [outcome.applied, outcome.clip, counted[0]]
        expected = [
            [before, after, alike[0], factor, *alike[1:]]
            for before, after, factor in zip(outcome.befores, outcome.afters, outcome.delta_factors, strict=True)
        ]
        torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)
        assert counters.tolist() == counted
        for name in (*VECTORS, *SCALARS):
            a, b = TunerState.of_rows(rows, CPU).column(name), state.column(name)
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-300, msg=f"{name} in step {step}")
    assert (counted[1] > 2) == (is_default and norm in (None, math.inf))
    assert state.played.min() > 0
