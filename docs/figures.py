"""The picture of README and docs: trains what `make demo` trains, and draws it for a column of 700 pixels.

python docs/figures.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mechanic_plugins.demo import HALF_DECADES, Run, best_of, compare

OUT = Path(__file__).parent / "images" / "demo.png"
MECHANIC, FIXED, BEST = "crimson", "0.6", "0.2"


def demo(mechanic: Run, sweep: list[Run]) -> Figure:
    """The loss at the end by learning rate, and the learning rate in force over the steps."""
    figure = Figure(figsize=(7, 3.1), layout="constrained")
    final, lrs = figure.subplots(1, 2)
    best, losses = best_of(sweep), [run.final_loss for run in sweep]
    final.plot([run.lr for run in sweep], losses, "o-", color=FIXED, markersize=4, label=f"{len(sweep)} fixed rates")
    final.axhline(mechanic.final_loss, color=MECHANIC, linewidth=1, linestyle=":")
    final.plot(mechanic.lr, mechanic.final_loss, "*", color=MECHANIC, markersize=15, zorder=3, label="Mechanic")
    final.set(title="Training loss at the end", xlabel="peak learning rate", xscale="log", ylim=(0, 3))
    lrs.plot(best.lrs, color=BEST, linestyle="--", label=f"best fixed rate, {best.lr:g}")
    lrs.plot(mechanic.lrs, color=MECHANIC, linewidth=2, label="Mechanic")
    lrs.set(title="Learning rate in force", xlabel="step", yscale="log", ylim=(1e-5, 1e-1))
    for axes, place in ((final, "upper center"), (lrs, "lower center")):
        axes.grid(alpha=0.25)
        axes.legend(loc=place, framealpha=1, edgecolor="none", fontsize=9)
    return figure


def main() -> None:
    """Trains and draws."""
    mechanic, sweep = compare("adamw", lrs=HALF_DECADES, base_lr=1e-3, steps=600, seed=0)
    demo(mechanic, sweep).savefig(OUT, dpi=200)


if __name__ == "__main__":
    main()
