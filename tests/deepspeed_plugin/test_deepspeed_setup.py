"""How Mechanic gets into an engine, what it refuses, and that no rank tunes on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import build_ops
import engines as plain_side
import pytest
import setup_engines as on_rank
from engines import Case
from ranks import Ranks
from test_deepspeed_parity import assert_same_training

from mechanic_plugins import Settings

Engines = Callable[[int], Ranks]

CPU = {"device": "cpu"}


def json_optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize("stage", [0, 2])
def test_from_the_config_file(engines: Engines, stage: int) -> None:
    """Mechanic's options are given together with the base's arguments."""
    params = {"lr": 1.0, "weight_decay": 0.01, "eps": 1e-6, "betas": [0.9, 0.99], "max_scale": 0.5}
    case = Case(stage=stage, config=json_optimizer("MechanicAdamW", **params), steps=12)
    ranks = engines(2)(on_rank.run_from_json, case)
    base = {k: params[k] for k in ("lr", "weight_decay", "eps", "betas")}
    same = Case(base_options=base, options={"max_scale": 0.5}, steps=12)
    assert_same_training(same, ranks, plain_side.plain_run(same))
    assert "max_scale=0.5" in ranks[0]["settings"]
    assert ranks[0]["report"].startswith("Mechanic learned a learning rate of ")
    assert ranks[0]["base"] == "AdamW"


def test_the_papers_rule_from_the_config_file(engines: Engines) -> None:
    case = Case(stage=2, config=json_optimizer("MechanicAdamW", lr=1.0, rule="paper"), steps=12)
    ranks = engines(2)(on_rank.run_from_json, case)
    same = Case(base_options={"lr": 1.0}, options={"rule": "paper"}, steps=12)
    assert_same_training(same, ranks, plain_side.plain_run(same))
    assert ranks[0]["report"].endswith('(rule="paper").')


def test_the_constants_of_a_published_rule_are_params_too(engines: Engines) -> None:
    """The base's betas and eps stay its own."""
    constants = {"s_init": 1e-3, "s_decay": 0.1, "tuner_betas": [0.9, 0.99], "tuner_eps": 1e-6}
    params = {"lr": 1.0, "betas": [0.8, 0.9], "eps": 1e-5, "rule": "paper", **constants}
    [rank] = engines(1)(on_rank.run_from_json, Case(config=json_optimizer("MechanicAdamW", **params), steps=2))
    assert rank["settings"] == repr(Settings(rule="paper", s_init=1e-3, s_decay=0.1, betas=(0.9, 0.99), eps=1e-6))
    assert rank["base_group"] == ([0.8, 0.9], 1e-5)


def test_an_offloaded_one_from_the_config_file_is_deepspeeds_own(engines: Engines) -> None:
    zero = {"offload_optimizer": CPU}
    case = Case(stage=2, config=json_optimizer("MechanicAdamW", lr=1.0, weight_decay=0.01), zero=zero, steps=12)
    ranks = engines(2)(on_rank.run_from_json, case)
    assert ranks[0]["base"] == "DeepSpeedCPUAdam"
    assert_same_training(case.but(base="DeepSpeedCPUAdam"), ranks, plain_side.plain_run(Case(steps=12)))
    torchs = case.but(config=json_optimizer("MechanicAdamW", lr=1.0, weight_decay=0.01, torch_adam=True))
    assert engines(2)(on_rank.run_from_json, torchs)[0]["base"] == "AdamW"


def test_torch_adam_without_offload_changes_nothing(engines: Engines) -> None:
    """It used to be passed to AdamW, which has no such argument."""
    case = Case(stage=2, config=json_optimizer("MechanicAdamW", lr=1.0, torch_adam=True), steps=2)
    assert engines(1)(on_rank.run_from_json, case)[0]["base"] == "AdamW"


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": CPU}], ids=["torchs", "deepspeeds"])
def test_params_that_neither_has_are_answered(engines: Engines, zero: dict[str, Any]) -> None:
    case = Case(stage=2, config=json_optimizer("MechanicAdamW", lr=1.0, max_skale=0.1), zero=zero)
    (message,) = engines(1)(on_rank.refusal_of_params, case)
    assert message.endswith("() has no argument 'max_skale': did you mean 'max_scale'?")


@pytest.mark.parametrize("what", ["class", "function"])
def test_something_that_builds_the_optimizer(engines: Engines, what: str) -> None:
    base = {"lr": 1e-3} if what == "class" else Case().base_options
    case = Case(stage=2, base_options=base, steps=12)
    ranks = engines(2)(on_rank.run_given, case, what)
    assert_same_training(case, ranks, plain_side.plain_run(case))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_scheduler_gets_the_mechanized_optimizer(engines: Engines, stage: int) -> None:
    for seen in engines(2)(on_rank.run_with_scheduler, Case(stage=stage)):
        assert seen["optimizer_is_ours"]
        assert seen["lr"] == pytest.approx(16 / 20)


@pytest.mark.parametrize("stage", [1, 3])
def test_attaching_again_changes_nothing(engines: Engines, stage: int) -> None:
    seen = engines(2)(on_rank.attach_twice, Case(stage=stage))[0]
    assert "which is not mechanized" in seen.pop("attach_plain")
    assert seen == dict.fromkeys(seen, True)


# -------------------------------------------------------------------- no rank tunes alone


