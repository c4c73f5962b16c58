from __future__ import annotations

import itertools
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

from mechanic_plugins import MechanicOptimizer, bench
from mechanic_plugins.bench import costs, scale, timing

MECHANICS = ["mechanic, foreach", "base alone, fused", "mechanic"]
PEERS = ("mechanic_pytorch", "prodigyopt", "dadaptation", "schedulefree")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SIZES, "tiny", (8, 1))
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e9)
    monkeypatch.setattr(bench, "gpt2_shapes", lambda width, layers: [(width, width)] * (2 + layers))
    for name in PEERS:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed


@pytest.mark.parametrize("base", ["adamw", "sgd", "lion"])
def test_a_run_writes_one_object_a_line_and_prints_a_table(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    options = ["--device", "cpu", "--sizes", "tiny", "--repeats", "2"]
    assert bench.main([*options, "--base", base, "--json", str(path)]) == 0
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["name"] for r in results] == ["base alone", *MECHANICS[: 1 if base == "lion" else None]]
    for result in results:
        assert result.keys() == {field.name for field in fields(bench.Result)}
        assert result["params"] == 3 * 64
        assert result["tensors"] == 3
        assert result["seconds"] > 0
    assert results[0]["ratio"] == 1
    assert results[1]["state_bytes"] == results[0]["state_bytes"] + 4
    assert (results[0]["of_limit"] is None) is (base == "lion")
    table = capsys.readouterr().out
    assert all(r["name"] in table for r in results)
    assert "of the limit" in table


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    bench.main(["--device", "cpu", "--sizes", "tiny", "10M", "--repeats", "1", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_packages_are_measured_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    peer = SimpleNamespace(Prodigy=lambda params: built.append(params) or torch.optim.SGD(params))  # type: ignore[func-returns-value]
    monkeypatch.setitem(sys.modules, "prodigyopt", peer)
    rivals = bench.rivals("adamw", torch.device("cpu"))
    assert list(rivals) == [*MECHANICS, "prodigyopt"]
    names = [r.name for r in bench.measure([(2, 2)], "adamw", device=torch.device("cpu"), repeats=1)]
    assert names == ["base alone", *MECHANICS, "prodigyopt"]
    assert built


def test_a_number_of_repeats_that_gives_no_median_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--repeats", "0"])
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err


def test_a_queue_without_a_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--queued", "0"])
    assert "--queued must be at least 1, got 0" in capsys.readouterr().err


def test_all_steps_of_a_queue_are_made() -> None:
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    run = timing._Run([(2, 2)], bench.bases(where["device"])["adamw"], **where)
    assert run.timed(3) > 0
    assert run.optimizer.state[run.params[0]]["step"] == 3


@pytest.mark.slow
def test_everybody_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanic in its step, the others by torch's function before it."""
    made: list[timing._Run] = []
    real = timing._Run.__init__
    monkeypatch.setattr(timing._Run, "__init__", lambda self, *a, **k: (made.append(self), real(self, *a, **k))[1])
    list(bench.measure([(64, 64)] * 300, "adamw", device=torch.device("cpu"), repeats=1, clip=True))
    mechanics = {isinstance(run.optimizer, MechanicOptimizer) for run in made}
    assert mechanics == {True, False}
    for run in made:
        if isinstance(run.optimizer, MechanicOptimizer):
            assert run.optimizer.max_grad_norm == 1.0
            continue
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.params if p.grad is not None])
        assert norm == pytest.approx(1.0, rel=1e-4)


def test_lora_is_hundreds_of_small_tensors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = bench.lora_shapes()
    assert len(shapes) == 448
    assert sum(math.prod(shape) for shape in shapes) == 19_988_480
    monkeypatch.setattr(bench, "lora_shapes", lambda: shapes[:2])
    assert bench.main(["--device", "cpu", "--shapes", "lora", "--clip", "--repeats", "1"]) == 0
    assert "adamw, float32, clipped" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", scale.LAYOUTS)
def test_a_step_makes_one_collective_on_any_number_of_ranks(layout: str) -> None:
    few, many = (scale.cost_on(ranks, layout, size="tiny", repeats=1) for ranks in (16, 2048))
    assert (few.collectives, many.collectives) == (1, 1)
    assert few.delta == few.shard
    assert many.delta == many.shard <= few.shard


def test_ranks_that_fill_no_node_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--scale", "64", "100"])
    assert "--scale must be multiples of 8, got 100" in capsys.readouterr().err


def test_the_defaults_are_sizes_that_exist() -> None:
    assert set(bench._arguments([]).sizes) <= set(bench.SIZES)


@pytest.mark.parametrize(
    ("base", "path", "itemsize", "expected"),
    [
        ("adamw", "alone", 4, 28),
        ("adamw", "fused", 4, 8 + 36),
        ("adamw", "triton", 4, 8 + 8 + 28 + 20),
        ("sgd", "fused", 4, 8 + 28),
        ("adamw", "fused", 2, 6 + 26),
        ("adamw", "foreach", 4, None),
    ],
)
def test_the_bytes_are_counted(base: str, path: str, itemsize: int, expected: int | None) -> None:
    assert costs.bytes_of(base, path, itemsize=itemsize) == expected


def test_the_model_of_the_all_reduce_grows_with_the_logarithm_of_the_nodes() -> None:
    trees = [costs.all_reduce_microseconds(8 * nodes)["tree"] for nodes in (1, 2, 4, 8)]
    assert [b - a for a, b in itertools.pairwise(trees)] == pytest.approx([10.0] * 3)
    rings = [costs.all_reduce_microseconds(ranks)["ring"] for ranks in (2, 8)]
    assert rings == pytest.approx([6.6 + 2 * 0.6, 6.6 + 14 * 0.6])


def test_the_table_of_ranks_needs_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--ranks"]) == 0
    assert "| 10,000 |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_memory_benchmark_counts_what_is_kept() -> None:
    script = Path(__file__).parent.parent / "examples" / "benchmarks" / "memory.py"
    printed = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^(.*?)  +([\d.]+)$", printed, re.MULTILINE))
    names = ["AdamW", "Mechanic around AdamW", "the same with delta_dtype=torch.bfloat16"]
    names.append("the same after freeze(release=True)")
    assert [float(found[name]) for name in names] == [8.0, 12.0, 10.0, 8.0]
