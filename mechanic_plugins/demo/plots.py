"""The plots of Mechanic's run beside the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechanic_plugins.demo.training import Run

__all__ = ["picture"]

Color = tuple[float, float, float, float]

LOSS_RANGE = (0, 1.1 * math.log(10))  # guessing among ten digits has a loss of log 10: anything worse is cut off
MECHANIC_COLOR = "crimson"


def picture(mechanic: Run, *, sweep: Sequence[Run], title: str) -> Figure:
    """Three plots: loss and learning rate over the steps, and the final loss over the learning rate."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    figure.suptitle(title)
    for draw, axes in zip((_draw_losses, _draw_lrs, _draw_sweep), figure.subplots(1, 3), strict=True):
        draw(axes, mechanic, sweep)
        axes.grid(alpha=0.25)
        axes.legend(framealpha=0.9, edgecolor="none")
    return figure


def _colors(sweep: Sequence[Run]) -> list[Color]:
    """Dark for small learning rates, light for large ones."""
    return [colormaps["viridis"](0.95 * i / max(1, len(sweep) - 1)) for i in range(len(sweep))]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over 1/40 of the run: single batches are too noisy to compare by eye."""
    weight = min(1.0, 40 / len(values))
    mean, means = values[0], []
    for value in values:
        mean += weight * (value - mean)
        means.append(mean)
    return means


def _draw_losses(axes: Axes, mechanic: Run, sweep: Sequence[Run]) -> None:
    _draw_curves(axes, sweep, curve=lambda run: _smoothed(run.losses))
    axes.plot(_smoothed(mechanic.losses), color=MECHANIC_COLOR, linewidth=2.5, label="Mechanic")
    axes.set(title="Training loss", xlabel="step", ylabel="loss (smoothed)", ylim=LOSS_RANGE)


def _draw_lrs(axes: Axes, mechanic: Run, sweep: Sequence[Run]) -> None:
    _draw_curves(axes, sweep, curve=lambda run: run.lrs)
    axes.plot(mechanic.lrs, color=MECHANIC_COLOR, linewidth=2.5, label="Mechanic")
    axes.set(title="Effective learning rate", xlabel="step", ylabel="learning rate", yscale="log")
    axes.set_ylim(sweep[0].lr / 10, 2 * max(sweep[-1].lr, mechanic.lr))


def _draw_curves(axes: Axes, sweep: Sequence[Run], *, curve: Callable[[Run], Sequence[float]]) -> None:
    label = "fixed, colours as on the right"
    for run, color in zip(sweep, _colors(sweep), strict=True):
        axes.plot(curve(run), color=color, linewidth=1, label=label if run is sweep[0] else None)


def _draw_sweep(axes: Axes, mechanic: Run, sweep: Sequence[Run]) -> None:
    axes.plot([run.lr for run in sweep], [run.final_loss for run in sweep], color="0.7", zorder=1)
    axes.scatter([run.lr for run in sweep], [run.final_loss for run in sweep], color=_colors(sweep), label="fixed")
    axes.axhline(mechanic.final_loss, color=MECHANIC_COLOR, linestyle=":")
    axes.plot(mechanic.lr, mechanic.final_loss, "*", color=MECHANIC_COLOR, markersize=14, label="Mechanic")
    axes.set(title="Loss at the end, by learning rate", xlabel="learning rate", ylabel="training loss", xscale="log")
    axes.set_ylim(LOSS_RANGE)
