"""Draws the learned learning rate and the loss of a run.

    python -m mechanic_plugins.plot RUN

RUN is a `trainer_state.json` of transformers, a `metrics.csv` of Lightning, or a folder with one of them or with
TensorBoard's event files somewhere in it; of several runs the last one written is taken. The picture goes to
`mechanic.png`, or where `--out` says.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Series", "draw", "find_log", "main", "read"]

Series = dict[str, list[tuple[float, float]]]
"""For each name in a log its (step, value) pairs, in order."""

LR = "mechanic/effective_lr"
FORMATS = (".png", ".pdf", ".svg")


# -------------------------------------------------------------------- reading


def find_log(run: Path) -> Path:
    """The log that `run` is, or that lies in it: a file, or the folder of TensorBoard's event files.

    Raises:
        ValueError: There is none.
    """
    if run.is_file():
        if run.name not in _READERS and "tfevents" not in run.name:
            raise ValueError(f"{run} is none of {', '.join(_READERS)} and no event file of TensorBoard's.")
        return run if run.name in _READERS else run.parent
    if not run.is_dir():
        raise ValueError(f"there is no {run}.")
    files = [path for pattern in (*_READERS, "*tfevents*") for path in run.rglob(pattern)]
    if not files:
        raise ValueError(
            f"{run} holds none of {', '.join(_READERS)} and no event file of TensorBoard's. transformers writes the "
            "first with its checkpoints, Lightning's CSVLogger the second."
        )
    # transformers and TensorBoard may both have written: what needs no further package comes first
    newest = max(files, key=lambda path: (path.name in _READERS, path.stat().st_mtime))
    return newest if newest.name in _READERS else newest.parent


def read(log: Path) -> Series:
    """All numbers of a log.

    Raises:
        ValueError: It is damaged.
        ImportError: TensorBoard is needed and is not there.
    """
    try:
        series = _READERS.get(log.name, _of_tensorboard)(log)
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{log} cannot be read ({error!r}): is it complete?") from error
    return {name: sorted(pairs) for name, pairs in series.items()}


def _of_transformers(path: Path) -> Series:
    return _collected(json.loads(path.read_text())["log_history"])


def _of_lightning(path: Path) -> Series:
    with path.open(newline="") as file:
        return _collected(list(csv.DictReader(file)))


def _collected(rows: Sequence[Mapping[str, Any]]) -> Series:
    series: Series = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            number = _number(value)
            if name != "step" and number is not None:
                series[name].append((float(row["step"]), number))
    return dict(series)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # a text, a list, or nothing in this row
        return None


def _of_tensorboard(folder: Path) -> Series:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(f"{folder} holds event files of TensorBoard's: pip install tensorboard") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


_READERS: dict[str, Callable[[Path], Series]] = {
    "trainer_state.json": _of_transformers,
    "metrics.csv": _of_lightning,
}


# -------------------------------------------------------------------- drawing


def draw(series: Series, *, title: str, loss: str | None = None) -> Figure:
    """The learned lr above, the loss below, over the steps.

    Args:
        series: From `read`.
        title: What it is called.
        loss: The name of the loss in the log; None takes every name with "loss" in it.

    Raises:
        ValueError: No learned lr is in the log, or no loss of that name.
    """
    lrs, losses = _lrs(series), _losses(series, loss)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'mechanic-plugins[plot]'") from error
    figure = Figure(figsize=(8, 6 if losses else 3.5), layout="constrained")
    panels: Any = figure.subplots(2 if losses else 1, 1, sharex=True, squeeze=False)[:, 0]
    _plot(panels[0], lrs, "learned lr")
    if losses:
        _plot(panels[1], losses, "loss")
    panels[0].set_title(title)
    panels[-1].set_xlabel("step")
    return figure


def _lrs(series: Series) -> Series:
    """By group where the log has groups that differ, under short names."""
    found = {name.partition(LR)[2].strip("/-") or "lr": pairs for name, pairs in series.items() if LR in name}
    if not found:
        raise ValueError(
            f"the log holds no {LR}: was the run made with Mechanic, and with its plugin to log it? "
            f"It has: {', '.join(sorted(series)) or 'nothing'}."
        )
    groups = {name: pairs for name, pairs in found.items() if name != "lr"}
    return groups if len(set(map(tuple, groups.values()))) > 1 else {"lr": found.get("lr", next(iter(found.values())))}


def _losses(series: Series, name: str | None) -> Series:
    if name is not None and name not in series:
        raise ValueError(f"the log holds no {name!r}. It has: {', '.join(sorted(series))}.")
    if name is not None:
        return {name: series[name]}
    # a single value is a summary, as transformers' train_loss
    return {key: pairs for key, pairs in series.items() if "loss" in key.lower() and len(pairs) > 1}


def _plot(axes: Axes, series: Series, label: str) -> None:
    values = [value for pairs in series.values() for _, value in pairs if math.isfinite(value)]
    for name, pairs in series.items():
        axes.plot(*zip(*pairs, strict=True), label=name, linewidth=1.5, marker="." if len(pairs) < 30 else "")
    if values and max(values) > 0 and min(values) >= 0:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
    if len(series) > 1:
        axes.legend()


# -------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the log and writes the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m mechanic_plugins.plot",
        description="Draw the learned learning rate and the loss of a run.",
    )
    parser.add_argument("run", type=Path, help="trainer_state.json, metrics.csv, or a folder with a log in it")
    parser.add_argument("--out", type=Path, default=Path("mechanic.png"), help="the picture [mechanic.png]")
    parser.add_argument("--loss", help="the loss by its name in the log [every name with 'loss' in it]")
    args = parser.parse_args(argv)
    if args.out.suffix.lower() not in FORMATS:
        parser.error(f"--out must end in {', '.join(FORMATS)}, got {args.out}")
    try:
        log = find_log(args.run)
        figure = draw(read(log), title=str(log), loss=args.loss)
        figure.savefig(args.out, dpi=120)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{log} -> {args.out}\n")


if __name__ == "__main__":
    main()
