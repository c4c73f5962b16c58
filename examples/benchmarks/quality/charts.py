"""The two pictures of the page, seven inches wide and legible at 700 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import Group, Results, named, summary

__all__ = ["distance_chart", "lr_chart"]

MECHANIC, SWEEP = "crimson", "0.2"
OTHERS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.25, "savefig.dpi": 130}
MOST = {True: 6.0, False: 1.3}
"""Greater distances, in points of error or as a ratio of losses, are drawn at the edge."""


def distance_chart(results: Results, path: Path) -> None:
    """Plots each method's distance to the best of the sweep, by family: loss ratios above, points of error below."""
    import matplotlib.pyplot as plt

    groups = {group: problems for group, problems in results.groups().items() if _ran(results, problems)}
    parts = [part for part in (False, True) if any(group.is_error == part for group in groups)]
    counts = [sum(group.is_error == part for group in groups) for part in parts] or [1]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(counts), 1, figsize=(7, 1.6 + 0.8 * len(counts) + 0.3 * sum(counts)), layout="constrained",
            squeeze=False, height_ratios=[count + 1 for count in counts],
        )  # fmt: skip
        for axes, part in zip(panels[:, 0], parts, strict=False):
            _distances(axes, results, [item for item in groups.items() if item[0].is_error == part], is_error=part)
        handles = {h.get_label(): h for axes in panels[:, 0] for h in axes.collections}
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _ran(results: Results, problems: Sequence[str]) -> bool:
    return any(results.of(problem, "mechanic") for problem in problems)


def _distances(axes: Any, results: Results, groups: Sequence[tuple[Group, list[str]]], *, is_error: bool) -> None:
    """Draws a row for each family and base, with the table's names."""
    others = [method for method in results.methods() if method != "mechanic"]
    most = MOST[is_error]
    for method, color in [*zip(others, OTHERS, strict=False), ("mechanic", MECHANIC)]:
        mine = method == "mechanic"
        found = [(_score(results, group, problems, method), y) for y, (group, problems) in enumerate(groups)]
        xs, ys = [min(x, most) for x, _ in found if x is not None], [y for x, y in found if x is not None]
        axes.scatter(
            xs,
            ys,
            s=120 if mine else 30,
            marker="*" if mine else "o",
            color=color,
            label=named(method),
            zorder=4 - (not mine),
        )
    axes.axvline(0 if is_error else 1, color=SWEEP, linewidth=1)
    axes.set_yticks(range(len(groups)), [f"{group.family}, {group.base}" for group, _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    unit = f"points of error above the best of the sweep (at most {most:g})"
    axes.set_xlabel(unit if is_error else f"loss over the best of the sweep (at most {most:g})")


def _score(results: Results, group: Group, problems: Sequence[str], method: str) -> float | None:
    scores = [results.score(problem, method, results.measure(problem)) for problem in problems]
    known = [score for score in scores if score is not None]
    return summary(known, is_error=group.is_error) if known else None


def lr_chart(results: Results, path: Path) -> None:
    """Plots the learned learning rate over time for one problem of each family and base, against the sweep's best."""
    import matplotlib.pyplot as plt

    chosen = [problems[0] for problems in results.groups().values() if results.of(problems[0], "mechanic")]
    rows = max(1, -(-len(chosen) // 2))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, 2, figsize=(7, 0.8 + 2.2 * rows), layout="constrained", squeeze=False)
        for axes, problem in zip(grid.flat, chosen, strict=False):
            for run in results.of(problem, "mechanic"):
                lrs = [lr if lr > 0 else float("nan") for lr in run["effective_lrs"]]
                axes.plot(run["at"], lrs, color=MECHANIC, linewidth=1.5, label=named("mechanic"))
            best = results.best(problem, results.measure(problem)).lr
            axes.axhline(best, color=SWEEP, linestyle="--", linewidth=1.2, label="best of the sweep")
            axes.set(title=problem, yscale="log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, best / 30), max(high, best * 30))
        for axes in grid[-1]:
            axes.set_xlabel("step")
        for axes in list(grid.flat)[len(chosen) :]:
            axes.remove()
        lines = {line.get_label(): line for axes in grid.flat for line in axes.lines if line.get_label()[0] != "_"}
        if lines:
            figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=2, frameon=False)
        figure.supylabel("peak learning rate", fontsize=10)
        figure.savefig(path)
        plt.close(figure)
