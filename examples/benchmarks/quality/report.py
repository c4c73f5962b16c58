"""The results page: tables and pictures from what `run.py` wrote.

Use: `python examples/benchmarks/quality/report.py quality.jsonl --out examples/benchmarks/quality/results`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]

PUBLISHED = {
    "dna": (100.0, 100.0),
    "glass": (72.0, 72.3),
    "iris": (98.3, 98.6),
    "letter": (77.8, 77.7),
    "pendigits": (96.2, 95.8),
    "usps": (98.6, 98.6),
    "vehicle": (82.1, 81.9),
    "vowel": (77.4, 77.4),
    "wine": (100.0, 100.0),
}
"""Training accuracy in per cent of Adam and of D-Adaptation, from the latter's paper, for its protocol."""
MECHANICS = {"mechanic": "C0", "mechanic, preset paper": "C1"}
"""Whose learned learning rates are shown, and in which colour."""
SOLVED = 1e-4
"""A training loss below this counts as this much: which of two zeros is the smaller says nothing."""
DIVERGED = 100.0
SHOWN = 2.0
ABLATION = "mechanic but "
"""How the methods are called in which one of the default constants is another."""
COLLAPSED = 2.0
"""A run that ends with more than this times the best loss of the sweep."""


class Best(NamedTuple):
    """The sweep's best learning rate, by the mean over seeds."""

    lr: float
    loss: float
    accuracy: float | None


class Results:
    """All records, by problem and method."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.runs: dict[str, dict[str, dict[float, list[Record]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for record in records:
            self.runs[record["problem"]][record["method"]][record["lr"]].append(record)

    def of(self, problem: str, method: str) -> list[Record]:
        """A method's runs at the one learning rate it is run at."""
        return [record for runs in self.runs[problem].get(method, {}).values() for record in runs]

    def best(self, problem: str) -> Best:
        """Of the sweep."""
        sweep = self.runs[problem]["sweep"]
        lr = min(sweep, key=lambda lr: mean(sweep[lr], "train_loss"))
        has_accuracy = "accuracy" in sweep[lr][0]
        return Best(lr, mean(sweep[lr], "train_loss"), mean(sweep[lr], "accuracy") if has_accuracy else None)

    def ratio(self, problem: str, method: str, seeds: set[int] | None = None) -> float | None:
        """The method's mean training loss over that of the sweep's best lr, on the seeds that both have run."""
        runs, best = self.of(problem, method), self.best(problem)
        runs = [run for run in runs if seeds is None or run["seed"] in seeds]
        sweep = self.runs[problem]["sweep"][best.lr]
        shared = {run["seed"] for run in runs} & {run["seed"] for run in sweep}
        if not shared:
            return mean(runs, "train_loss") / best.loss if runs else None
        ours, theirs = ([run for run in each if run["seed"] in shared] for each in (runs, sweep))
        return mean(ours, "train_loss") / mean(theirs, "train_loss")

    def families(self) -> dict[tuple[str, str], list[str]]:
        """Problems by family and base."""
        found = defaultdict(list)
        for problem, methods in self.runs.items():
            if "sweep" in methods:
                first = self.of(problem, "sweep")[0]
                found[first["family"], first["base"]].append(problem)
        return found

    def methods(self) -> list[str]:
        """Without the sweep and without ablations."""
        names = {name: None for methods in self.runs.values() for name in methods if name != "sweep"}
        return [name for name in names if not name.endswith("other lrs") and not name.startswith(ABLATION)]

    def ablations(self) -> list[str]:
        """Mechanic with one constant changed."""
        names = {name: None for methods in self.runs.values() for name in methods if name.startswith(ABLATION)}
        return list(names)


def mean(runs: Sequence[Record], key: str) -> float:
    """Over the seeds."""
    value = statistics.fmean(run[key] for run in runs)
    return max(value, SOLVED) if key == "train_loss" else value


