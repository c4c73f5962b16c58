"""The benchmark of tuning quality: every family at a small size, the queue, and the results page."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.xdist_group("test_quality_benchmark")

FOLDER = Path(__file__).parents[1] / "quality"
ONE_OF_EACH_FAMILY = {
    "convex": "iris, sgd",
    "MLPs": "digits, adamw, MLP",
    "separable": "wine, sgd, separable",
    "regressions": "diabetes, adamw, regression",
    "streams": "stream of digits, sgd",
    "collapse": "collapse, lion, decay 0.1, constant",
    "images": "digits, sgd",
    "ResNet-18": "ResNet-18, sgd",
    "VGG": "VGG, sgd",
    "ViT": "ViT, adamw",
    "diffusion": "diffusion, adamw",
    "language": "sources, adamw, 3000 steps",
    "language, 500 steps": "sources, adamw, 500 steps",
    "language, 1000 steps": "sources, lion, 1000 steps",
    "fine-tuning": "sources to sources, adamw",
    "warm-ups": "sources, adamw, warm-up 4",
    "trends": "sources, adamw, batch 16, width 16",
    "GPT": "GPT, muon, 1500 steps",
    "GPT-2": "GPT-2, adamw, 1500 steps",
    "GPT tuned": "GPT tuned, adamw, 75 steps",
    "GPT with LoRA": "GPT with LoRA, adamw, 200 steps",
    "schedules": "digits, adamw, MLP, restarts",
    "kept back": "LSTM, adamw",
    "ResNet-18, 200 epochs": "ResNet-18, sgd, 200 epochs",
    "BERT": "BERT, adamw, dropout 0.1",
    "BERT tuned": "BERT on lines, adamw, dropout 0",
}
OTHERS = (
    *("collapse, random labels", "collapse, tied embeddings", "collapse, adam, decay 0.01, cosine", "digits, adamw"),
    *("ConvNeXt, adamw", "ResNet with group norm, sgd, constant", "Mixer, adamw, wsd", "VAE, adam, constant"),
)


@pytest.fixture(scope="module", autouse=True)
def benchmark_on_the_path() -> Iterator[None]:
    """Its modules have common names, so they are removed after the tests in this file."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(FOLDER) in str(sys.modules[name].__file__):
            del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module("training").Setup("smoke", None, None, "cpu", tmp_path_factory.mktemp("pretrained"))


def trained(setup: Any, problem: str, method: str = "mechanic", *members: tuple[float, int]) -> list[dict[str, Any]]:
    training = module("training")
    records: list[dict[str, Any]] = training.run(training.Job(problem, method, members or ((1.0, 0),)), setup)
    return json.loads(json.dumps(records))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon computes in bfloat16, which not every CPU supports
@pytest.mark.parametrize("problem", [*ONE_OF_EACH_FAMILY.values(), *OTHERS])
def test_every_family_trains(setup: Any, problem: str) -> None:
    (record,) = trained(setup, problem)
    (untrained,) = trained(setup, problem, "sweep", (1e-12, 0))  # some batches are harder than others
    assert sum(record["losses"][-5:]) < sum(untrained["losses"][-5:])
    assert record["train_loss"] < 1e9
    assert 0 <= record[record["measure"]] < 1e9
    assert record["test_loss"] < 1e9


def test_one_of_each_family_was_tried(setup: Any) -> None:
    table, families = setup.problems(), module("catalogue").FAMILIES
    assert {table[name].family for name in ONE_OF_EACH_FAMILY.values()} == set(ONE_OF_EACH_FAMILY)
    assert set(ONE_OF_EACH_FAMILY) == set().union(*families.values()) == {p.family for p in table.values()}


def test_every_sweep_of_adamw_has_the_learning_rate_of_those_who_do_not_tune(setup: Any) -> None:
    swept = [p for p in setup.problems().values() if p.base == "adamw" and p.lrs]
    assert len(swept) > 20
    assert all(1e-3 in p.lrs for p in swept)


