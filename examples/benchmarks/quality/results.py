"""The records by problem and method, compared with the best of the sweep."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "ABLATION",
    "SOLVED",
    "UNTUNED",
    "Best",
    "Group",
    "Record",
    "Results",
    "geometric_mean",
    "is_error",
    "mean",
    "named",
    "summary",
]

Record = dict[str, Any]
SOLVED = 1e-4
"""If all losses are below this, none is better: which of them is closest to zero means nothing."""
ABLATION = re.compile(r"mechanic, ([A-Z_]+) (x[\d.]+)")
"""Matches the names of methods with one number of the rule multiplied."""
NAMES = {
    "mechanic": "default rule",
    "mechanic, rule paper": "paper's rule",
    "mechanic, rule experiments": "experiments",
}
"""How the page calls the methods whose names in the records say less. "Mechanic" alone is not the paper's."""
UNTUNED = "AdamW at 1e-3, untuned"
"""The choice of a user who does not tune, a learning rate of every sweep."""


class Best(NamedTuple):
    """The sweep's best learning rate by some measure, averaged over the seeds."""

    lr: float
    value: float
    at_an_end: bool


class Group(NamedTuple):
    """Problems whose scores can be averaged."""

    family: str
    base: str
    is_error: bool


class Results:
    """All records, by problem, method and learning rate."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.runs: dict[str, dict[str, dict[float, list[Record]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for record in records:
            methods = self.runs[record["problem"]]
            methods[record["method"]][record["lr"]].append(record)
            if record["method"] == "sweep" and record["base"] == "adamw" and record["lr"] == 1e-3:
                methods[UNTUNED][1e-3].append(record)

    def of(self, problem: str, method: str) -> list[Record]:
        """A method's runs, at its only learning rate."""
        return [record for runs in self.runs[problem].get(method, {}).values() for record in runs]

    def any_of(self, problem: str) -> Record:
        """Any record of a problem, for the fields that all have in common."""
        return next(iter(next(iter(self.runs[problem].values())).values()))[0]

    def measure(self, problem: str) -> str:
        """The measure by which the problem's methods are ranked."""
        found: str = self.any_of(problem)["measure"]
        return found

    def best(self, problem: str, key: str) -> Best:
        """The best of the sweep."""
        sweep = self.runs[problem]["sweep"]
        values = {lr: mean(runs, key) for lr, runs in sweep.items()}
        lr = min(values, key=lambda lr: values[lr])
        inside = sorted(values)[1:-1]
        at_an_end = bool(inside) and all(values[other] > values[lr] for other in inside)
        return Best(lr, values[lr], at_an_end)

    def score(self, problem: str, method: str, key: str, seeds: set[int] | None = None) -> float | None:
        """The method's distance to the best of the sweep, on the seeds that both have run.

        For errors it is in percentage points; for losses it is the ratio.

        Returns:
            None if it was not run, and for a loss if both have solved the problem.
        """
        runs = [run for run in self.of(problem, method) if seeds is None or run["seed"] in seeds]
        if not runs:
            return None
        sweep = self.runs[problem]["sweep"][self.best(problem, key).lr]
        shared = {run["seed"] for run in runs} & {run["seed"] for run in sweep}
        if shared:
            runs, sweep = ([run for run in each if run["seed"] in shared] for each in (runs, sweep))
        return _distance(mean(runs, key), mean(sweep, key), key)

    def groups(self) -> dict[Group, list[str]]:
        """The problems that have a sweep, by family, base and kind of measure."""
        found = defaultdict(list)
        for problem, methods in self.runs.items():
            if "sweep" in methods:
                first = self.any_of(problem)
                found[Group(first["family"], first["base"], is_error(first["measure"]))].append(problem)
        return found

    def methods(self) -> list[str]:
        """The methods except sweep and ablations, best first by mean rank over the families."""
        names = {name: None for methods in self.runs.values() for name in methods if name != "sweep"}
        chosen = [name for name in names if not name.endswith("other lrs") and not ABLATION.fullmatch(name)]
        ranks = defaultdict(list)
        for group, problems in self.groups().items():
            for place, method in enumerate(self.ranked(group, problems, chosen)):
                ranks[method].append(place)
        return sorted(chosen, key=lambda name: statistics.fmean(ranks[name]) if ranks[name] else math.inf)

    def ranked(self, group: Group, problems: Sequence[str], methods: Sequence[str]) -> list[str]:
        """The methods that ran on all problems, ranked by validation, and by training loss where that is equal."""
        places = {}
        for method in methods:
            scores = [self.score(problem, method, self.measure(problem)) for problem in problems]
            known = [score for score in scores if score is not None]
            if len(known) == len(problems):
                training = [self.score(problem, method, "train_loss") for problem in problems]
                places[method] = (
                    round(summary(known, is_error=group.is_error), 4),
                    summary([score for score in training if score is not None], is_error=False),
                )
        return sorted(places, key=lambda method: places[method])

    def ablations(self) -> list[str]:
        """The methods with one number of the rule multiplied, sorted by number and factor."""
        names = {name for methods in self.runs.values() for name in methods if ABLATION.fullmatch(name)}
        return sorted(names, key=lambda name: (name.split(" x")[0], float(name.split(" x")[1])))


def named(method: str) -> str:
    """A method as the page calls it."""
    return NAMES.get(method, method)


def is_error(key: str) -> bool:
    """Whether it counts wrong answers, so that it may be zero."""
    return key.endswith("error")


def _distance(ours: float, theirs: float, key: str) -> float | None:
    if is_error(key):
        return 100 * (ours - theirs)
    return None if max(ours, theirs) < SOLVED else ours / max(theirs, SOLVED)


def mean(runs: Sequence[Record], key: str) -> float:
    """The mean over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def summary(scores: Sequence[float], *, is_error: bool) -> float:
    """The mean of points, or the geometric mean of ratios; 1 if there is nothing to compare."""
    if not scores:
        return 1.0
    return statistics.fmean(scores) if is_error else geometric_mean(scores)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of ratios; a ratio of 0, from a training loss of exactly 0, counts as 1e-9."""
    return math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in values))
