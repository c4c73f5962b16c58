"""A resumed run equals the uninterrupted one: bit for bit on as many ranks, up to rounding on other numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import build_ops
import checkpoint_engines as on_rank
import pytest
from engines import Case
from ranks import Ranks
from test_deepspeed_parity import distance, size

from mechanic_plugins import Settings

Engines = Callable[[int], Ranks]

LARGER: dict[str, Any] = {"settings": Settings(rule="paper", s_init=1e-3, s_decay=0.01)}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_OPTIMIZER: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
CPU_ADAM: dict[str, Any] = {"base": "DeepSpeedCPUAdam", "zero": {"offload_optimizer": {"device": "cpu"}}}
CASE = Case(clip=0.1)

RESUMED = [
    *(CASE.but(stage=stage) for stage in (0, 1, 2, 3)),
    *(CASE.but(stage=stage, config=BF16, options=LARGER) for stage in (0, 1, 2, 3)),
    CASE.but(stage=1, config=BF16_OPTIMIZER, options=LARGER),
    *(CASE.but(stage=stage, **CPU_ADAM) for stage in (2, 3)),
    *(CASE.but(stage=stage, param_groups=2, options={"scope": "group"}) for stage in (2, 3)),
    CASE.but(stage=2, config={"fp16": {"enabled": True, "initial_scale_power": 12}}, options=LARGER),
]


@pytest.mark.parametrize("case", RESUMED, ids=Case.id)
def test_resumed_to_the_last_bit(engines: Engines, case: Case, tmp_path: Path) -> None:
    for seen in engines(2)(on_rank.run_and_resume, case, str(tmp_path)):
        straight, resumed = seen["straight"], seen["resumed"]
        for key in ("weights", "s", "h"):
            assert resumed[key] == straight[key]
        assert resumed["steps"] == case.steps
        assert size(straight["s"]) > 0


# Numbers of ranks that resume. In bf16, another number rounds the gradients elsewhere; at stages 1 and 2, DeepSpeed
# cannot load a group too small to leave every rank a piece (here: 11 weights on 4 ranks).
UNIVERSAL = [
    *((CASE.but(stage=stage, options=LARGER), (2, 1, 4)) for stage in (1, 2, 3)),
    (CASE.but(stage=2, options={"settings": replace(LARGER["settings"], scope="group")}, param_groups=2), (1,)),
    (CASE.but(stage=3, options={"settings": replace(LARGER["settings"], scope="group")}, param_groups=2), (1, 4)),
    (CASE.but(stage=1, config=BF16_OPTIMIZER, options=LARGER), (2,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "world_sizes"), UNIVERSAL, ids=[case.id() for case, _ in UNIVERSAL])
def test_universal_checkpoint(engines: Engines, case: Case, world_sizes: tuple[int, ...], tmp_path: Path) -> None:
    straight = engines(2)(on_rank.run_and_convert, case, str(tmp_path), True)[0]
    for world_size in world_sizes:
        ranks = engines(world_size)(on_rank.run_from_universal, case, str(tmp_path))
        tolerance = 1e-6 if world_size != 2 else 0
        for seen in ranks:
            assert seen["s"] == ranks[0]["s"]
            assert seen["steps"] == case.steps
            for key in ("weights", "h", "s"):
                scale = size(straight[key]) if key != "weights" else 1
                assert distance(seen[key], straight[key]) <= tolerance * scale


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_converter_leaves_delta_out_and_that_is_refused(
    engines: Engines, stage: int, tmp_path: Path
) -> None:
    case = CASE.but(stage=stage)
    engines(2)(on_rank.run_and_convert, case, str(tmp_path), False)
    for message in engines(2)(on_rank.fail_from_universal, case, str(tmp_path)):
        assert "no mechanic_ref" in message
        assert "python -m mechanic_plugins.ds_to_universal" in message


@pytest.mark.slow
def test_the_converters_command_line(engines: Engines, tmp_path: Path) -> None:
    case = CASE.but(stage=1)
    engines(2)(on_rank.run_and_resume, case, str(tmp_path))
    command = [sys.executable, "-m", "mechanic_plugins.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(tmp_path / "step"), "--output_folder", str(tmp_path / "universal")]
    subprocess.run([*command, *folders], check=True, env=build_ops.environment(), stdout=subprocess.DEVNULL)
    found = {path.parent.name for path in (tmp_path / "universal" / "zero").glob("*/mechanic_ref.pt")}
    assert found == {"gain", "first.weight", "first.bias", "second.weight", "second.bias"}