def test_members_that_share_their_launches_train_as_they_would_alone(setup: Any) -> None:
    together = trained(setup, "wine, sgd, separable", "sweep", (0.01, 0), (0.1, 1))
    for record, member in zip(together, ((0.01, 0), (0.1, 1)), strict=True):
        (alone,) = trained(setup, "wine, sgd, separable", "sweep", member)
        for key in ("train_loss", "test_loss", "losses"):
            assert record[key] == pytest.approx(alone[key], rel=1e-4)


def test_lora_trains_only_what_it_adds(setup: Any) -> None:
    import torch

    (model,) = setup.problems()["GPT with LoRA, adamw, 75 steps"].build([0], torch.device("cpu")).members
    names = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"a", "b"}
    optimizer = module("methods").METHODS["sweep"].build(setup.problems()["GPT, adamw, 1500 steps"], model, 1e-3)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 5


def test_an_ablation_changes_one_number_wherever_it_is_used(setup: Any) -> None:
    """decide.py has its own name for CLIP, which used to keep its value."""
    import torch

    methods, problem = module("methods"), setup.problems()["wine, sgd, separable"]
    (model,) = problem.build([0], torch.device("cpu")).members
    at_first = dict(methods._NUMBERS)
    for name, factor in (("CLIP", 1e3), ("TOO_LONG", 1e3), ("WINDOW", 0.5), ("TOP", 0.0)):
        methods.METHODS[f"mechanic, {name} x{factor:g}"].build(problem, model, 1.0)
        expected = {**at_first, name: factor * at_first[name]}
        for place in ("rule.default", "rule.decide", "optimizer.step"):
            names = vars(importlib.import_module(f"mechanic_plugins.{place}"))
            assert {key: names[key] for key in at_first if key in names}.items() <= expected.items()
    methods.METHODS["mechanic"].build(problem, model, 1.0)
    assert importlib.import_module("mechanic_plugins.rule.decide").CLIP == at_first["CLIP"]


