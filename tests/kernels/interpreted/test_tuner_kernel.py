"""Compares the tuner's kernel with the decision in floats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_tensors import DEVICE
from torch import Tensor

from mechanic_plugins.kernels import gpu_tuner
from mechanic_plugins.rule.decide import decide, new_tuners
from mechanic_plugins.rule.default import DefaultTuner
from mechanic_plugins.rule.published import PublishedTuner
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import Sums
from mechanic_plugins.rule.tuner import Tuner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by NumPy, for what is not finite
_GG, _DG = Sums._fields.index("gg"), Sums._fields.index("dg")
RULES = ("paper", "experiments", "optax", "theory")


def flat(tuners: list[Tuner]) -> Tensor:
    return torch.tensor([number for tuner in tuners for number in tuner.numbers()], dtype=torch.float64, device=DEVICE)


def random_sums(generator: torch.Generator, tuners: int) -> Tensor:
    sums = torch.randn(tuners, len(Sums._fields), dtype=torch.float64, generator=generator)
    for name in ("gg", "xx", "dd"):
        sums[:, Sums._fields.index(name)].abs_()
    return sums


def vectors(tuners: int, steps: int) -> Iterator[list[float]]:
    """Steps without gradients, with a gradient of 0, and with an infinity or NaN in a sum of the last tuner."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        sums = random_sums(generator, tuners)
        if step == 0:  # nothing has moved
            sums[:, [Sums._fields.index("dg"), Sums._fields.index("dd")]] = 0
            sums.abs_()
        sums[0, _GG] *= {7: 0.0, 14: 1e12, 15: 1e12, 21: 1e30}.get(step, 1.0)
        sums[-1, _DG] += {8: math.inf, 10: math.nan, 9: math.nan}.get(step, 0.0)
        yield [*sums.flatten().tolist(), float(step not in (9, 12))]


