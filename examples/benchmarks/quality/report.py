"""Makes the results page, with tables and pictures, from the records of `run.py`.

Usage: `python examples/benchmarks/quality/report.py quality.jsonl --out examples/benchmarks/quality/results`.
Several files are read as one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from charts import distance_chart, lr_chart
from results import SOLVED, Record, Results, geometric_mean, is_error, mean, named, summary

FAR = 100.0
BEHIND, OVERFITTED, POINTS = 1.3, 2.0, 1.0
"""Limits beyond which a run counts as a failure: see `failures`."""
RULES = ("mechanic", "mechanic, rule paper", "mechanic, rule experiments")
"""The methods whose failures are counted and whose learned rates are compared."""


def shown(score: float | None, *, is_error: bool) -> str:
    """A score with three digits; very large ones are cut off, since their size says nothing."""
    if score is None:
        return ""
    if is_error:
        return f"{score:+.2f}"
    return f"{score:.3f}" if score < FAR else f"> {FAR:g}"


def family_table(results: Results, key: str | None = None) -> str:
    """A row for each family and base, by the problems' own measure or by `key`.

    The best method among those that ran all problems is bold.
    """
    methods = results.methods()
    rows = []
    for group, problems in results.groups().items():
        points = group.is_error if key is None else is_error(key)
        complete = list(results.ranked(group, problems, methods))
        winner = complete[0] if len(complete) > 1 else None
        cells = []
        for method in methods:
            scores = [results.score(problem, method, key or results.measure(problem)) for problem in problems]
            cell = _mean_and_worst([score for score in scores if score is not None], is_error=points)
            cells.append(f"**{cell}**" if method == winner and key is None else cell)
        rows.append([f"{group.family}, {group.base}{f' ({len(problems)})' if len(problems) > 1 else ''}", *cells])
    return table(["family, base (problems)", *map(named, methods)], rows)


def _mean_and_worst(scores: Sequence[float], *, is_error: bool) -> str:
    if not scores:
        return ""
    found = shown(summary(scores, is_error=is_error), is_error=is_error)
    return found if len(scores) == 1 else f"{found} ({shown(max(scores), is_error=is_error)})"


def problem_table(results: Results, key: str | None = None) -> str:
    """A row for each problem: the value of the best of the sweep, and the other methods' distances to it."""
    methods = results.methods()
    rows = []
    for problem in judged(results):
        measure = key or results.measure(problem)
        if measure not in results.any_of(problem):
            continue
        best = results.best(problem, measure)
        scores = [results.score(problem, method, measure) for method in methods]
        cells = [shown(score, is_error=is_error(measure)) for score in scores]
        value = f"{100 * best.value:.2f}%" if is_error(measure) else f"{best.value:.4g}"
        rows.append([problem, measure.replace("_", " "), f"{best.lr:g}{'!' if best.at_an_end else ''}", value, *cells])
    return table(["problem", "measure", "best lr", "its value", *map(named, methods)], rows)


def ablation_table(results: Results) -> str:
    """Mechanic with one number multiplied, by family: the mean over the problems and seeds that all of them ran."""
    names = ["mechanic", *results.ablations()]
    head, columns = ["number"], []
    for group, problems in results.groups().items():
        ran = [name for name in names if any(results.of(problem, name) for problem in problems)]
        seeds = {problem: _shared_seeds(results, problem, ran) for problem in problems} if len(ran) > 1 else {}
        shared = [problem for problem in seeds if seeds[problem]]
        if not shared:
            continue
        head.append(f"{group.family}, {group.base} ({len(shared)} x {len(seeds[shared[0]])})")
        columns.append([])
        for name in names:
            scores = [results.score(p, name, results.measure(p), seeds[p]) for p in shared] if name in ran else []
            known = [score for score in scores if score is not None]
            columns[-1].append(shown(summary(known, is_error=group.is_error), is_error=group.is_error) if known else "")
    rows = [
        [name.removeprefix("mechanic, ").replace("mechanic", "as it is"), *cells]
        for name, *cells in zip(names, *columns, strict=True)
    ]
    return table(head, rows) if columns else ""


def _shared_seeds(results: Results, problem: str, names: Sequence[str]) -> set[int]:
    return set.intersection(*({run["seed"] for run in results.of(problem, name)} for name in names))