def geometric_mean(values: Sequence[float]) -> float:
    """Of ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


def shown(ratio: float) -> str:
    """Three digits; how far away a run that has diverged is says nothing."""
    return f"{ratio:.3f}" if ratio < DIVERGED else "diverged"


# ------------------------------------------------------------------------------------------------ tables


def family_table(results: Results) -> str:
    """One row for each family and base."""
    methods = results.methods()
    rows = []
    for (family, base), problems in results.families().items():
        cells = []
        for method in methods:
            ratios = [r for problem in problems if (r := results.ratio(problem, method)) is not None]
            cells.append(f"{shown(geometric_mean(ratios))} ({shown(max(ratios))})" if ratios else "")
        rows.append([family, base, str(len(problems)), *cells])
    return table(["family", "base", "problems", *methods], rows)


def problem_table(results: Results) -> str:
    """One row for each problem."""
    methods = results.methods()
    rows = []
    for problems in results.families().values():
        for problem in problems:
            best = results.best(problem)
            ratios = [results.ratio(problem, method) for method in methods]
            cells = ["" if ratio is None else shown(ratio) for ratio in ratios]
            rows.append([problem, f"{best.lr:g}", f"{best.loss:.4g}", *cells])
    return table(["problem", "best lr", "its loss", *methods], rows)


def test_table(results: Results) -> str:
    """What was not trained on: accuracy where there is one, else the loss."""
    methods = results.methods()
    rows = []
    for problems in results.families().values():
        for problem in problems:
            sample = results.of(problem, "sweep")[0]
            key = "accuracy" if "accuracy" in sample else "test_loss"
            if key not in sample or sample["family"] == "convex":
                continue
            sweep = results.runs[problem]["sweep"]
            pick = max if key == "accuracy" else min
            best = pick(mean(runs, key) for runs in sweep.values())
            found = [results.of(problem, method) for method in methods]
            cells = [f"{mean(runs, key):.4f}" if runs else "" for runs in found]
            rows.append([problem, key.replace("_", " "), f"{best:.4f}", *cells])
    return table(["problem", "", "best of the sweep", *methods], rows)


def convex_table(results: Results) -> str:
    """Training accuracy beside the published one."""
    methods = results.methods()
    rows = []
    for name, published in PUBLISHED.items():
        problem = f"{name}, adamw"
        if "sweep" in results.runs.get(problem, {}):
            best = results.best(problem).accuracy
            found = [results.of(problem, method) for method in methods]
            cells = [f"{100 * mean(runs, 'accuracy'):.1f}" if runs else "" for runs in found]
            rows.append(
                [
                    name,
                    *(f"{figure:.1f}" for figure in published),
                    f"{100 * best:.1f}" if best is not None else "",
                    *cells,
                ]
            )
    return table(["problem", "published Adam", "published D-Adaptation", "best of the sweep", *methods], rows)


def ablation_table(results: Results) -> str:
    """The default beside it with one constant changed, on the problems where that was run."""
    names = results.ablations()
    rows = []
    for problems in results.families().values():
        for problem in problems:
            seeds = {run["seed"] for name in names for run in results.of(problem, name)}
            ratios = [results.ratio(problem, name, seeds) for name in ("mechanic", *names)]
            if any(ratio is not None for ratio in ratios[1:]):
                rows.append([problem, *("" if ratio is None else shown(ratio) for ratio in ratios)])
    return table(["problem", "default", *(name.removeprefix(ABLATION) for name in names)], rows) if rows else ""


def lr_table(results: Results) -> str:
    """How much the base's own learning rate still matters."""
    rows = []
    for problem, methods in results.runs.items():
        others = methods.get("mechanic, other lrs")
        if others and "mechanic" in methods:
            all_runs = {**methods["mechanic"], **others}
            shared = set.intersection(*({run["seed"] for run in runs} for runs in all_runs.values()))
            if not shared:
                continue
            same = {lr: [run for run in runs if run["seed"] in shared] for lr, runs in all_runs.items()}
            losses = {lr: mean(runs, "train_loss") for lr, runs in same.items()}
            spread = max(losses.values()) / min(losses.values()) - 1
            rows.append([problem, *(f"{losses[lr]:.5g}" for lr in sorted(losses)), f"{100 * spread:.3f}%"])
            lrs = sorted(losses)
    return table(["problem", *(f"lr {lr:g}" for lr in lrs), "spread"], rows) if rows else ""


