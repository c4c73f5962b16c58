"""Tests the airbench94 example without GPU or data: what it changes in the script, and its page."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.xdist_group("test_airbench")

FOLDER = Path(__file__).parents[1]

STAND_IN = """
import torch

hyp = {"opt": {"lr": 0.5, "momentum": 0.85, "weight_decay": 0.01, "bias_scaler": 64.0}}
ended = {}


def main(run):
    options = hyp["opt"]
    lr, wd = options["lr"], options["weight_decay"]
    ratio = lr * options["bias_scaler"]
    layers = torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3, bias=False)
    model = torch.nn.Sequential(*layers)
    groups = [dict(params=[model[1].bias], lr=ratio, weight_decay=wd / ratio),
              dict(params=[model[0].weight, model[2].weight], lr=lr, weight_decay=wd / lr)]
    optimizer = torch.optim.SGD(groups, momentum=options["momentum"], nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.2 + step / 10))
    x = torch.randn(64, 4)
    y = x.argmax(1).clamp(max=2)
    for _ in range(30):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    ended["optimizer"], ended["weights"] = optimizer, [p.detach().clone() for p in model.parameters()]
    print("the script says much")
    return (model(x).argmax(1) == y).float().mean().item()
"""


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"airbench_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # needed by dataclasses
    spec.loader.exec_module(found)
    return found


run, report, mnist = module("run"), module("report"), module("mnist")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "airbench94.py"
    path.write_text(STAND_IN)
    return path


@pytest.fixture
def script(path: Path) -> Any:
    return run.loaded(path)


def trained(script: Any, method: str, factor: float = 1.0, where: str = "optimizer") -> tuple[dict[str, Any], Any]:
    record = run.train(script, run.Run(method, factor, where, 0))
    return record, script.ended["optimizer"]


def test_the_scripts_own_optimizer_stays_as_it_is(script: Any) -> None:
    record, optimizer = trained(script, "script")
    assert type(optimizer) is torch.optim.SGD
    assert record == {"method": "script", "factor": 1.0, "where": "optimizer", "seed": 0, **record}
    assert record["rate"] == 1.0
    weights = script.ended["weights"]
    torch.manual_seed(0)
    script.main(0)
    assert all(map(torch.equal, weights, script.ended["weights"]))


def test_mechanic_keeps_all_but_the_scale(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record, optimizer = trained(script, "mechanic")
    assert type(optimizer).__name__ == "MechanicSGD"
    assert optimizer.lrs[0] / optimizer.lrs[1] == pytest.approx(64.0)
    for group in optimizer.param_groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.01)
        assert (group["momentum"], group["nesterov"]) == (0.85, True)
    assert record["rate"] == pytest.approx(float(optimizer.scale), abs=1e-4)
    assert type(torch.optim.SGD) is type
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_rates_in_the_optimizer_change_nothing_for_mechanic(script: Any, factor: float) -> None:
    right, _ = trained(script, "mechanic")
    weights = script.ended["weights"]
    wrong, _ = trained(script, "mechanic", factor)
    for mine, other in zip(script.ended["weights"], weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert wrong["rate"] == pytest.approx(right["rate"], rel=1e-2)


@pytest.mark.parametrize(("where", "decay"), [("optimizer", 0.1), ("file", 0.01)])
def test_where_the_rate_is_wrong_decides_the_weight_decay(script: Any, where: str, decay: float) -> None:
    record, optimizer = trained(script, "script", 10.0, where)
    assert record["rate"] == 10.0
    assert [g["initial_lr"] for g in optimizer.param_groups] == pytest.approx([320.0, 5.0])
    assert [g["initial_lr"] * g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([decay, decay])
    assert script.hyp["opt"]["lr"] == 0.5  # restored


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"bias_scaler": 64.0', '"other": 1', "no .'bias_scaler'."),
        ("nesterov=True", "nesterov=False", "SGD is not airbench94's"),
        ("lr=ratio", "lr=lr", "SGD is not airbench94's"),
        (
            "torch.optim.SGD(groups, momentum",
            "torch.optim.AdamW(groups) if True else dict(a",
            "built no torch.optim.SGD",
        ),
    ],
)
def test_another_script_is_named(path: Path, old: str, new: str, said: str) -> None:
    plain = torch.optim.SGD
    text = path.read_text().replace(old, new)
    assert text != path.read_text()
    path.write_text(text.replace('options["bias_scaler"]', 'options.get("bias_scaler", 64.0)'))
    with pytest.raises(ValueError, match=said):
        run.train(run.loaded(path), run.Run("mechanic", 1.0, "optimizer", 0))
    assert torch.optim.SGD is plain


def test_a_path_without_a_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--script", str(tmp_path / "none.py"), "--data", str(tmp_path)])
    assert "no Python file" in capsys.readouterr().err


def test_cells_advance_together() -> None:
    order = run.runs(["mechanic:1:4", "script:10:2:file"], first_seed=5)
    assert [(r.method, r.factor, r.where, r.seed) for r in order] == [
        ("mechanic", 1.0, "optimizer", 5),
        ("script", 10.0, "file", 5),
        ("mechanic", 1.0, "optimizer", 6),
        ("mechanic", 1.0, "optimizer", 7),
        ("script", 10.0, "file", 6),
        ("mechanic", 1.0, "optimizer", 8),
    ]


def test_a_whole_run_writes_a_line_for_each(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the run changes the directory too
    records = tmp_path / "records.jsonl"
    words = ["--script", str(path), "--data", str(tmp_path), "--records", str(records)]
    run.main([*words, "--cells", "mechanic:1:2", "script:10:1:file"])
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert sorted((r["method"], r["seed"]) for r in found) == [("mechanic", 0), ("mechanic", 1), ("script", 0)]


# ------------------------------------------------------------------------------------------------ the page


def test_the_pages_table_follows_from_the_records() -> None:
    page = (FOLDER.parents[1] / "docs" / "airbench.md").read_text()
    records = report.read(report.RECORDS)
    assert report.table(records) in page
    assert report.filled(page, report.table(records)) == page
    assert len({(r["method"], r["factor"], r["where"], r["seed"]) for r in records}) == len(records)


def test_a_cell_has_the_mean_its_error_and_the_runs() -> None:
    records = [
        {"method": method, "factor": factor, "where": where, "accuracy": accuracy, "rate": rate}
        for factor, where in report.ROWS
        for method in ("script", "mechanic")
        for accuracy, rate in ((0.94, 0.9), (0.95, 1.1), (0.1, 1.0))
    ]
    assert report.table(records).splitlines()[3].split("|")[2:] == [
        " 66.33 ± 28.17 (3) ",
        " 66.33 ± 28.17 (3) ",
        " 1.00 (0.90 to 1.10) ",
        "",
    ]


def test_the_report_fills_the_page_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    page, picture = tmp_path / "page.md", tmp_path / "airbench.png"
    page.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    report.main(["--page", str(page), "--picture", str(picture)])
    table = report.table(report.read(report.RECORDS))
    assert page.read_text() == f"before\n<!-- table -->\n\n{table}\n\n<!-- end -->\nafter\n"
    assert picture.stat().st_size > 10_000


# ------------------------------------------------------------------------------------------------ MNIST

EXAMPLE = """
import argparse

