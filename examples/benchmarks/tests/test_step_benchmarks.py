from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mechanic_plugins import MechanicOptimizer

pytestmark = pytest.mark.xdist_group("test_step_benchmarks")

FOLDER = Path(__file__).parents[1]
CPU = torch.device("cpu")
NAMES = ["base alone", "mechanic", "mechanic, paper"]


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # needed by dataclasses
    spec.loader.exec_module(module)
    return module


bench = loaded("optimizer_step")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mechanic_pytorch", "prodigyopt", "dadaptation", "schedulefree"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed


@pytest.mark.parametrize("words", ["--shapes tiny --base lion", "--shapes tiny --clip", "--shapes mlp6"])
def test_a_run_writes_one_object_a_line_and_prints_a_table(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    assert bench.main(["--device", "cpu", "--repeats", "2", "--json", str(path), *words.split()]) == 0
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["name"] for r in results] == NAMES
    for result in results:
        assert result.keys() == {field.name for field in fields(bench.Result)}
        assert result["seconds"] > 0
    assert results[0]["ratio"] == 1
    for mechanic in results[1:]:  # one number more for each weight: its start, or Delta
        assert mechanic["state_bytes"] == results[0]["state_bytes"] + 4
    printed = capsys.readouterr().out
    assert all(r["name"] in printed for r in results)
    assert ("clipped" in printed) is ("--clip" in words)


def test_the_shapes_are_what_their_names_say() -> None:
    assert [len(bench.SHAPES[name]()) for name in ("mlp6", "mlp26", "lora")] == [6, 26, 448]
    counts = {name: sum(map(math.prod, bench.SHAPES[name]())) for name in ("lora", "124M")}
    assert counts == {"lora": 19_988_480, "124M": 124_439_808}


def test_on_a_gpu_both_rules_are_measured_with_every_backend() -> None:
    names = bench.rivals("adamw", torch.device("cuda"), small=False, backends=("fused", "triton")).keys()
    for name in ("mechanic", "mechanic, paper"):
        assert {f"{name}, fused", f"{name}, triton", f"{name}, bf16 delta"} < names


def test_small_models_are_timed_on_one_thread_against_prodigy(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    peer = SimpleNamespace(Prodigy=lambda params: threads.append(torch.get_num_threads()) or torch.optim.SGD(params))  # type: ignore[func-returns-value]
    monkeypatch.setitem(sys.modules, "prodigyopt", peer)
    before = torch.get_num_threads()
    assert [r.name for r in bench.measure("mlp6", "adam", device=CPU, repeats=1)] == [*NAMES, "prodigyopt"]
    assert threads == [1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("option", ["--repeats", "--queued"])
def test_numbers_without_a_step_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_everybody_clips() -> None:
    """Mechanic clips inside its step, the others by torch's function before it."""
    for name, factory in bench.rivals("adamw", CPU, small=False, clip=True).items():
        run = bench._Run([(64, 64)] * 300, factory, device=CPU, dtype=torch.float32, clip=True)
        if isinstance(run.optimizer, MechanicOptimizer):
            assert run.optimizer.max_grad_norm == 1.0
            continue
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.params if p.grad is not None])
        assert norm == pytest.approx(1.0, rel=1e-4), name


@pytest.mark.slow
def test_the_memory_benchmark_counts_what_is_kept() -> None:
    printed = subprocess.run(
        [sys.executable, str(FOLDER / "memory.py")], check=True, capture_output=True, text=True
    ).stdout
    found = dict(re.findall(r"^(.*?)  +([\d.]+)$", printed, re.MULTILINE))
    names = ["AdamW", "Mechanic around AdamW", "the same with kept_dtype=torch.bfloat16"]
    names.append("the same after freeze(release=True)")
    names += ["the same with rule='paper'", "the same with rule='paper' and bfloat16"]
    assert [float(found[name]) for name in names] == [8.0, 12.0, 10.0, 8.0, 12.0, 10.0]
