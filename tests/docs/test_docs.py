"""The code in README and docs runs, and what they name exists.

Blocks that need ranks run in deepspeed_plugin/test_deepspeed_docs.py and distributed/test_sharded_docs.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from documented import PAGES, ROOT, Block, blocks, execute

import mechanic_plugins
from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lightning import Mechanic
from mechanic_plugins.optim import AdamW
from mechanic_plugins.options import parameters, parsed
from mechanic_plugins.rule.sums import empty
from mechanic_plugins.runner.arguments import parse

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
HERE = [block for block in blocks("python") if not block.reason and not block.needs_ranks]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------------------------ python


@pytest.mark.parametrize("block", HERE, ids=lambda block: block.place)
@pytest.mark.filterwarnings("default")  # for Lightning's and transformers' own
def test_python_blocks_run_as_they_are_printed(block: Block) -> None:
    """Each block runs on its own, as a reader pastes one block and not the page."""
    assert "mechanic_plugins" in block.text
    names = execute(block)
    if "plain" in names:
        assert type(names["plain"]) is torch.optim.AdamW
    if "learned" in names:
        assert 1e-5 < names["learned"] < 1


def test_blocks_that_are_not_run_are_those_of_other_programs() -> None:
    assert len(HERE) > 12
    assert {block.page.name for block in blocks("python") if block.reason} == {"programs.md"}
    assert blocks("py") + blocks("sh") + blocks("shell") == []


def test_the_doors_on_the_page_of_options_all_say_the_same() -> None:
    """Each cell of the table is read as its program reads it."""
    page = (ROOT / "docs" / "options.md").read_text()
    said = dict(re.findall(r"^\| ([\w ]+) \| `(.+)` \|$", page.partition("The same elsewhere:")[2], flags=re.MULTILINE))
    model, own = torch.nn.Linear(8, 1), {"betas": (0.9, 0.95)}
    trainers = ast.literal_eval(said.pop("the Trainer").removeprefix("optim_args="))
    deepspeeds = json.loads(said.pop("DeepSpeed").removeprefix('"params": '))
    options = {
        "the Trainer": parsed(trainers),
        "DeepSpeed": deepspeeds | {"betas": tuple(deepspeeds["betas"])},
        "the runner": own | parsed(said.pop("the runner").removeprefix("--options ")),
        "Lightning": own | eval(said.pop("Lightning"), {"Mechanic": Mechanic}).options,
    }
    built = {door: AdamW(model.parameters(), **each) for door, each in options.items()}
    built["a class"] = eval(said.pop("a class"), {"AdamW": AdamW, "model": model})
    assert not said
    for door, optimizer in built.items():
        assert optimizer.settings == Settings(rule="paper", s_decay=0.1, betas=(0.9, 0.99)), door
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95), door


# ------------------------------------------------------------------------------------------------ console

SHORT = {
    "python examples/demo.py": "--steps 20 --lrs 1e-2",
    "python examples/benchmarks/optimizer_step.py": "--device cpu --shapes tiny --repeats 1",
}
"""The commands that run as printed, with the arguments appended to make them short."""

BY_OTHERS = {
    "python examples/train_plain.py": "docs/test_examples_plain.py",
    "python examples/frozen_backbone.py": "docs/test_frozen_backbone.py",
    "python examples/train_lightning.py": "lightning/test_lightning_example.py",
    "python examples/train_transformers.py": "hf/test_hf_example.py",
}
"""The commands with their own test."""

ELSEWHERE = {
    "README.md": ["mechanic-run", "mechanic-run"],
    "huggingface.md": ["mechanic-run", "python", "torchrun", "accelerate", "deepspeed"],
    "deepspeed.md": ["torchrun", "python"],
    "sharding.md": ["torchrun", "torchrun"],
    "results.md": ["python", "python", "python"],
    "paper.md": ["python", "python", "python", "python"],
    "CONTRIBUTING.md": ["python", "twine"],
    "plot.md": ["python"],
    "programs.md": [
        "mechanic-run",
        "python",
        "litgpt",
        "accelerate",
        "mechanic-run",
        "mechanic-run",
        "mechanic-run",
        "torchrun",
        "python",
        "mechanic-run",
        "mechanic-run",
        "mechanic-run",
    ],
    "runner.md": ["mechanic-run"],
}
"""Commands marked as not run, by page: they need ranks, hours or the network. The marks name the test instead."""


def commands(marked: bool) -> list[tuple[str, str]]:
    """Page and command, without comments and line breaks."""
    found = []
    for block in blocks("console"):
        if bool(block.reason) == marked:
            joined = block.text.replace("\\\n", " ")
            found += [(block.page.name, re.sub(r"\s+# .*", "", line).strip()) for line in joined.splitlines()]
    return found


def test_what_is_not_run_is_marked_and_listed() -> None:
    programs: dict[str, list[str]] = {}
    for page, command in commands(marked=True):
        words = [word for word in command.split() if "=" not in word]
        programs.setdefault(page, []).append(words[0])
    assert programs == ELSEWHERE
    for block in blocks("console"):
        tests = re.findall(r"tests/\S+\.py", block.reason or "")
        assert [test for test in tests if not (ROOT / test).exists()] == []


def test_every_other_command_is_known() -> None:
    others = {command for _, command in commands(marked=False)}
    others = {
        command
        for command in others
        if not command.startswith(("pip install ", "uv pip install ", "make ", "git clone "))
    }
    assert others == {*SHORT, *BY_OTHERS}
    for command, test in BY_OTHERS.items():
        assert Path(command).name in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize("command", SHORT)
@pytest.mark.filterwarnings("default")
def test_commands_run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They run in this process, where the frameworks are already imported."""
    _, *words = shlex.split(f"{command} {SHORT[command]}")
    monkeypatch.setattr(sys, "argv", words[words[0] == "-m" :])
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    assert capsys.readouterr().out