def lr_table(results: Results) -> str:
    """Shows how much the base's own learning rate still matters."""
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
    """The learned learning rate by batch size and model width: the geometric mean over the second half."""
    trends = [problem for problem in results.runs if results.any_of(problem)["family"] == "trends"]
    rules = [rule for rule in RULES if any(results.of(problem, rule) for problem in trends)]
    rows = []
    for problem in trends:
        rows.append([problem])
        for rule in rules:
            found = [run["effective_lrs"] for run in results.of(problem, rule)]
            learned = [lr for rates in found for lr in rates[len(rates) // 2 :]]
            rows[-1].append(f"{geometric_mean(learned):.2e}" if learned else "")
    return table(["learned lr", *map(named, rules)], rows) if rows else ""


def judged(results: Results) -> list[str]:
    """The problems that have a sweep."""
    return [problem for problems in results.groups().values() for problem in problems]


def failures(results: Results) -> Iterator[str]:
    """Yields what a user would regret in the default rule's runs: a line for each limit that a run exceeds."""
    for problem in judged(results):
        for run in results.of(problem, "mechanic"):
            for what in regrets(results, problem, run):
                yield f"{problem}, seed {run['seed']}: {what}"


def regrets(results: Results, problem: str, run: Record) -> Iterator[str]:
    """The limits that a run exceeds.

    More than 1.3 times the best training loss; more than twice the test loss of the swept run with the lowest training
    loss; in the family that reaches zero loss, an error more than a point above the best.
    """
    trained, measure = results.best(problem, "train_loss"), results.measure(problem)
    tested, loss = mean(results.runs[problem]["sweep"][trained.lr], "test_loss"), run["train_loss"]
    if loss > SOLVED and loss > BEHIND * max(trained.value, SOLVED):
        yield f"training loss {loss:.3g} against {trained.value:.3g}"
    if run["test_loss"] > OVERFITTED * max(tested, SOLVED):
        yield f"test loss {run['test_loss']:.3g} against {tested:.3g}"
    above = 100 * (run[measure] - results.best(problem, measure).value)
    if run["family"] == "collapse" and above > POINTS:
        yield f"{measure.replace('_', ' ')} {above:.1f} points above the best"


def failed(results: Results, method: str = "mechanic") -> dict[tuple[str, str], tuple[int, int]]:
    """How many runs of a rule exceed a limit, and how many there are, by family and base."""
    counts = {}
    for group, problems in results.groups().items():
        runs = [any(regrets(results, problem, run)) for problem in problems for run in results.of(problem, method)]
        bad, total = counts.get((group.family, group.base), (0, 0))
        if runs:
            counts[group.family, group.base] = bad + sum(runs), total + len(runs)
    return counts


def failure_table(results: Results) -> str:
    """`failed` as a table, for each rule that ran."""
    counts = {rule: found for rule in RULES if (found := failed(results, rule))}
    groups = {key: None for found in counts.values() for key in found}
    rows = [
        [", ".join(key), *("{} of {}".format(*found[key]) if key in found else "" for found in counts.values())]
        for key in groups
    ]
    return table(["failed runs", *map(named, counts)], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_PAGE = """# How good is the learned learning rate?

Made by `run.py` and `report.py` beside this folder; {runs} runs, up to {seeds} seeds. Each figure compares a method
with the best learning rate of a half-decade sweep of the base, best by the same measure and the mean over the seeds.
Errors are given in percentage points above it (0 is as good as the sweep), losses as the ratio to it (1 is); less is
better, and negative or below 1 is better than the whole sweep. "default rule" is `mechanize(base)`, this package's
own rule; "paper's rule" and "experiments" are `rule="paper"` and `rule="experiments"`; mechanic_pytorch is a package by
the authors of the paper. It and the other methods run once, with their defaults where their name gives no number.
Methods stand in the order of their mean rank, by validation first and training loss second.

## Validation, by family: mean (worst problem)

{families}

![distance to the best of the sweep](ratios.png)

## Training loss, by family: geometric mean (worst problem)

Where both the sweep and the method are below {solved}, there is nothing to compare but validation.

{training}

## What went wrong

{failures}

## Validation, by problem

An exclamation mark: the best lies at an end of the sweep.

{problems}

## Training loss, by problem

{problem_training}

{ablations}## The learned learning rate

Divided by the schedule's factor: what a fixed peak learning rate would have to be.

![learned learning rates](learning_rates.png)

{lrs}{trends}"""


_ABLATED = """In brackets: problems x seeds."""


def page(results: Results, records: Sequence[Record]) -> str:
    """Renders the whole page."""
    bad, counts = list(failures(results)), failed(results).values()
    limits = f"{BEHIND:g} times the best training loss, {OVERFITTED:g} times the test loss of the swept run that has it"
    runs = f"{sum(bad for bad, _ in counts)} of {sum(total for _, total in counts)} runs of the default rule failed"
    first = f"{runs}, by {len(bad)} limits in all (more than {limits}, or {POINTS:g} point of "
    lrs, trends, ablated = lr_table(results), trend_table(results), ablation_table(results)
    return _PAGE.format(
        runs=len(records),
        seeds=len({record["seed"] for record in records}),
        solved=SOLVED,
        families=family_table(results),
        training=family_table(results, "train_loss"),
        failures="\n".join(
            [
                f"{first}error where the loss reaches zero). The list is the default rule's.",
                "",
                failure_table(results),
                "",
                *(f"- {line}" for line in bad),
            ]
        ),
        problems=problem_table(results),
        problem_training=problem_table(results, "train_loss"),
        ablations=f"## One number of the rule at a time\n\n{_ABLATED}\n\n{ablated}\n\n" if ablated else "",
        lrs=f"## The base's own learning rate\n\n{lrs}\n\n" if lrs else "",
        trends=f"## Against the batch and the model's width\n\n{trends}\n" if trends else "",
    )


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("quality"))
    arguments = parser.parse_args()
    records = [json.loads(line) for path in arguments.results for line in path.read_text().splitlines()]
    results = Results(records)
    arguments.out.mkdir(parents=True, exist_ok=True)
    distance_chart(results, arguments.out / "ratios.png")
    lr_chart(results, arguments.out / "learning_rates.png")
    (arguments.out / "README.md").write_text(page(results, records))
    print(family_table(results))
    print(family_table(results, "train_loss"))


if __name__ == "__main__":
    main()
