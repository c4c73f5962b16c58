"""A first training run: Mechanic against a sweep of fixed learning rates, on the digits that ship with scikit-learn.

    python -m mechanic_plugins.demo

All runs share the model, the initial weights, the batches and the schedule. The sweep is given its learning rates;
Mechanic finds its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"the demo needs {error.name}: pip install 'mechanic-plugins[demo]'") from error
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mechanic_plugins.api import mechanize
from mechanic_plugins.optimizer import MechanicOptimizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BASES", "Run", "best_of", "compare", "main", "picture", "table"]

BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum"}
HALF_DECADES = tuple(float(f"{10 ** (k / 2):.0e}") for k in range(-10, 1))
FORMATS = (".png", ".pdf", ".svg")
BATCH_SIZE = 128
WARM_UP = 0.05
COLOR = "crimson"
LOSS_RANGE = (0, 1.1 * math.log(10))  # guessing among ten digits has a loss of log 10


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Run:
    """The outcome of one training run. `lr` is the highest in force: given, or learned by Mechanic."""

    lr: float
    losses: list[float]
    lrs: list[float]
    test_loss: float
    test_accuracy: float

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps; a single batch is too noisy."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


def digits(*, seed: int) -> tuple[Tensor, Tensor]:
    """Images as rows of 64 values in [0, 1], and labels, shuffled. The last 500 are for testing."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]


def classifier(*, seed: int) -> nn.Module:
    """A small network; dropout keeps the loss above 0, so that too large a learning rate shows."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Dropout(0.3), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(128, 10)),
    )


def schedule(step: int, *, steps: int) -> float:
    """A short linear warm-up, then a cosine down to 0."""
    warm_up = WARM_UP * steps
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def run(build: Callable[[Any], Optimizer], *, name: str, steps: int, seed: int, progress: tqdm[NoReturn]) -> Run:
    """One training run; all runs share the initial weights and the batches."""
    (images, labels), model = digits(seed=seed), classifier(seed=seed)
    optimizer = build(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps=steps))
    generator = torch.Generator().manual_seed(seed)
    losses, lrs = [], []
    progress.set_description(name)
    for _ in range(steps):
        batch = torch.randint(len(labels) - 500, (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        lr = optimizer.param_groups[0]["lr"]
        lrs.append(optimizer.effective_lrs[0] if isinstance(optimizer, MechanicOptimizer) else lr)
        scheduler.step()
        progress.update()
    lr = optimizer.learned_lr if isinstance(optimizer, MechanicOptimizer) else optimizer.param_groups[0]["initial_lr"]
    model.eval()
    with torch.no_grad():
        outputs, right = model(images[-500:]), labels[-500:]
    accuracy = (outputs.argmax(1) == right).float().mean().item()
    return Run(lr, losses, lrs, nn.functional.cross_entropy(outputs, right).item(), accuracy)


def compare(
    base: str, *, lrs: Sequence[float], base_lr: float, steps: int, seed: int, quiet: bool = False
) -> tuple[Run, list[Run]]:
    """Mechanic's run, and one run per fixed learning rate.

    Args:
        base: A key of `BASES`.
        lrs: The sweep.
        base_lr: The learning rate of Mechanic's base; it should not matter.
        steps: Batches per run.
        seed: For the split, the initial weights, the batches and the dropout.
        quiet: No progress bar.
    """
    build = BASES[base]
    with tqdm(total=steps * (1 + len(lrs)), unit="step", disable=quiet) as progress:
        start = partial(run, steps=steps, seed=seed, progress=progress)
        mechanic = start(lambda params: mechanize(build(params, lr=base_lr)), name="Mechanic")
        sweep = [start(partial(build, lr=lr), name=f"lr {lr:.1e}") for lr in lrs]
    return mechanic, sweep


# -------------------------------------------------------------------- the results


def best_of(sweep: Iterable[Run]) -> Run:
    """The run with the lowest training loss, diverged runs excluded."""
    return min(sweep, key=lambda run: run.final_loss if math.isfinite(run.final_loss) else math.inf)


def table(mechanic: Run, *, sweep: Sequence[Run]) -> str:
    """One line per run, the sweep first."""
    best = best_of(sweep)
    lines = [f"{'':10}{'lr':>10}{'train loss':>13}{'test loss':>12}{'test accuracy':>16}"]
    for run in (*sweep, mechanic):
        name = "Mechanic" if run is mechanic else "fixed"
        note = "  best of the sweep" if run is best else "  learned" if run is mechanic else ""
        numbers = f"{run.lr:>10.1e}{run.final_loss:>13.3f}{run.test_loss:>12.3f}{run.test_accuracy:>16.1%}"
        lines.append(f"{name:10}{numbers}{note}")
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def picture(mechanic: Run, *, sweep: Sequence[Run], title: str) -> Figure:
    """Three plots: loss and learning rate over the steps, and the final loss over the learning rate."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    figure.suptitle(title)
    losses, lrs, final = figure.subplots(1, 3)
    colors = [colormaps["viridis"](0.95 * i / max(1, len(sweep) - 1)) for i in range(len(sweep))]  # dark is small
    _draw_curves(losses, [_smoothed(run.losses) for run in (*sweep, mechanic)], colors)
    losses.set(title="Training loss", xlabel="step", ylabel="loss (smoothed)", ylim=LOSS_RANGE)
    _draw_curves(lrs, [run.lrs for run in (*sweep, mechanic)], colors)
    lrs.axhline(mechanic.lr, color=COLOR, linestyle="--", linewidth=1, label="learned")
    lrs.set(title="Learning rate in force", xlabel="step", ylabel="learning rate", yscale="log")
    lrs.set_ylim(sweep[0].lr / 10, 2 * max(sweep[-1].lr, mechanic.lr))
    final.plot([run.lr for run in sweep], [run.final_loss for run in sweep], color="0.7", zorder=1)
    final.scatter([run.lr for run in sweep], [run.final_loss for run in sweep], color=colors, label="fixed")
    final.axhline(mechanic.final_loss, color=COLOR, linestyle=":")
    final.plot(mechanic.lr, mechanic.final_loss, "*", color=COLOR, markersize=14, label="Mechanic")
    final.set(title="Loss at the end", xlabel="highest learning rate", ylabel="training loss", xscale="log")
    final.set_ylim(LOSS_RANGE)
    for axes in (losses, lrs, final):
        axes.grid(alpha=0.25)
        axes.legend(framealpha=0.9, edgecolor="none")
    return figure


