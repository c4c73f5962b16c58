"""A first training run: both rules against a sweep of fixed learning rates, on the digits that come with scikit-learn.

    python examples/demo.py

All runs share the model, the initial weights, the batches and the schedule. The sweep is given its learning rates;
Mechanic finds its own, by its default rule and by the paper's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"the demo needs {error.name}: pip install '.[demo]'")
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mechanic_plugins import MechanicOptimizer, mechanize

__all__ = ["BASES", "RULES", "Run", "best_of", "compare", "learn", "main", "picture"]

BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum"}
HALF_DECADES = tuple(float(f"{10 ** (k / 2):.0e}") for k in range(-10, 1))
FORMATS = (".png", ".pdf", ".svg")
BATCH_SIZE = 128
WARM_UP = 0.05
RULES: dict[str, dict[str, Any]] = {
    "default rule": {"rule": "relative", "color": "crimson", "marker": "*", "size": 15},
    "paper's rule": {"rule": "paper", "color": "royalblue", "marker": "D", "size": 8},
}
"""Mechanic's rules, and how they are drawn."""
HEAD = f"{'':14}{'lr':>10}{'train loss':>13}{'test loss':>12}{'test accuracy':>16}"


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Run:
    """The outcome of a training run. `lr` is the highest effective rate, given or learned by Mechanic."""

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

    def row(self, name: str) -> str:
        """A line of the table."""
        losses = f"{self.final_loss:>13.3f}{self.test_loss:>12.3f}"
        return f"{name:14}{self.lr:>10.1e}{losses}{self.test_accuracy:>16.1%}"


def digits(*, seed: int) -> tuple[Tensor, Tensor]:
    """Images as rows of 64 values in [0, 1], with labels, shuffled. The last 500 are for testing."""
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


def run(build: Callable[[Any], Optimizer], *, steps: int, seed: int) -> Run:
    """One training run; all runs share the initial weights and the batches."""
    (images, labels), model = digits(seed=seed), classifier(seed=seed)
    optimizer = build(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps=steps))
    generator = torch.Generator().manual_seed(seed)
    losses, lrs = [], []
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
    lr = optimizer.learned_lr if isinstance(optimizer, MechanicOptimizer) else optimizer.param_groups[0]["initial_lr"]
    model.eval()
    with torch.no_grad():
        outputs, right = model(images[-500:]), labels[-500:]
    accuracy = (outputs.argmax(1) == right).float().mean().item()
    return Run(lr, losses, lrs, nn.functional.cross_entropy(outputs, right).item(), accuracy)


def learn(rule: str, base: str, *, base_lr: float, steps: int, seed: int) -> Run:
    """Mechanic's run.

    Args:
        rule: "relative" or "paper".
        base: A key of `BASES`.
        base_lr: The learning rate of the base; it should not matter.
        steps: Batches per run.
        seed: For the split, the initial weights, the batches and the dropout.
    """
    return run(lambda params: mechanize(BASES[base](params, lr=base_lr), rule=rule), steps=steps, seed=seed)


def compare(base: str, *, lrs: Sequence[float], base_lr: float, steps: int, seed: int) -> Iterator[tuple[str, Run]]:
    """Mechanic's runs by their rules' names, then one per fixed learning rate."""
    for name, look in RULES.items():
        yield name, learn(look["rule"], base, base_lr=base_lr, steps=steps, seed=seed)
    for lr in lrs:
        yield "fixed", run(partial(BASES[base], lr=lr), steps=steps, seed=seed)


# -------------------------------------------------------------------- the results


def best_of(sweep: Iterable[Run]) -> Run:
    """The run with the lowest training loss, diverged runs excluded."""
    return min(sweep, key=lambda run: run.final_loss if math.isfinite(run.final_loss) else math.inf)


def picture(learned: Mapping[str, Run], *, sweep: Sequence[Run], title: str) -> Figure:
    """Plots the final loss by learning rate, and the effective learning rate over the steps."""
    figure = Figure(figsize=(7, 3.3), layout="constrained")
    figure.suptitle(title, fontsize=10)
    final, lrs = figure.subplots(1, 2)
    best, losses = best_of(sweep), [run.final_loss for run in sweep]
    final.plot([run.lr for run in sweep], losses, "o-", color="0.6", markersize=4, label=f"{len(sweep)} fixed rates")
    lrs.plot(best.lrs, color="0.2", linestyle="--", label=f"best fixed rate, {best.lr:g}")
    for name, each in learned.items():
        look = RULES[name]
        style = {"color": look["color"], "marker": look["marker"], "markersize": look["size"], "linestyle": "none"}
        final.plot(each.lr, each.final_loss, zorder=3, label=name, **style)
        lrs.plot(each.lrs, color=look["color"], linewidth=1.5, label=name)
    final.set(title="Training loss at the end", xlabel="peak learning rate", xscale="log", ylim=(0, 3))
    lrs.set(title="Learning rate in force", xlabel="step", yscale="log")
    rates = [best.lr, *(each.lr for each in learned.values())]
    lrs.set_ylim(min(rates) / 1000, 10 * max(rates))
    for axes, place in ((final, "upper center"), (lrs, "lower center")):
        axes.grid(alpha=0.25)
        axes.legend(loc=place, framealpha=1, edgecolor="none", fontsize=9)
    return figure


# -------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints a row for each run and saves the picture."""
    args = _arguments(argv)
    title = f"{NAMES[args.optimizer]} on scikit-learn's digits, {args.steps} steps"
    print(f"\n{title}\n\n{HEAD}\n{'-' * len(HEAD)}")
    learned: dict[str, Run] = {}
    sweep: list[Run] = []
    options = {"base_lr": args.base_lr, "steps": args.steps, "seed": args.seed}
    for name, each in compare(args.optimizer, lrs=sorted(args.lrs), **options):
        print(each.row(name), flush=True)
        if name in RULES:
            learned[name] = each
        else:
            sweep.append(each)
    best = best_of(sweep)
    print()
    for name, each in learned.items():
        print(f"{f'{name}, one run:':<24}loss {each.final_loss:.3f}, learned {each.lr:.1e}")
    print(f"{f'best of {len(sweep)} fixed:':<24}loss {best.final_loss:.3f}, given {best.lr:.1e}")
    picture(learned, sweep=sweep, title=title).savefig(args.out, dpi=200)
    print(f"Picture: {args.out}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Mechanic's two rules against a sweep of fixed learning rates, on scikit-learn's digits.",
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
    return args


if __name__ == "__main__":
    main()