def test_make_targets_exist() -> None:
    targets = {target for _, command in commands(marked=False) for target in re.findall(r"\bmake (\w+)$", command)}
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"install", "demo", "test", "lint"}
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, flags=re.MULTILINE)] == []


def test_extras_exist() -> None:
    extras = re.search(
        r"\[project\.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    assert extras
    known = set(re.findall(r"^([\w-]+) =", extras[1], flags=re.MULTILINE))
    texts = "\n".join(page.read_text() for page in PAGES)
    named = {
        name
        for names in re.findall(r"pip install '(?:mechanic-plugins|\.)\[([^\]]+)\]'", texts)
        for name in names.split(",")
    }
    assert named
    assert named <= known


# ------------------------------------------------------------------------------------------------ names


def test_the_readme_begins_with_two_commands() -> None:
    assert README.index("&& make demo\n") < README.index("\nmake test\n") < README.index("```python")


def test_the_headline_counts_the_rows_of_the_results() -> None:
    """It once said twenty-two runs when there were twenty-five."""
    runs = larger_networks()
    ahead, near = [run for run in runs if run.ours < run.best], [run for run in runs if run.ours <= 1.05 * run.best]
    ends = sum(run.is_at_an_end for run in ahead)
    readme, results = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/results.md"))
    assert f"On [{len(runs)} runs of larger networks]" in readme
    assert f"best of a whole sweep in {len(ahead)}, and within 5% of it in {len(near)}**. In {ends} of the" in readme
    assert f"Of the {len(runs)} rows of this section, the default rule ends ahead of the sweep's best in" in results
    assert f"best in {len(ahead)}. In {ends} of these (" in results


class Run(NamedTuple):
    """A result of the section on larger networks, as printed."""

    ours: float
    best: float
    is_at_an_end: bool


def larger_networks(page: str = "docs/results.md", heading: str = "## Larger networks") -> list[Run]:
    """Cells may hold several runs, as in "1.580, 1.449". A dagger: the sweep's best is at an end of it."""
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\|[^|]*\| ([\d., %]+) \| ([\d., %]+)(†?) \|", section, flags=re.MULTILINE)
    return [
        Run(float(ours), float(best), bool(dagger))
        for *cells, dagger in rows
        for ours, best in zip(*(re.findall(r"[\d.]+", cell) for cell in cells), strict=True)
    ]


def test_sweeps_whose_best_is_at_an_end_are_marked() -> None:
    """A run that beats the best of three rates, the lowest of them, was counted like one that beats a peak."""
    folder = ROOT / "examples" / "benchmarks" / "quality" / "results"
    records = [json.loads(line) for line in (folder / "quality.jsonl").read_text().splitlines()]
    swept: dict[str, dict[float, list[float]]] = {}
    learned: dict[str, list[float]] = {}
    for record in records:
        value = record[record["measure"]] * (100 if record["measure"].endswith("error") else 1)
        if record["method"] == "sweep":
            swept.setdefault(record["problem"], {}).setdefault(record["lr"], []).append(value)
        elif record["method"] == "mechanic":
            learned.setdefault(record["problem"], []).append(value)
    at_an_end = {}
    for problem, own in learned.items():
        means = {lr: sum(values) / len(values) for lr, values in swept.get(problem, {}).items()}
        if len(means) > 2:
            best = min(means, key=lambda lr: means[lr])
            at_an_end[sum(own) / len(own), means[best]] = best in (min(means), max(means))
    checked = 0
    for run in (*larger_networks(), *larger_networks("README.md", "## Results")):
        near = [
            end
            for (ours, best), end in at_an_end.items()
            if abs(ours - run.ours) < 0.0501 * (1 if run.best > 5 else 0.01)
            and abs(best - run.best) < 0.0501 * (1 if run.best > 5 else 0.01)
        ]
        if len(set(near)) == 1:
            checked += 1
            assert run.is_at_an_end == near[0], run
    assert checked > 25


# ------------------------------------------------------------------------------------------------ two rules

BEGINNINGS = {
    "README.md": "## Why",
    "docs/index.md": "## Install",
    "docs/lightning.md": "## Learning rate monitors",
    "docs/huggingface.md": "## Without touching",
    "docs/deepspeed.md": "## Checkpoints",
    "docs/accelerate.md": "Mechanize the optimizer first",
    "docs/runner.md": "## `--replace`",
    "docs/algorithm.md": "## The relative rule",
    "docs/options.md": "## All options",
    "pyproject.toml": "requires-python",
}


@pytest.mark.parametrize("page", BEGINNINGS)
def test_pages_begin_with_which_rule_is_the_default(page: str) -> None:
    """The README's first word that the default is not the paper's algorithm stood in its last paragraph."""
    beginning, found, _ = (ROOT / page).read_text().partition(BEGINNINGS[page])
    beginning = " ".join(beginning.split())
    assert found
    assert re.search(r"rule=[\"']?paper", beginning)
    assert "Algorithm 1" in beginning
    assert re.search("this package's own|a rule of its own", beginning)


def test_docstrings_say_it_too() -> None:
    from mechanic_plugins.lightning import Mechanic

    for thing in (mechanic_plugins.mechanize, Mechanic):
        text = " ".join((inspect.getdoc(thing) or "").split())
        assert "this package's own, the relative rule" in text
        assert '`rule="paper"` is' in text


@pytest.mark.filterwarnings("default")
def test_each_way_to_switch_switches() -> None:
    """The cells of the table in options.md, as they are printed."""
    table = (ROOT / "docs" / "options.md").read_text().partition("| in | write |\n|---|---|\n")[2].partition("\n\n")[0]
    plain, callback, trainer, config, by_name, runner = (
        re.findall(r"`([^`]+)`", row.split(" | ")[1]) for row in table.splitlines()
    )
    model = torch.nn.Linear(2, 1)
    assert rule_of(eval(plain[0], {"mechanize": mechanize, "optimizer": adamw(model)})) == "paper"

    from mechanic_plugins.lightning import Mechanic

    assert eval(callback[0], {"Mechanic": Mechanic}).options["rule"] == "paper"

    import transformers

    import mechanic_plugins.transformers  # noqa: F401

    options = eval(f"dict({trainer[0]}, {trainer[1]})")
    args = transformers.TrainingArguments("out", use_cpu=True, report_to=[], **options)
    cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert rule_of(cls(model.parameters(), **kwargs)) == "paper"

    params = json.loads(f"{{{config[0]}}}")["params"]
    assert rule_of(mechanize(torch.optim.AdamW)(model.parameters(), **params)) == "paper"

    module, _, name = by_name[0].rpartition(".")
    keywords = eval(f"dict({by_name[1]})")
    assert rule_of(getattr(importlib.import_module(module), name)(model.parameters(), **keywords)) == "paper"

    program, *words = shlex.split(runner[0])
    plan, target, _ = parse(words, "")
    assert (program, plan.replace[0].old, target) == ("mechanic-run", "torch.optim.AdamW", "train.py")
    assert rule_of(mechanize(adamw(model), **parsed(plan.options))) == "paper"


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def rule_of(optimizer: Any) -> str:
    return str(optimizer.settings.rule)


def test_the_paper_is_cited_for_its_rules_and_the_software_for_its_own() -> None:
    """`preferred-citation` was the paper, so whoever cited by it gave the paper the default rule's results."""
    citation = (ROOT / "CITATION.cff").read_text()
    assert "preferred-citation" not in citation
    assert "references:\n  - type: conference-paper\n" in citation
    for text in (citation, README):
        assert re.search(r"default rule.{0,40}cite this software", " ".join(text.split()))


def test_contributors_are_told_what_ci_runs() -> None:
    ci = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert ci == ["make lint", "make test"]
    assert "\n".join(ci) in (ROOT / "CONTRIBUTING.md").read_text()


def test_no_page_speaks_of_what_is_gone() -> None:
    gone = re.compile(r"total_steps|preset=|first_move|hindsight|smoothing|own_warmup|optimistic|\bTOO_SHORT\b")
    assert [(page.name, gone.findall(text)) for page in PAGES if gone.search(text := page.read_text())] == []


def test_the_version_is_the_changelogs_and_the_citations() -> None:
    version = mechanic_plugins.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    first = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first
    assert first[1] in (version, "Unreleased")
    section = (ROOT / "CHANGELOG.md").read_text().split("\n## [")[1]
    assert len(section.splitlines()) <= 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    from_root = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    assert [link for link in links if not (page.parent / from_root.get(link, link)).exists()] == []


def test_every_page_is_in_the_navigation_and_in_the_readme() -> None:
    names = {page.name for page in (ROOT / "docs").glob("*.md")}
    navigation = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert navigation == names | {"contributing.md", "changelog.md"}
    assert [name for name in names if f"(docs/{name})" not in README] == []


def test_modules_and_scripts_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        modules = set(re.findall(r"-m (mechanic_plugins\.\w+)", text))
        assert [name for name in modules if importlib.util.find_spec(name) is None] == [], page
        files = set(re.findall(r"(?<![\w/.-])((?:examples|tests|docs)/[\w/]+\.\w+)", text))
        assert [file for file in files if not (ROOT / file).exists()] == [], page


def test_the_rooms_of_the_house_are_where_contributors_are_sent() -> None:
    named = set(re.findall(r"`((?:\w+/)?\w+(?:/|\.py))`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) > 12
    inside = {name for name in named - {"site/"} if not (ROOT / name).exists()}
    assert [name for name in inside if not (ROOT / "mechanic_plugins" / name).exists()] == []


def test_the_repository_has_one_address() -> None:
    address = re.search(r'^Homepage = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert address
    assert f"repo_url: {address[1]}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"repository-code: {address[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"]({address[1]}/blob/main/" in (ROOT / "pyproject.toml").read_text()


def test_every_option_is_on_its_page() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert [option.name for option in parameters() if f"\n| `{option.name}` |" not in page] == []
    tools = runpy.run_path(str(ROOT / "docs" / "options.py"))
    assert tools["updated"](page) == page, "run python docs/options.py"


@pytest.mark.filterwarnings("default")
def test_the_api_is_that_of_the_code() -> None:
    tools = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert tools["page"]() == tools["PAGE"].read_text(), "run python docs/api.py"
    assert set(tools["PUBLIC"]["mechanic_plugins"]) == set(mechanic_plugins.__all__)
    optimizer = mechanic_plugins.mechanize(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    told = tools["ATTRIBUTES"]["MechanicOptimizer"]
    assert [name for name in vars(optimizer) if not name.startswith("_") and name not in told] == []
    assert [name for name in (*told, *tools["ENGINES"]) if not hasattr(optimizer, name)] == []


def test_the_bytes_of_the_all_reduce_are_those_of_the_sums() -> None:
    """Two pages used to say 48 bytes per param group, which counts the number of gradients once too often."""
    pages = {name: (ROOT / "docs" / name).read_text() for name in ("performance.md", "sharding.md")}
    one, two = (empty(tuners, torch.device("cpu")).nbytes for tuners in (1, 2))
    each = two - one
    for page in (*pages.values(), (ROOT / "README.md").read_text()):
        assert f"one all-reduce of {one} bytes per step" in page
    assert f'({one - each}, and {each} per param group, with `scope="group"`)' in pages["performance.md"]
    assert f"{each} bytes per param group, plus {one - each}." in pages["sharding.md"]
