"""A first training run: Mechanic against a sweep of fixed learning rates, on the digits that come with scikit-learn.

    python -m mechanic_plugins.demo

Every run has the same model, the same first weights, the same batches and the same schedule. The sweep is told its
learning rates; Mechanic finds its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mechanic_plugins import MechanicOptimizer, mechanize

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"the demo needs {error.name}: pip install 'mechanic-plugins[demo]'") from error

Params = Iterable[nn.Parameter]
Color = tuple[float, float, float, float]

BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum"}
HALF_DECADES = tuple(float(f"{10 ** (k / 2):.0e}") for k in range(-10, 1))
BATCH_SIZE = 128
WARM_UP = 0.05
LOSS_RANGE = (0, 1.1 * math.log(10))  # The loss of a guess among ten digits is log 10: worse is off the picture.
MECHANIC_COLOR = "crimson"
PICTURE_FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 values between 0 and 1, and their labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Run:
    """What one training run left behind.

    `lr` is the peak of the schedule: given to a fixed run, learned by Mechanic's.
    """

    name: str
    lr: float
    losses: list[float]
    lrs: list[float]
    test_loss: float
    test_accuracy: float

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps: a single batch says little."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


# ---------------------------------------------------------------- training


def digits(*, seed: int) -> Digits:
    """1,297 images to train on and 500 to test with, split by `seed`."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]
    return Digits(images=x[:-500], labels=y[:-500], test_images=x[-500:], test_labels=y[-500:])


def classifier(*, seed: int) -> nn.Module:
    """A small network with dropout, so that the loss has a floor and too large a learning rate shows."""
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


def train(
    model: nn.Module, *, data: Digits, optimizer: Optimizer, steps: int, seed: int
) -> Iterator[tuple[float, float]]:
    """Trains, and yields the loss and the learning rate in force after each step."""
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps=steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.labels), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item(), lr_in_force(optimizer)
        scheduler.step()


def lr_in_force(optimizer: Optimizer) -> float:
    """The learned one, or the one the optimizer was given."""
    if isinstance(optimizer, MechanicOptimizer):
        return optimizer.metrics()["mechanic/effective_lr"]
    return float(optimizer.param_groups[0]["lr"])


def peak_lr(optimizer: Optimizer) -> float:
    """The learning rate without its schedule."""
    scale = optimizer.metrics()["mechanic/scale"] if isinstance(optimizer, MechanicOptimizer) else 1.0
    return scale * float(optimizer.param_groups[0]["initial_lr"])


@torch.no_grad()
def evaluate(model: nn.Module, *, data: Digits) -> tuple[float, float]:
    """Loss and accuracy on images that were not trained on."""
    model.eval()
    outputs = model(data.test_images)
    accuracy = (outputs.argmax(1) == data.test_labels).float().mean()
    return nn.functional.cross_entropy(outputs, data.test_labels).item(), accuracy.item()


def run(
    build: Callable[[Params], Optimizer], *, name: str, data: Digits, steps: int, seed: int, progress: tqdm[NoReturn]
) -> Run:
    """One training run, from the same start and over the same batches as all the others."""
    model = classifier(seed=seed)
    optimizer = build(model.parameters())
    losses, lrs = [], []
    progress.set_description(name)
    for loss, lr in train(model, data=data, optimizer=optimizer, steps=steps, seed=seed):
        losses.append(loss)
        lrs.append(lr)
        progress.update()
    return Run(name, peak_lr(optimizer), losses, lrs, *evaluate(model, data=data))


def compare(
    base: str, *, lrs: Sequence[float], base_lr: float, steps: int, seed: int, quiet: bool = False
) -> tuple[Run, list[Run]]:
    """Mechanic's run, and one for each fixed learning rate.

    Args:
        base: A key of `BASES`.
        lrs: The sweep.
        base_lr: What Mechanic's base optimizer is given: it should not matter.
        steps: Batches in each run.
        seed: For the split, the first weights, the batches and the dropout.
        quiet: No progress bar.
    """
    data, build = digits(seed=seed), BASES[base]
    with tqdm(total=steps * (1 + len(lrs)), unit="step", disable=quiet) as progress:
        start = partial(run, data=data, steps=steps, seed=seed, progress=progress)
        mechanic = start(lambda params: mechanize(build(params, lr=base_lr)), name="Mechanic")
        sweep = [start(partial(build, lr=lr), name=f"lr {lr:.1e}") for lr in lrs]
    return mechanic, sweep


# ---------------------------------------------------------------- what is shown


def best_of(sweep: Iterable[Run]) -> Run:
    """The run with the lowest training loss; one that diverged is never the best."""
    return min(sweep, key=lambda run: run.final_loss if math.isfinite(run.final_loss) else math.inf)


def table(mechanic: Run, *, sweep: Sequence[Run]) -> str:
    """One line for each run, the sweep first."""
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
    """Loss over the steps, learning rate over the steps, and final loss over learning rate, in the same colours."""
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
    """A running mean over about a fortieth of the run: single batches are too noisy to compare by eye."""
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
    axes.set(title="Learning rate in force", xlabel="step", ylabel="learning rate", yscale="log")
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


# ---------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table and saves the picture."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot write to {args.out.parent} ({error.strerror}): choose another folder")
    mechanic, sweep = compare(
        args.optimizer, lrs=sorted(args.lrs), base_lr=args.base_lr, steps=args.steps, seed=args.seed
    )
    title = f"{NAMES[args.optimizer]} on the digits of scikit-learn, {args.steps} steps"
    print(f"\n{title}\n\n{table(mechanic, sweep=sweep)}\n")
    print(f"Mechanic learned {mechanic.lr:.1e} in one run; the best of {len(sweep)} runs with a fixed learning rate")
    print(f"had {best_of(sweep).lr:.1e}.")
    picture(mechanic, sweep=sweep, title=title).savefig(args.out, dpi=120)
    print(f"Picture: {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mechanic_plugins.demo",
        description="Mechanic against a sweep of fixed learning rates, on the digits of scikit-learn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=sorted(BASES), default="adamw", help="what Mechanic is put around")
    parser.add_argument("--steps", type=_steps, default=600, help="batches in each run")
    parser.add_argument("--lrs", type=_lr, nargs="+", metavar="LR", default=HALF_DECADES, help="the sweep")
    parser.add_argument("--base-lr", type=_lr, default=1e-3, help="what Mechanic's base is given: it should not matter")
    parser.add_argument("--seed", type=int, default=0, help="for split, first weights, batches and dropout")
    parser.add_argument("--out", type=_picture_path, default=Path("demo_output/mechanic.png"), help="the picture")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 20:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 20, got {text}: Mechanic starts from next to nothing, and fewer steps "
            "would show nothing. Try 100 for a quick look."
        )
    return int(text)


def _lr(text: str) -> float:
    try:
        lr = float(text)
    except ValueError:
        lr = math.nan
    if not 0 < lr < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, got {text}: separate several by spaces, as in --lrs 1e-4 1e-3 1e-2"
        )
    return lr


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(
            f"must end in {', '.join(PICTURE_FORMATS)}, got {text}: the ending says how to write the picture"
        )
    return path


if __name__ == "__main__":
    main()