def test_crop_and_flip_moves_each_picture_on_its_own() -> None:
    import torch

    pictures = torch.rand(3, 2, 8, 8)
    rows = torch.arange(3).repeat(20)
    found = module("pictures")._crop_and_flip(pictures, rows, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(pictures, (4, 4, 4, 4))
    views = torch.stack(
        [
            (padded if not flip else padded.flip(3))[:, :, down : down + 8, right : right + 8]
            for flip in (False, True)
            for down in range(9)
            for right in range(9)
        ]
    )
    shifts = [(views[:, row] == picture).flatten(1).all(1).nonzero() for row, picture in zip(rows, found, strict=True)]
    assert all(len(which) for which in shifts)
    assert len({int(which[0]) for which in shifts}) > 20


def test_the_base_learning_rate_does_not_matter(setup: Any) -> None:
    lrs = module("methods").METHODS["mechanic, other lrs"].lrs
    losses = [record["train_loss"] for record in trained(setup, "iris, sgd", "mechanic", *((lr, 0) for lr in lrs))]
    assert len(losses) == 3
    assert max(losses) <= 1.005 * min(losses)


# ------------------------------------------------------------------------------------------------ the queue


Here = Callable[..., str]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a script's main in this process and returns its output."""

    def here(script: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        module(script).main()
        return capsys.readouterr().out

    return here


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "results.jsonl"
    chosen = ("--only", "convex: iris", "GPT: GPT, adamw, 1500", "--seeds", "1", "--lrs", "1e-3", "1e-2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["run", *chosen, "--methods", "mechanic", "sweep", "--jobs", "2", "--out", str(path)]
        )
        module("run").main()
    return path


@pytest.mark.slow
def test_what_is_done_is_not_done_again(results: Path, here: Here) -> None:
    before = results.read_text()
    chosen = ("--only", "convex: iris", "GPT: GPT, adamw, 1500", "--methods", "mechanic", "sweep")
    more = here("run", *chosen, "--seeds", "2", "--lrs", "1e-3", "--time-limit", "0", "--out", results)
    assert "6 jobs to run" in more  # those of the second seed
    assert "time is up: 6 jobs are left" in more
    assert results.read_text() == before


@pytest.mark.slow
def test_the_page(results: Path, here: Here, tmp_path: Path) -> None:
    here("report", results, "--out", tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert re.search(r"\| convex, adamw \| \**[+-]\d+\.\d\d\** ", page)  # in points
    assert re.search(r"\| GPT, adamw \| \**\d\.\d{3}\** ", page)  # as a ratio
    assert "AdamW at 1e-3, untuned" in page
    assert re.search(r"\d+ of \d+ runs of the default rule failed", page)
    assert "| default rule |" in page
    assert "| mechanic |" not in page
    for picture in ("ratios.png", "learning_rates.png"):
        assert picture in page
        assert (tmp_path / picture).stat().st_size > 10_000


def test_a_run_that_dies_is_reported(setup: Any) -> None:
    queues, training = module("queues"), module("training")
    result = queues._run(training.Job("no such problem", "mechanic", ((1.0, 0),)), setup)
    assert isinstance(result, queues.Failure)
    assert "no such problem" in result.traceback


# ------------------------------------------------------------------------------------------------ the page


def record(method: str, seed: int, loss: float, *, error: float = 0.5, lr: float = 1.0, **more: Any) -> dict[str, Any]:
    about = {"problem": "p", "family": "convex", "base": "sgd", "method": method, "lr": lr, "seed": seed}
    return {**about, "measure": "test_error", "train_loss": loss, "test_loss": loss, "test_error": error, **more}


def test_scores_are_taken_on_the_seeds_that_both_have_run() -> None:
    """Seed 1 is harder for all methods, and one that was not run on it must not look better for that."""
    sweep = [record("sweep", 0, 1.0, lr=0.1), record("sweep", 1, 3.0, lr=0.1), record("sweep", 0, 9.0, lr=1.0)]
    ours = [record("mechanic", 0, 1.1), record("mechanic", 1, 3.0)]
    changed = [record("mechanic, FALL x2", 0, 1.2, error=0.6), record("mechanic, FALL x0", 0, 1.2, error=0.7)]
    results = module("results").Results([*sweep, *ours, *changed])
    assert results.score("p", "mechanic", "train_loss") == pytest.approx(4.1 / 4.0)
    assert results.methods() == ["mechanic"]
    assert module("report").ablation_table(results).splitlines() == [
        "| number | convex, sgd (1 x 1) |",
        "| --- | --- |",
        "| as it is | +0.00 |",
        "| FALL x0 | +20.00 |",
        "| FALL x2 | +10.00 |",
    ]


def test_zero_loss_is_compared_by_validation_and_a_failure_is_not_clipped() -> None:
    sweep = [record("sweep", 0, 1e-8, error=0.1, lr=0.1), record("sweep", 0, 2e-5, error=0.2, lr=0.01)]
    solved, collapsed = record("mechanic", 0, 9e-5, error=0.12), record("prodigy", 0, 2.3, error=0.9)
    results = module("results").Results([*sweep, solved, collapsed])
    assert results.score("p", "mechanic", "train_loss") is None
    assert results.score("p", "mechanic", "test_error") == pytest.approx(2.0)
    assert results.score("p", "prodigy", "train_loss") == pytest.approx(2.3e4)


def test_validation_ranks_before_training_loss() -> None:
    sweep = [record("sweep", 0, 1.0, error=0.1)]
    better_trained, better_tested = record("mechanic", 0, 0.5, error=0.2), record("prodigy", 0, 2.0, error=0.15)
    equal = record("d-adaptation", 0, 1.5, error=0.15)
    results = module("results").Results([*sweep, better_trained, better_tested, equal])
    assert results.methods() == ["d-adaptation", "prodigy", "mechanic"]


def test_who_does_not_tune_stands_beside_the_sweep() -> None:
    sweep = [record("sweep", 0, loss, error=loss / 10, lr=lr, base="adamw") for lr, loss in ((1e-3, 2.0), (1e-2, 1.0))]
    results = module("results").Results(sweep)
    assert results.methods() == ["AdamW at 1e-3, untuned"]
    assert results.score("p", "AdamW at 1e-3, untuned", "test_error") == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"loss": 1.2}, []),
        ({"loss": 1.4}, ["training loss 1.4 against 1"]),
        ({"loss": 0.9, "test_loss": 2.1}, ["test loss 2.1 against 1"]),
        ({"loss": 1.0, "error": 0.52}, ["test error 2.0 points above the best"]),
    ],
)
def test_failures_are_named(run: dict[str, float], said: list[str]) -> None:
    sweep = record("sweep", 0, 1.0, family="collapse")
    results = module("results").Results([sweep, record("mechanic", 0, **run, family="collapse")])  # type: ignore[arg-type]
    report = module("report")
    assert [line.split(": ")[1] for line in report.failures(results)] == said
    assert report.failed(results) == {("collapse", "sgd"): (len(said), 1)}


