"""Compares the tuner's kernel with the tuner in floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mechanic_plugins.core import tuner
from mechanic_plugins.core.row import SCALARS, VECTORS
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner_state import initial_state
from mechanic_plugins.kernels import gpu_tuner

CPU = torch.device("cpu")
CASES: list[tuple[dict[str, Any], int, float | None]] = [
    *(({}, tuners, norm) for tuners in (1, 2) for norm in (None, 0.1, 1.3, math.inf)),
    ({"max_scale": 1e-3}, 2, 0.1),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by NumPy, for an infinity
@pytest.mark.parametrize(("options", "tuners", "norm"), CASES, ids=str)
def test_the_kernel_equals_the_floats(options: dict[str, Any], tuners: int, norm: float | None) -> None:
    """Two tuners share one norm; some steps are non-finite, without gradients, held or outliers.

    The first four steps run only in floats. In the last four, the weights are far from where they began, at the end
    without a known path, as after a checkpoint of another rule.
    """
    chosen = Settings(**options)
    state = initial_state(chosen, tuners=tuners, device=CPU)
    rows, counted = [row.copy() for row in state.rows], [0, 0]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        lrs: list[float | torch.Tensor] = [0.1 * min(step + 1, 8, 21 - step) + row for row in range(tuners)]
        sums = torch.randn(tuners, 6, dtype=torch.float64, generator=generator)
        sums[:, [1, 2, 4]] = sums[:, [1, 2, 4]].abs()
        if step == 0:  # what the first step measures
            sums[:, [0, 4]] = 0
            sums[:, [3, 5]] = torch.tensor([7.0, 5.0], dtype=torch.float64)
        sums[:, 4] *= 1e6 if step >= 16 else 1.0
        sums[0, 1] *= {7: 0.0, 14: 1e12, 15: 1e12}.get(step, 1.0)
        vector = torch.cat([sums.flatten(), torch.full((1,), float(step != 9), dtype=torch.float64)])
        vector[1] = {8: math.inf, 10: math.nan}.get(step, vector[1])
        shared: dict[str, Any] = {"hold": step == 13, "max_grad_norm": norm}
        if step == 18:
            for row in rows:
                row.path = -1.0
            state = state.with_rows([row.copy() for row in rows], state.counts)
        outcome = tuner.decide(rows, vector.tolist(), [float(lr) for lr in lrs], chosen, **shared)
        counted = [counted[0] + outcome.applied, counted[1] + outcome.skipped]
        by_floats = state.with_rows([row.copy() for row in rows], (float(counted[0]), float(counted[1])))
        if step < 4:
            state = by_floats
            continue
        state, scales = gpu_tuner.launch(state, vector, settings=chosen, lrs=lrs, **shared)
        expected = [[after, outcome.applied, outcome.clip] for after in outcome.afters]
        torch.testing.assert_close(scales, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)
        assert list(state.counts) == counted
        for name in (*VECTORS, *SCALARS):
            a, b = by_floats.column(name), state.column(name)
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-300, msg=f"{name} in step {step}")
    assert (counted[1] > 2) == (norm in (None, math.inf))
    assert state.played.min() > 0