def _draw_curves(axes: Axes, curves: Sequence[Sequence[float]], colors: Sequence[Any]) -> None:
    for index, (curve, color) in enumerate(zip(curves, colors, strict=False)):
        axes.plot(curve, color=color, linewidth=1, label=None if index else "fixed, colours as on the right")
    axes.plot(curves[-1], color=COLOR, linewidth=2.5, label="Mechanic")


def _smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over 1/40 of the run: single batches are too noisy to compare by eye."""
    weight = min(1.0, 40 / len(values))
    mean, means = values[0], []
    for value in values:
        mean += weight * (value - mean)
        means.append(mean)
    return means


# -------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table and saves the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m mechanic_plugins.demo",
        description="Mechanic against a sweep of fixed learning rates, on scikit-learn's digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=sorted(BASES), default="adamw", help="the base optimizer")
    parser.add_argument("--steps", type=int, default=600, help="batches per run")
    parser.add_argument("--lrs", type=float, nargs="+", metavar="LR", default=HALF_DECADES, help="the sweep")
    parser.add_argument("--base-lr", type=float, default=1e-3, help="the lr of Mechanic's base; it should not matter")
    parser.add_argument("--seed", type=int, default=0, help="for split, initial weights, batches and dropout")
    parser.add_argument("--out", type=Path, default=Path("demo_output/mechanic.png"), help="the plot")
    args = parser.parse_args(argv)
    if args.steps < 20:
        parser.error(f"--steps must be at least 20, got {args.steps}: try 100 for a quick look")
    if not all(0 < lr < math.inf for lr in (*args.lrs, args.base_lr)):
        parser.error(f"learning rates must be above 0, got --lrs {args.lrs} --base-lr {args.base_lr}")
    if args.out.suffix.lower() not in FORMATS:
        parser.error(f"--out must end in {', '.join(FORMATS)}, got {args.out}")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: cannot write to {args.out.parent} ({error.strerror}): choose another folder")
    mechanic, sweep = compare(
        args.optimizer, lrs=sorted(args.lrs), base_lr=args.base_lr, steps=args.steps, seed=args.seed
    )
    title = f"{NAMES[args.optimizer]} on scikit-learn's digits, {args.steps} steps"
    print(f"\n{title}\n\n{table(mechanic, sweep=sweep)}\n")
    print(f"Mechanic learned {mechanic.lr:.1e} in one run; the best of {len(sweep)} fixed learning rates is")
    print(f"{best_of(sweep).lr:.1e}.")
    picture(mechanic, sweep=sweep, title=title).savefig(args.out, dpi=120)
    print(f"Picture: {args.out}")


if __name__ == "__main__":
    main()