RULES = {
    "default rule": "mechanic",
    "paper's rule": "mechanic, rule paper",
    "experiments": "mechanic, rule experiments",
    "mechanic_pytorch": "mechanic_pytorch",
    "AdamW at 1e-3": "AdamW at 1e-3, untuned",
    "Prodigy": "prodigy",
    "D-Adapt": "d-adaptation",
    "Schedule-Free": "schedule-free, lr 0.0025",
    "prodigy-plus": "prodigy-plus",
    "SF+": "schedule-free+",
}
"""The columns of the page of results, by their names in the records."""
ROWS = {
    "networks on the H200": ("ResNet-18", "ViT", "diffusion", "GPT", "GPT-2", "VGG", "kept back"),
    "other schedules, on the H200 and on CPUs": ("schedules",),
    "small ResNets": ("images",),
    "the GPT tuned, with all weights or LoRA": ("GPT tuned", "GPT with LoRA"),
    "GPT, 1,500 and 5,000 steps": ("GPT",),
    "logistic regressions": ("convex",),
    "MLPs on tables": ("MLPs",),
    "MLPs on small tables, fitted to a loss of 0": ("separable",),
    "a single pass over digits, at a constant rate": ("streams",),
    "small GPTs": ("language, 500 steps", "language, 1000 steps"),
    "small GPTs, 500 steps": ("language, 500 steps",),
    "small GPTs, 1,000 steps": ("language, 1000 steps",),
    "digits until nothing is left to learn": ("collapse",),
}
"""Families of the rows that are not called like theirs."""


@pytest.fixture(scope="module")
def recorded() -> Any:
    records = (FOLDER / "results" / "quality.jsonl").read_text().splitlines()
    return module("results").Results(map(json.loads, records))


def cells(heading: str) -> Iterator[tuple[str, str, str]]:
    """Row, column and cell of the tables below a heading of the page of results."""
    page = (FOLDER.parents[2] / "docs" / "results.md").read_text()
    head: list[str] = []
    for line in page.partition(f"\n{heading}\n")[2].partition("\n#")[0].splitlines():
        words = [word.strip() for word in line.strip("|").split("|")]
        if line.startswith("| | "):
            head = words
        elif line.startswith("| "):
            yield from ((words[0], column, cell) for column, cell in zip(head[1:], words[1:], strict=True))


def test_the_page_of_results_counts_the_failed_runs(recorded: Any) -> None:
    """The number stood only below the records, where it counted limits for runs."""
    counts = {column: module("report").failed(recorded, method) for column, method in RULES.items()}
    failed, total = (sum(column) for column in zip(*counts["default rule"].values(), strict=True))
    page = " ".join((FOLDER.parents[2] / "docs" / "results.md").read_text().split())
    assert f"{failed} of the {total} runs of the default rule failed" in page
    runs = 0
    for row, column, cell in cells("## How many runs failed"):
        found = [each for (family, _), each in counts[column].items() if family in ROWS.get(row, (row,))]
        bad, ran = (sum(each[part] for each in found) for part in (0, 1))
        assert cell == (f"{bad} of {ran}" if ran else ""), (row, column)
        runs += ran if column == "default rule" else 0
    assert runs == total


@pytest.mark.parametrize(("heading", "base"), [("## Beside other packages", "adamw"), ("### With SGD", "sgd")])
def test_the_tables_beside_other_packages_are_those_of_the_records(recorded: Any, heading: str, base: str) -> None:
    results, report = module("results"), module("report")
    checked = 0
    for row, column, cell in cells(heading):
        label, _, count = row.removesuffix(")").partition(" (")
        for group, problems in recorded.groups().items():
            if (group.family, group.base) != (ROWS.get(label, (label,))[0], base):
                continue
            assert str(len(problems)) == (count or "1"), row
            scores = [recorded.score(problem, RULES[column], recorded.measure(problem)) for problem in problems]
            if None not in scores:
                checked += 1
                found = report.shown(results.summary(scores, is_error=group.is_error), is_error=group.is_error)
                assert cell == found, (row, column)
    assert checked > 15


