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
    "mechanic_pytorch": "tab:orange",
    "prodigy": "tab:blue",
    "d-adaptation": "tab:green",
    "schedule-free, lr 0.0025": "tab:purple",
}
CLIPPED = 1.6
PATHS = {
    "mechanic, fused": ("Mechanic, fused path", "crimson"),
    "mechanic, triton": ("Mechanic around any base", "tab:orange"),
}


def quality_by_family() -> Figure:
    """Each method's training loss over that of the best learning rate of a sweep, by family."""
    sys.path.insert(0, str(QUALITY))
    from report import Results, geometric_mean

    records = map(json.loads, (QUALITY / "results" / "quality.jsonl").read_text().splitlines())
    results = Results(records)
    families = results.families()
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    for place, problems in enumerate(families.values()):
        for method, color in COLORS.items():
            found = [r for problem in problems if (r := results.ratio(problem, method)) is not None]
            if found:
                mean = geometric_mean(found)
                marker = ">" if mean > CLIPPED else "*" if method == "mechanic" else "o"
                size = 170 if method == "mechanic" else 45
                axes.scatter(min(mean, CLIPPED), place, color=color, marker=marker, s=size, zorder=3)
    for method, color in COLORS.items():
        label = "Mechanic, default of version 0.1" if method == "mechanic" else method
        axes.scatter([], [], color=color, marker="*" if method == "mechanic" else "o", label=label)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(families)), [f"{family}, {base} ({len(p)})" for (family, base), p in families.items()])
    axes.invert_yaxis()
    axes.set(xlabel="final training loss / best of a sweep (left is better; an arrow points beyond the axis)")
    axes.set_title("Quality by family, in brackets the number of problems")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.14))
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
    axes.set(xscale="log", xlabel="parameters", ylabel="time of a step / fused AdamW alone", ylim=(0.9, 4))
    axes.set_xticks(sizes, [f"{size / 1e6:.0f}M" for size in sizes])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_title("H200, float32, shapes of GPT-2; no forward or backward pass to hide the host")
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def main() -> None:
    """Writes them all."""
    for figure, name in ((quality_by_family(), "quality_by_family"), (cost_by_size(), "cost_by_size")):
        figure.savefig(HERE / "images" / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
