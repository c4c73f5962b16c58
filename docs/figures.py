"""The pictures of these pages, from recorded figures.

    python docs/figures.py

`images/demo.png` is not made here: `python -m mechanic_plugins.demo --out docs/images/demo.png` trains for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
QUALITY = HERE.parent / "examples" / "benchmarks" / "quality"
COST = HERE / "data" / "step_cost_h200.jsonl"
COLORS = {
    "mechanic": "crimson",
    "AdamW at 1e-3, untuned": "black",
    "mechanic_pytorch": "tab:orange",
    "prodigy": "tab:blue",
    "d-adaptation": "tab:green",
    "schedule-free, lr 0.0025": "tab:purple",
}
SHOWN = 15.0
PATHS = {
    "mechanic, fused": ("Mechanic, fused path", "crimson"),
    "mechanic, triton": ("Mechanic around any base", "tab:orange"),
}


def quality_by_family() -> Figure:
    """How far each method ends from the best learning rate of a sweep, by validation."""
    sys.path.insert(0, str(QUALITY))
    from results import Results, summary

    results = Results(map(json.loads, (QUALITY / "results" / "quality.jsonl").read_text().splitlines()))
    groups = {
        group: problems
        for group, problems in results.groups().items()
        if all(results.of(problem, "mechanic") for problem in problems)
    }
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    drawn = set()
    for place, (group, problems) in enumerate(groups.items()):
        for method, color in COLORS.items():
            scores = [results.score(problem, method, results.measure(problem)) for problem in problems]
            if None in scores:
                continue
            drawn.add(method)
            mean = summary(scores, is_error=group.is_error)
            above = mean if group.is_error else 100 * (mean - 1)
            marker = ">" if above > SHOWN else "*" if method == "mechanic" else "o"
            size = 170 if method == "mechanic" else 45
            axes.scatter(min(above, SHOWN), place, color=color, marker=marker, s=size, zorder=3)
    for method, color in COLORS.items():
        if method in drawn:
            axes.scatter([], [], color=color, marker="*" if method == "mechanic" else "o", label=method)
    axes.axvline(0, color="black", linewidth=1)
    kinds = {True: ", error", False: ""}
    labels = [f"{group.family}, {group.base} ({len(p)}{kinds[group.is_error]})" for group, p in groups.items()]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="above the best of a sweep: losses in per cent, errors in points (arrows: beyond the axis)")
    axes.set_title("Validation by family, in brackets the number of problems")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    return figure


def gpt2_124m() -> Figure:
    """GPT-2 124M: the loss at three learning rates and with Mechanic, and what it learned."""
    lines = (QUALITY / "results" / "quality.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run["family"] == "GPT-2" and run["seed"] == 0]
    runs.sort(key=lambda run: (run["method"] == "mechanic", run["lr"]))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, lrs = figure.subplots(1, 2)
    for run, color in zip(runs, ("tab:blue", "tab:green", "tab:orange", "crimson"), strict=True):
        name = "Mechanic" if run["method"] == "mechanic" else f"lr {run['lr']:g}"
        losses.plot(run["at"], run["losses"], color=color, linewidth=1, label=f"{name}: {run['test_loss']:.2f}")
        if run["method"] == "mechanic":
            lrs.plot(run["at"], run["effective_lrs"], color=color, label="learned")
        else:
            lrs.axhline(run["lr"], color=color, linestyle=":", label=name)
    losses.set(xlabel="step", ylabel="training loss", ylim=(1.2, 4))
    losses.legend(title="validation loss at the end")
    lrs.set(xlabel="step", ylabel="peak learning rate", yscale="log")
    lrs.legend()
    for axes in (losses, lrs):
        axes.grid(alpha=0.25)
    return figure


def cost_by_size() -> Figure:
    """A step's time over that of the base alone, by the number of parameters."""
    records = [json.loads(line) for line in COST.read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (label, color) in PATHS.items():
        mine = sorted((r for r in records if r["name"] == name), key=lambda r: r["params"])
        axes.plot([r["params"] for r in mine], [r["ratio"] for r in mine], "o-", color=color, label=label)
        floor = mine[0]["moved_bytes"] / 28  # what AdamW alone moves
        axes.axhline(floor, color=color, linestyle=":", linewidth=1, label=f"bytes moved: {floor:.2f}")
    sizes = sorted({r["params"] for r in records})
    axes.set(xscale="log", xlabel="parameters", ylabel="time of a step / fused AdamW alone", ylim=(0, 4.5))
    axes.set_xticks(sizes, [f"{size / 1e6:.0f}M" for size in sizes])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_title("H200, float32, shapes of GPT-2; no forward or backward pass to hide the host")
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def main() -> None:
    """Writes them all."""
    for draw in (quality_by_family, gpt2_124m, cost_by_size):
        draw().savefig(HERE / "images" / f"{draw.__name__}.png", dpi=110)


if __name__ == "__main__":
    main()
