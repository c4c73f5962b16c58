"""The promise of Algorithm 2, `rule="theory"`: its regret is bounded for every sequence of h and every fixed scale.

The paper's theorem (appendix, "Regret Bound"): with beta = 1, for all scales s >= 0,

    sum(h_t * (S_t - s)) <= W_0 + (s + max(S_t)) * m_T + O(s * log(T * s * m_T / (m_1 * W_0)) * sqrt(sum(h_t^2)))

where m_T is the largest |h|, m_1 the first one, and W_0 = s_init * m_1 the wealth at the start.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mechanic_plugins.rule.decide import decide, new_tuners
from mechanic_plugins.rule.settings import Settings

Vector = NDArray[np.float64]

STEPS = 5000
S_INIT = 1e-8
CONSTANT = 0.5
"""In place of the theorem's O(...). With the sign of q as printed, a favourable h would need 1.3."""
SEQUENCES: dict[str, Callable[[np.random.Generator], Vector]] = {
    "noise": lambda random: random.normal(size=STEPS),
    "favourable": lambda random: random.normal(-0.3, 1.0, size=STEPS),
    "adverse": lambda random: random.normal(0.3, 1.0, size=STEPS),
    "flipping": lambda random: random.normal(0.2, 1.0, size=STEPS) - 0.4 * (np.arange(STEPS) // 500 % 2 == 0),
    "heavy-tailed": lambda random: random.standard_t(1.5, size=STEPS) - 0.5,
}
COMPARATORS = (0.0, 1e-6, 1e-3, 1.0, 1e3)


@functools.cache
def played(kind: str, seed: int) -> tuple[Vector, Vector]:
    """The h, in units of the first one, and the scale at each of them."""
    h = SEQUENCES[kind](np.random.default_rng(seed))
    h /= abs(h[0])
    settings = Settings(rule="theory", betas=(1.0,), s_init=S_INIT, s_decay=0.0, eps=0.0)
    tuners, scales = new_tuners(settings, 1), []
    tuners[0].unit = 1.0
    for value in h.tolist():
        decision = decide(tuners, [value, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0], [1.0], settings)
        scales += decision.old_scales
        tuners = decision.tuners
    return h, np.array(scales)


@pytest.mark.parametrize("s", COMPARATORS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SEQUENCES)
def test_the_regret_is_bounded(kind: str, seed: int, s: float) -> None:
    h, scales = played(kind, seed)
    largest = float(np.abs(h).max())
    regret = float((h * (scales - s)).sum())
    logarithm = math.log(max(1.0, STEPS * s * largest / S_INIT))
    third = CONSTANT * s * logarithm * math.sqrt(float((h**2).sum()))
    assert regret <= S_INIT + (s + scales.max()) * largest + third


@pytest.mark.parametrize("seed", range(3))
def test_what_favours_a_large_scale_gets_one(seed: int) -> None:
    """By orders of magnitude, while an adverse h never raises it."""
    h, scales = played("favourable", seed)
    assert scales[-1] > 1e3 * S_INIT
    assert (h * scales).sum() < -1e3 * S_INIT
    assert played("adverse", seed)[1].max() < 10 * S_INIT


@pytest.mark.parametrize("kind", SEQUENCES)
def test_the_loss_is_never_more_than_what_was_there_at_the_start(kind: str) -> None:
    """The wealth, W_0 less the losses on the clipped h, stays above 0, which the proof rests on."""
    h, scales = played(kind, 0)
    before = np.concatenate([[0.0], np.maximum.accumulate(np.abs(h))[:-1]])
    wealth = S_INIT - np.cumsum(np.clip(h, -before, before) * scales)
    assert wealth.min() > 0
