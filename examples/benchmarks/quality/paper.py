"""Repeats experiments of "Mechanic: A Learning Rate Tuner" (arXiv 2306.00144), as far as the data go.

    python examples/benchmarks/quality/paper.py convex --data FOLDER          # logistic regressions: two hours
    python examples/benchmarks/quality/paper.py trends --data FOLDER          # the learned rate by batch and width
    python examples/benchmarks/quality/paper.py resnet --data FOLDER --device cuda
    python examples/benchmarks/quality/paper.py bert --data FOLDER --device cuda
    python examples/benchmarks/quality/paper.py tables quality.jsonl          # the tables of docs/paper.md

The first four take all of `run.py`'s arguments; `--size smoke` is a test of the code, in seconds and without data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import run
from report import table, trend_table
from results import Results, mean

__all__ = ["main", "tables"]

RULES = ("mechanic", "mechanic, rule paper")
PARTS = {
    "convex": ("--size", "cpu", "--only", "convex", "--methods", "sweep", *RULES),
    "trends": ("--size", "cpu", "--only", "trends", "--methods", *RULES),
    "resnet": (
        *("--size", "paper", "--only", "ResNet-18, 200 epochs"),
        *("--methods", "sweep", *RULES, "mechanic, rule paper, s_decay 0.1"),
    ),
    "bert": ("--size", "paper", "--only", "BERT", "BERT tuned", "--methods", "sweep", *RULES),
}
"""The arguments of `run.py` for each part."""
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
"""Training accuracies of Adam at its best rate and of D-Adapt Adam, from the picture of arXiv 2301.07733."""


def main(words: Sequence[str] | None = None) -> None:
    """Runs a part, or prints the tables of the records."""
    part, *others = words or sys.argv[1:] or ["--help"]
    if part == "tables" and others:
        print(tables(*map(Path, others)))
    elif part in PARTS:
        run.main([*PARTS[part], *others])
    else:
        sys.exit(__doc__)


def tables(*paths: Path) -> str:
    """The tables of docs/paper.md, as far as there are records."""
    results = Results(json.loads(line) for path in paths for line in path.read_text().splitlines())
    return "\n\n".join(found for found in (_convex_table(results), trend_table(results)) if found)


def _convex_table(results: Results) -> str:
    """Training accuracies in percent, as means over the seeds."""
    rows = []
    for name, published in PUBLISHED.items():
        cells = []
        for base in ("sgd", "adamw"):
            problem = f"{name}, {base}"
            if "sweep" not in results.runs.get(problem, {}):
                continue
            best = results.best(problem, "train_error")
            found = [_accuracy(results, problem, method) for method in RULES]
            cells += [f"{100 * (1 - best.value):.1f} at {best.lr:g}{'†' if best.at_an_end else ''}", *found]
        if cells:
            rows.append([name, *(f"{value:.1f}" for value in published), *cells])
    head = ["", "published: Adam", "published: D-Adapt Adam"]
    for base in ("SGD", "AdamW"):
        head += [f"{base}, best rate", "default rule", "paper's rule"]
    return table(head, rows) if rows else ""


def _accuracy(results: Results, problem: str, method: str) -> str:
    runs = results.of(problem, method)
    return f"{100 * (1 - mean(runs, 'train_error')):.1f}" if runs else ""


if __name__ == "__main__":
    main()