def trend_table(results: Results) -> str:
    """The learned learning rate against the batch and the model's width: the mean of the logarithm, second half."""
    rows = []
    methods = [name for name in results.methods() if name in MECHANICS]
    for problem, by_method in results.runs.items():
        if problem_family(by_method) != "trends":
            continue
        cells = []
        for method in methods:
            runs = results.of(problem, method)
            learned = [lr for run in runs for lr in run["effective_lrs"][len(run["effective_lrs"]) // 2 :]]
            cells.append(f"{geometric_mean(learned):.2e}" if learned else "")
        rows.append([problem, *cells])
    return table(["problem", *methods], rows) if rows else ""


def problem_family(by_method: dict[str, dict[float, list[Record]]]) -> str:
    """Every record has it."""
    family: str = next(iter(next(iter(by_method.values())).values()))[0]["family"]
    return family


def collapses(results: Results) -> list[str]:
    """Runs of Mechanic's defaults that ended far from the sweep's best."""
    found = []
    for problems in results.families().values():
        for problem in problems:
            limit = COLLAPSED * results.best(problem).loss
            bad = [run for run in results.of(problem, "mechanic") if run["train_loss"] > limit]
            best = limit / COLLAPSED
            found += [f"{problem}, seed {run['seed']}: {run['train_loss']:.4g} against {best:.4g}" for run in bad]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------ pictures


def ratio_picture(results: Results, path: Path) -> None:
    """Each problem's ratio to the best of its sweep, a colour for each method."""
    import matplotlib.pyplot as plt

    problems = [problem for group in results.families().values() for problem in group]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.24 * len(problems)), layout="constrained")
    for method in results.methods():
        points = [(r, y) for y, problem in enumerate(problems) if (r := results.ratio(problem, method)) is not None]
        mine = method == "mechanic"
        axes.scatter(
            [min(r, SHOWN) for r, _ in points], [y for _, y in points], s=36 if mine else 16, label=method,
            zorder=3 if mine else 2, alpha=1.0 if mine else 0.6,
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel=f"final training loss over the best of the sweep (more than {SHOWN:g} is drawn there)")
    axes.set_yticks(range(len(problems)), problems, fontsize=7)
    axes.invert_yaxis()
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def lr_picture(results: Results, path: Path) -> None:
    """The learned learning rate over time, one problem of each family and base, against the sweep's best."""
    import matplotlib.pyplot as plt

    chosen = [problems[0] for problems in results.families().values() if results.of(problems[0], "mechanic")]
    columns = 3
    rows = -(-len(chosen) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(11, 2.6 * rows), layout="constrained", squeeze=False)
    for axes, problem in zip(grid.flat, chosen, strict=False):
        for method, colour in MECHANICS.items():
            for index, run in enumerate(results.of(problem, method)):
                label = None if index else method
                axes.plot(run["at"], run["effective_lrs"], linewidth=1, color=colour, label=label)
        axes.axhline(results.best(problem).lr, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(problem, fontsize=8)
        axes.set_yscale("log")
        axes.tick_params(labelsize=7, which="both")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.lines if line.get_label() in MECHANICS}
    figure.legend(lines.values(), lines.keys(), fontsize=7, loc="outside upper right", ncols=len(lines))
    for axes in list(grid.flat)[len(chosen) :]:
        axes.remove()
    figure.supylabel("peak learning rate (dashed: best of the sweep)", fontsize=8)
    figure.supxlabel("step", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------ the page

_PAGE = """# How good is the learned learning rate?

Made by `run.py` and `report.py` beside this folder; {runs} runs, {seeds} seeds. Each figure is the mean final training
loss over that of the best learning rate of a half-decade sweep of the base, by the mean over the seeds: 1 is as good
as a full sweep, less is better. Mechanic and its peers run once, with their defaults. Losses below {solved} count as
{solved}.

## By family: geometric mean (worst problem)

{families}

{collapsed}

![ratios](ratios.png)

## By problem

{problems}

{ablations}## The learned learning rate

Divided by the schedule's factor: what a fixed peak learning rate would have to be.

![learned learning rates](learning_rates.png)

{lrs}{trends}{convex}## On data that was not trained on

{test}
"""


def page(results: Results, records: Sequence[Record]) -> str:
    """All of it."""
    bad = collapses(results)
    judged = [problem for problems in results.families().values() for problem in problems]
    total = sum(len(results.of(problem, "mechanic")) for problem in judged)
    ended = f"{len(bad)} ended with more than {COLLAPSED:g} times the best loss"
    lines = [f"Of {total} runs of Mechanic's defaults, {ended}."]
    lrs, convex, trends = lr_table(results), convex_table(results), trend_table(results)
    ablated = ablation_table(results)
    return _PAGE.format(
        runs=len(records),
        solved=SOLVED,
        seeds=len({record["seed"] for record in records}),
        families=family_table(results),
        collapsed="\n".join([*lines, *(f"- {line}" for line in bad)]),
        problems=problem_table(results),
        ablations=f"## One constant at a time\n\n{ablated}\n\n" if ablated else "",
        lrs=f"## The base's own learning rate\n\n{lrs}\n\n" if lrs else "",
        trends=f"## Against the batch and the model's width\n\n{trends}\n\n" if trends else "",
        convex=f"## Training accuracy of the convex problems, per cent\n\n{convex}\n\n",
        test=test_table(results),
    )


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("quality"))
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    results = Results(records)
    arguments.out.mkdir(parents=True, exist_ok=True)
    ratio_picture(results, arguments.out / "ratios.png")
    lr_picture(results, arguments.out / "learning_rates.png")
    (arguments.out / "README.md").write_text(page(results, records))
    print(family_table(results))


if __name__ == "__main__":
    main()
