"""A first training run: Mechanic against a sweep of fixed learning rates, on the digits that ship with scikit-learn.

    python -m mechanic_plugins.demo

All runs share the model, the initial weights, the batches and the schedule. The sweep is given its learning rates;
Mechanic finds its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as error:
    raise ImportError(f"the demo needs {error.name}: pip install 'mechanic-plugins[demo]'") from error

from mechanic_plugins.demo.plots import picture
from mechanic_plugins.demo.training import BASES, Run, compare

__all__ = ["BASES", "Run", "best_of", "compare", "main", "picture", "table"]

NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum"}
HALF_DECADES = tuple(float(f"{10 ** (k / 2):.0e}") for k in range(-10, 1))
PICTURE_FORMATS = (".png", ".pdf", ".svg")


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


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table and saves the plot."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot write to {args.out.parent} ({error.strerror}): choose another folder")
    mechanic, sweep = compare(
        args.optimizer, lrs=sorted(args.lrs), base_lr=args.base_lr, steps=args.steps, seed=args.seed
    )
    title = f"{NAMES[args.optimizer]} on scikit-learn's digits, {args.steps} steps"
    print(f"\n{title}\n\n{table(mechanic, sweep=sweep)}\n")
    print(f"Mechanic learned {mechanic.lr:.1e} in one run; the best of {len(sweep)} fixed learning rates is")
    print(f"{best_of(sweep).lr:.1e}.")
    picture(mechanic, sweep=sweep, title=title).savefig(args.out, dpi=120)
    print(f"Picture: {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mechanic_plugins.demo",
        description="Mechanic against a sweep of fixed learning rates, on scikit-learn's digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=sorted(BASES), default="adamw", help="the base optimizer")
    parser.add_argument("--steps", type=_steps, default=600, help="batches per run")
    parser.add_argument("--lrs", type=_lr, nargs="+", metavar="LR", default=HALF_DECADES, help="the sweep")
    parser.add_argument("--base-lr", type=_lr, default=1e-3, help="the lr of Mechanic's base; it should not matter")
    parser.add_argument("--seed", type=int, default=0, help="for split, initial weights, batches and dropout")
    parser.add_argument("--out", type=_picture_path, default=Path("demo_output/mechanic.png"), help="the plot")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 20:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 20, got {text}: Mechanic starts at a tiny scale and needs some steps "
            "to raise it. Try 100 for a quick look."
        )
    return int(text)


def _lr(text: str) -> float:
    try:
        lr = float(text)
    except ValueError:
        lr = math.nan
    if not 0 < lr < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, got {text}: separate several with spaces, as in --lrs 1e-4 1e-3 1e-2"
        )
    return lr


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(
            f"must end in {', '.join(PICTURE_FORMATS)}, got {text}: the suffix sets the format"
        )
    return path