@pytest.mark.parametrize(
    "case",
    [*(Case(stage=stage) for stage in (0, 1, 2, 3)), Case(config={"bf16": {"enabled": True}})],
    ids=Case.id,
)
def test_without_the_plugin_the_first_step_raises(engines: Engines, case: Case) -> None:
    for message in engines(2)(on_rank.train_unattached, case):
        assert "every rank would learn a scale of its own" in message
        assert "import mechanic_plugins.deepspeed" in message


@pytest.mark.parametrize("stage", [1, 3])
def test_attached_by_hand(engines: Engines, stage: int) -> None:
    case = Case(stage=stage, steps=12)
    assert_same_training(case, engines(2)(on_rank.attach_late, case), plain_side.plain_run(case))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_past_the_engine_raises(engines: Engines, stage: int) -> None:
    for message in engines(2)(on_rank.step_past_the_engine, Case(stage=stage)):
        assert "call engine.step()" in message


# -------------------------------------------------------------------- what is refused

REFUSED = {
    "ZenFlow": Case(stage=2, zero={"offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.1}}),
    "SuperOffload": Case(stage=3, base="DeepSpeedCPUAdam", zero={"offload_optimizer": {**CPU, "super_offload": True}}),
    "torch_autocast with float16": Case(stage=1, config={"torch_autocast": {"enabled": True, "dtype": "float16"}}),
    "low-precision master weights": Case(
        stage=2,
        base="DeepSpeedCPUAdam",
        zero={"offload_optimizer": CPU},
        config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    "an optimizer on NVMe": Case(stage=3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}),
    "an offload ratio of 0.5": Case(stage=3, zero={"offload_optimizer": {**CPU, "ratio": 0.5}}),
    "elastic checkpoints": Case(stage=1, zero={"elastic_checkpoint": True}),
    "DeepCompile": Case(stage=1, config={"compile": {"deepcompile": True}}),
    "mechanize(kept_dtype=torch.bfloat16)": Case(stage=1, options={"kept_dtype": "bfloat16"}),
    "torch.optim.Adagrad": Case(stage=1, base="Adagrad", base_options={"lr": 1.0}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(engines: Engines, what: str) -> None:
    (message,) = engines(1)(on_rank.refusal, REFUSED[what])
    assert message.startswith(f"Mechanic does not support {what} under DeepSpeed: ")
    assert message.count(".") >= 2, "a reason and a remedy"


def test_adagrad_is_refused_only_where_deepspeed_replaces_it(engines: Engines) -> None:
    case = Case(base="Adagrad", base_options={"lr": 1.0}, steps=12)
    assert_same_training(case, engines(2)(plain_side.run, case), plain_side.plain_run(case))


def test_muon_pipelines_groups_and_clipping_are_refused(engines: Engines) -> None:
    assert "does not support Muon" in engines(2)(on_rank.refusal_of_muon, Case(stage=1))[0]
    assert "does not support a PipelineModule" in engines(2)(on_rank.refusal_of_pipelines, Case(stage=0))[0]
    assert "does not support mechanize(group=...)" in engines(2)(on_rank.refusal_of_groups, Case(stage=1))[0]
    for stage in (0, 1):
        refusal = engines(2)(on_rank.refusal_of_clipping, Case(stage=stage))[0]
        assert "does not support mechanize(max_grad_norm=...)" in refusal
        assert "Set 'gradient_clipping' in the DeepSpeed config" in refusal


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_takes_no_more_memory_than_a_sub_group_has(engines: Engines, stage: int) -> None:
    zero = {"sub_group_size": 200, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    seen = engines(2)(on_rank.peak_of_a_step, Case(stage=stage, zero=zero, steps=3), 24)[0]
    assert seen["deltas"]
    assert seen["largest"] <= seen["largest_piece"]
    assert (seen["largest_piece"] < seen["all"]) == (stage == 3)
    assert seen["largest_double"] <= 64


# -------------------------------------------------------------------- the compiled operators


def test_a_stale_lock_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed build leaves torch's lock behind, and every later build waits for it forever."""
    monkeypatch.setattr(build_ops, "extensions_dir", lambda: tmp_path)
    for op in build_ops.OPS:
        (tmp_path / op).mkdir()
        (tmp_path / op / f"{op}.so").touch()
        (tmp_path / op / "lock").touch()
    build_ops._stamp().write_text(build_ops._versions())
    assert not build_ops.are_compiled(), "the build that held the lock did not finish"
    with build_ops._alone():
        build_ops.remove_locks()
    assert build_ops.are_compiled()


def test_without_a_compiler_it_is_said_and_ci_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_ops, "extensions_dir", lambda: tmp_path)
    monkeypatch.setattr(build_ops.shutil, "which", lambda tool, path=None: None)
    assert build_ops.why_not() == (
        "DeepSpeed compiles its CPU operators with g++ and ninja, and g++ and ninja cannot be found"
    )
    for ci, code in (("", 0), ("true", 1)):
        monkeypatch.setenv("CI", ci)
        assert build_ops.main() == code
        assert "will be skipped" in capsys.readouterr().err


def test_a_build_that_takes_minutes_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeed's first run on a CPU used to compile silently."""
    import mechanic_plugins.deepspeed as plugin

    said: list[str] = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(plugin.logger, "warning", said.append)
    load = functools.partial(plugin._jit_load, lambda builder: "loaded")
    builder = SimpleNamespace(name="cpu_adam")
    assert load(builder) == "loaded"
    (tmp_path / "cpu_adam.so").touch()
    assert load(builder) == "loaded"
    (line,) = said
    assert "compiles its operator cpu_adam on first use" in line
