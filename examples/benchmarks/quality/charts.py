"""The two pictures of the page."""

from __future__ import annotations

from pathlib import Path

from results import Results, is_error

__all__ = ["MECHANICS", "distance_chart", "lr_chart"]

SHOWN = 20.0
MECHANICS = {"mechanic": "C0", "mechanic, preset 0.1": "C2", "mechanic, preset paper": "C1"}
"""Whose learned learning rates are shown, and in which colour."""


def distance_chart(results: Results, path: Path) -> None:
    """How far each method is from the best of each problem's sweep, a colour for each method."""
    import matplotlib.pyplot as plt

    problems = [problem for group in results.groups().values() for problem in group]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.24 * len(problems)), layout="constrained")
    for method in results.methods():
        points = [(_per_cent(results, problem, method), y) for y, problem in enumerate(problems)]
        drawn = [(x, y) for x, y in points if x is not None]
        mine = method == "mechanic"
        axes.scatter(
            [max(-SHOWN, min(x, SHOWN)) for x, _ in drawn], [y for _, y in drawn], s=36 if mine else 16, label=method,
            zorder=3 if mine else 2, alpha=1.0 if mine else 0.6,
        )  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"above the best of the sweep: losses in per cent, errors in points (at most {SHOWN:g} is drawn)")
    axes.set_yticks(range(len(problems)), problems, fontsize=7)
    axes.invert_yaxis()
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _per_cent(results: Results, problem: str, method: str) -> float | None:
    key = results.measure(problem)
    score = results.score(problem, method, key)
    return score if score is None or is_error(key) else 100 * (score - 1)


def lr_chart(results: Results, path: Path) -> None:
    """The learned learning rate over time, one problem of each family and base, against the sweep's best."""
    import matplotlib.pyplot as plt

    chosen = [problems[0] for problems in results.groups().values() if results.of(problems[0], "mechanic")]
    columns = 3
    rows = max(1, -(-len(chosen) // columns))
    figure, grid = plt.subplots(rows, columns, figsize=(11, 2.6 * rows), layout="constrained", squeeze=False)
    for axes, problem in zip(grid.flat, chosen, strict=False):
        for method, colour in MECHANICS.items():
            for index, run in enumerate(results.of(problem, method)):
                label = None if index else method
                axes.plot(run["at"], run["effective_lrs"], linewidth=1, color=colour, label=label)
        axes.axhline(results.best(problem, results.measure(problem)).lr, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(problem, fontsize=8)
        axes.set_yscale("log")
        axes.tick_params(labelsize=7, which="both")
    lines = {line.get_label(): line for axes in grid.flat for line in axes.lines if line.get_label() in MECHANICS}
    figure.legend(lines.values(), lines.keys(), fontsize=7, loc="outside upper right", ncols=max(1, len(lines)))
    for axes in list(grid.flat)[len(chosen) :]:
        axes.remove()
    figure.supylabel("peak learning rate (dashed: best of the sweep)", fontsize=8)
    figure.supxlabel("step", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