def compare(
    tuners: list[Tuner],
    settings: Settings,
    norm: float | None,
    *,
    steps: int = 24,
    measured: tuple[int, ...] = (),
    held: tuple[int, ...] = (13,),
) -> tuple[list[Tuner], int]:
    """Returns the tuners in the end, and the number of steps that both made alike.

    The host alone makes the steps in `measured`. The scale is held in those of `held`, in all but the first of them
    because every learning rate is 0.
    """
    kind, by_kernel, alike = type(tuners[0]), flat(tuners), 0
    for step, vector in enumerate(vectors(len(tuners), steps)):
        lrs = [0.1 * min(step, 8, steps - step) + index for index in range(len(tuners))]
        if step in held[1:]:
            lrs = [0.0 for _ in lrs]
        shared: dict[str, Any] = {"hold": step in held, "max_grad_norm": norm}
        decision = decide(tuners, vector, lrs, settings, **shared)
        if step in measured:
            tuners = decision.tuners
            for index, tuner in enumerate(tuners):
                assert isinstance(tuner, DefaultTuner)
                tuner.take_measurement((0.1 + index) * (1 + 0.3 * math.sin(step)))
            by_kernel = flat(tuners)
            continue
        sums = torch.tensor(vector, dtype=torch.float64, device=DEVICE)
        by_kernel, table = gpu_tuner.launch(by_kernel, sums, kind=kind, settings=settings, lrs=lrs, **shared)
        rows = zip(decision.new_scales, decision.old_scales, decision.tuners, strict=True)
        expected = [[new, decision.is_made, decision.clip, old, tuner.steps] for new, old, tuner in rows]
        torch.testing.assert_close(table.cpu(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)
        tuners, alike = decision.tuners, alike + 1
        width = kind.width(settings.n)
        for index, tuner in enumerate(tuners):
            found = kind.of(by_kernel[index * width : (index + 1) * width].tolist(), settings.n)
            for name in (*kind.floats(), *kind.lists()):
                a, b = getattr(found, name), getattr(tuner, name)
                assert a == pytest.approx(b, rel=1e-10, abs=1e-300), f"{name} of tuner {index} in step {step}"
    return tuners, alike


HOST_STEPS = 0, 1, 2, 3, 11, 27
"""Those that are measured here, before, between and after the kernel's."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("norm", [None, 0.1, 1.3, math.inf])
def test_the_default_rule(count: int, norm: float | None) -> None:
    settings, tuners = Settings(), new_tuners(Settings(), count)
    tuners, alike = compare(tuners, settings, norm, steps=40, measured=HOST_STEPS, held=(13, 16))
    assert alike == 40 - len(HOST_STEPS)
    assert tuners[0].skipped == 2
    for tuner in tuners:
        assert isinstance(tuner, DefaultTuner)
        assert tuner.scale > 0 != tuner.evidence
        assert tuner.bonus > 0  # the learning rate has fallen


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_are_far_longer_than_the_last_ones_are_shortened(count: int) -> None:
    settings, tuners = Settings(), new_tuners(Settings(), count)
    clips = []
    for step, vector in enumerate(vectors(count, 40)):
        lrs = [1.0] * count
        decision = decide(tuners, vector, lrs, settings)
        if step < 3:
            tuners = decision.tuners
            for tuner in tuners:
                assert isinstance(tuner, DefaultTuner)
                tuner.take_measurement(0.1)
            continue
        shared: dict[str, Any] = {"lrs": lrs, "hold": False, "max_grad_norm": None}
        sums = torch.tensor(vector, dtype=torch.float64, device=DEVICE)
        _, table = gpu_tuner.launch(flat(tuners), sums, kind=DefaultTuner, settings=settings, **shared)
        assert table[0, 2].item() == pytest.approx(decision.clip, rel=1e-12)
        clips.append(decision.clip)
        tuners = decision.tuners
    assert sorted(clips)[:3] == pytest.approx([0, 0, 0], abs=1e-4)
    assert sorted(clips)[3] > 0.1


def test_the_default_rule_under_a_cap() -> None:
    ends = []
    for cap in (None, 1e-3):
        ends.append(compare(new_tuners(Settings(), 1), Settings(max_scale=cap), 0.1, measured=HOST_STEPS[:-1])[0][0])
    assert ends[1].scale == 1e-3
    assert 0 < ends[1].sum_scale_lr < ends[0].sum_scale_lr


@pytest.mark.parametrize("scale", [0.0, 0.3])
@pytest.mark.parametrize("change", [0.0, 0.5])
@pytest.mark.parametrize("norm", [0.0, 2.0])
@pytest.mark.parametrize("top_lr", [0.0, 0.05])
def test_the_default_rule_from_odd_states(scale: float, change: float, norm: float, top_lr: float) -> None:
    """Without a scale, a measurement or a gradient yet, as after a long warm-up from 0 or a restart."""
    tuner = DefaultTuner(scale=scale, change_square=change, norm_square=norm, full_steps=3.0, gradients=5.0)
    tuner.top_lr = tuner.sum_lr = top_lr
    compare([tuner], Settings(), None, steps=8, held=(0, 5))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("options", "count", "norm"),
    [({}, 1, None), ({}, 2, 0.7), ({"max_scale": 1e-3}, 2, math.inf), ({"s_decay": 0.0, "betas": (0.9,)}, 1, None)],
    ids=str,
)
def test_the_published_rules(rule: Any, options: dict[str, Any], count: int, norm: float | None) -> None:
    settings = Settings(rule=rule, s_init=1e-2, **options)
    tuners = new_tuners(settings, count)
    for index, tuner in enumerate(tuners):
        tuner.unit = tuner.top_lr = 0.1 + 2 * index
        tuner.scale = sum(tuner.s) if isinstance(tuner, PublishedTuner) else 0.0
    tuners, alike = compare(tuners, settings, norm)
    assert alike == 24
    assert max(tuner.scale for tuner in tuners) > 0
    assert tuners[0].skipped == 2
    assert not options.get("max_scale") or max(tuner.scale for tuner in tuners) <= 1e-3 * (1 + 1e-12)


def test_learning_rates_may_lie_on_the_device() -> None:
    settings = Settings(rule="paper", scope="group")
    tuners = new_tuners(settings, 2)
    for tuner in tuners:
        tuner.unit = 0.1
    sums = torch.cat([random_sums(torch.Generator().manual_seed(1), 2).flatten(), torch.ones(1)]).to(DEVICE)
    shared: dict[str, Any] = {"kind": PublishedTuner, "settings": settings, "hold": False, "max_grad_norm": None}
    lrs = torch.tensor([0.1, 0.2], dtype=torch.float64, device=DEVICE)
    ways = (lrs, [0.1, 0.2], [0.1, lrs[1:]])
    found = [gpu_tuner.launch(flat(tuners), sums, lrs=way, **shared)[0] for way in ways]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