import schedulefree
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
torch.manual_seed(parser.parse_args().seed)
x = torch.randn(100, 3)
data = [(row, int(row.argmax())) for row in x]
loader = torch.utils.data.DataLoader(data, batch_size=64, num_workers=1)
assert len(loader) == 2 and loader.dataset is data
model = torch.nn.Linear(3, 3)
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.0025)
for _ in range(3):
    optimizer.train()
    for pictures, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    optimizer.eval()
    schedulefree.seen.append((type(optimizer).__name__, optimizer.param_groups[0]["lr"]))
    print(f"Accuracy: {9900 + len(labels)}/10000")
"""


@pytest.mark.parametrize(("schedule", "lrs"), [("constant", [1e-3] * 3), ("falling", [7e-4, 4.9e-4, 3.43e-4])])
def test_the_mnist_example_trains_with_mechanic(
    schedule: str, lrs: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, float]] = []
    package = types.SimpleNamespace(AdamWScheduleFree=None, seen=seen)
    monkeypatch.setitem(sys.modules, "schedulefree", package)
    script, records = tmp_path / "main.py", tmp_path / "mnist.jsonl"
    script.write_text(EXAMPLE)
    mnist.main(["--script", str(script), "--schedules", schedule, "--seeds", "3", "--records", str(records)])
    record = {"schedule": schedule, "seed": 3, "accuracies": [0.9936] * 3}  # the last batch has 36
    assert report.read(records) == [record]
    assert package.AdamWScheduleFree is None
    assert [name for name, _ in seen] == ["MechanicAdamW"] * 3
    assert [lr for _, lr in seen] == pytest.approx(lrs)


def test_the_page_has_the_mnist_runs() -> None:
    page = (FOLDER.parents[1] / "docs" / "airbench.md").read_text()
    for record in report.read(FOLDER / "results" / "mnist.jsonl"):
        last, best = record["accuracies"][-1], max(record["accuracies"])
        assert f"| {100 * last:.2f}% | {100 * best:.2f}% |" in page