def test_the_schedule_falls_to_nearly_zero() -> None:
    training, task = module("training"), module("task")
    problem = task.Problem("p", "f", "sgd", (), 100, lambda *_: None)
    factors = training._factors(problem)
    assert factors[4] == 1.0
    assert factors[0] == pytest.approx(0.2)
    assert 0 < factors[-1] < 1e-3
    assert math.isclose(max(factors), 1.0)


def test_the_schedules_of_the_paper() -> None:
    """Steps of a fifth at 60, 120 and 160 of 200 epochs, and a linear fall after a warm-up of 6%."""
    training, task = module("training"), module("task")
    steps = task.Problem("p", "f", "sgd", (), 200, None, schedule="fifths", warmup=0.0)
    factors = training._factors(steps)
    assert [at for at in range(1, 200) if factors[at] != factors[at - 1]] == [60, 120, 160]
    assert factors[::60] == pytest.approx([1.0, 0.2, 0.04, 0.008])
    linear = training._factors(dataclasses.replace(steps, schedule="linear", warmup=0.06))
    assert linear.index(max(linear)) in (11, 12)
    assert linear[106] == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------ the paper's


def test_a_seventh_of_the_bytes_is_asked_for() -> None:
    import torch

    task = module("of_the_paper")._masked(None, "sources", SMALL_BERT, 64, [0], torch.device("cpu"))
    shown, text, asked = task.batch()
    assert asked.float().mean() == pytest.approx(0.15, abs=0.03)
    assert torch.equal(shown[~asked], text[~asked])
    assert (shown[asked] == 0).float().mean() == pytest.approx(0.8, abs=0.1)
    assert (text != 0).all()


SMALL_BERT = {"length": 32, "width": 16, "layers": 1, "dropout": 0.0}


def test_tuning_starts_from_what_was_learned_but_for_the_head() -> None:
    import torch

    learned = module("models").BERT(256, **SMALL_BERT).state_dict()
    tune = module("of_the_paper")._tuned
    (model,) = tune(None, "lines", SMALL_BERT, 8, lambda _: learned, [0], torch.device("cpu")).members
    own = model.state_dict()
    assert all(torch.equal(own[key], learned[key]) for key in own if not key.startswith("head."))
    assert own["head.weight"].shape == (2, 16)


def test_each_part_of_the_paper_is_there(setup: Any) -> None:
    run, table = module("run"), setup.problems().values()
    chosen = {}
    for part, words in module("paper").PARTS.items():
        arguments = run._arguments([*words, "--size", "smoke"])
        chosen[part] = {p.family for p in table if run._is_chosen(p, arguments.only)}
        assert {"mechanic", "mechanic, rule paper"} <= set(arguments.methods)
    assert chosen == {
        "convex": {"convex"},
        "trends": {"trends"},
        "resnet": {"ResNet-18, 200 epochs"},
        "bert": {"BERT", "BERT tuned"},
    }


@pytest.mark.slow
def test_a_part_of_the_paper_runs_and_makes_its_table(here: Here, tmp_path: Path) -> None:
    small = ("--size", "smoke", "--seeds", "1", "--lrs", "0.1", "--only", "convex: iris", "--out", tmp_path / "out")
    assert "6 jobs to run" in here("paper", "convex", *small)
    lines = here("paper", "tables", tmp_path / "out").splitlines()
    assert re.fullmatch(r"\| iris \| 98.3 \| 98.6( \| \d+\.\d at 0.1 \| \d+\.\d \| \d+\.\d){2} \|", lines[2])


def test_the_page_of_the_paper_has_the_tables_of_the_records() -> None:
    printed = module("paper").tables(FOLDER / "results" / "quality.jsonl").split("\n\n")
    page = (FOLDER.parents[2] / "docs" / "paper.md").read_text()
    assert len(printed) == 2
    assert [table for table in printed if table not in page] == []
