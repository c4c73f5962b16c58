"""DeepSpeedStrategy on two CPU ranks equals one process with the whole batch, and itself interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import NAMESPACES, plain_loop
from lightning_on_engines import fit_engine, refusal
from lightning_on_ranks import OPTIONS
from ranks import Ranks

pytestmark = pytest.mark.slow

Engines = Callable[[int], Ranks]
CASES = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]


def run(engines: Engines, *args: Any, **kwargs: Any) -> Any:
    first, second = engines(2)(fit_engine, *args, **kwargs)
    assert first["weights"] == second["weights"]
    assert first["tuner"] == second["tuner"], "the ranks learned different scales"
    assert [len(first["said"]), len(second["said"])] == [1, 0]
    assert "Adam: Mechanic learned a learning rate of" in first["said"][0].replace("AdamW", "Adam")
    return first


@pytest.mark.parametrize(
    ("stage", "offload"), CASES, ids=[f"stage{stage}{'-offload' * offload}" for stage, offload in CASES]
)
def test_every_stage_equals_one_process_and_resumes_exactly(
    engines: Engines, stage: int, offload: bool, tmp_path: Path
) -> None:
    namespace = NAMESPACES[stage % 2]
    whole = run(engines, namespace, stage, offload=offload)
    expected = plain_loop(
        **OPTIONS,
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        after_step=lambda scheduler, index: scheduler.step(),
    )
    for found, wanted in zip(whole["weights"], expected.weights, strict=True):
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-6)
    assert whole["scale"] == pytest.approx(expected.optimizer.scale.item(), rel=1e-5)
    assert whole["logged"]["mechanic/scale"] == pytest.approx(whole["scale"], rel=1e-6)
    assert whole["schedules"] in ("AdamW", "DeepSpeedCPUAdam"), "the scheduler was not given back"

    run(engines, namespace, stage, offload=offload, epochs=1, save=tmp_path / "half.ckpt")
    resumed = run(engines, namespace, stage, offload=offload, ckpt_path=tmp_path / "half.ckpt")
    assert resumed["tuner"] == whole["tuner"]
    assert resumed["weights"] == whole["weights"]


def test_an_optimizer_that_the_config_builds_without_mechanic_is_refused(engines: Engines) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    said = engines(2)(refusal, NAMESPACES[0], config)
    assert all("builds its own optimizer" in message and "MechanicSGD" in message for message in said)
