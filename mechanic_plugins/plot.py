"""Draws the learned learning rate and the loss of a run.

    python -m mechanic_plugins.plot RUN

RUN is a `trainer_state.json` of transformers, a `metrics.csv` of Lightning, or a folder that contains one of them or
TensorBoard's event files; of several runs the newest is taken. The picture goes to `mechanic.png`, or to `--out`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Series", "draw", "find_log", "main", "read"]

Series = dict[str, list[tuple[float, float]]]
"""The (step, value) pairs of each name in a log, in order."""

LR, PEAK = "mechanic/effective_lr", "mechanic/peak_lr"
FILES = ("trainer_state.json", "metrics.csv")


def find_log(run: Path) -> Path:
    """The log that `run` is, or the newest one in it: a file, or the folder of TensorBoard's event files.

    Raises:
        ValueError: There is none.
    """
    files = [run] if run.is_file() else [path for name in (*FILES, "*tfevents*") for path in run.rglob(name)]
    logs = [path for path in files if path.name in FILES or "tfevents" in path.name]
    if not logs:
        raise ValueError(
            f"{run} is or contains no {' or '.join(FILES)} and no TensorBoard event file. transformers writes the "
            "first with its checkpoints, Lightning's CSVLogger the second."
        )
    # transformers and TensorBoard may both have written: what needs no further package comes first
    newest = max(logs, key=lambda path: (path.name in FILES, path.stat().st_mtime))
    return newest if newest.name in FILES else newest.parent


def read(log: Path) -> Series:
    """All numbers of a log.

    Raises:
        ValueError: It is damaged.
        ImportError: TensorBoard is needed and not installed.
    """
    try:
        if log.name == "trainer_state.json":
            series = _collected(json.loads(log.read_text())["log_history"])
        elif log.name == "metrics.csv":
            series = _collected(csv.DictReader(log.read_text().splitlines()))
        else:
            series = _of_tensorboard(log)
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{log} cannot be read ({error!r}): is it complete?") from error
    return {name: sorted(pairs) for name, pairs in series.items()}


def _collected(rows: Iterable[Mapping[str, Any]]) -> Series:
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            try:
                number = float(value)
            except (TypeError, ValueError):  # text, a list, or nothing in this row
                continue
            if name != "step":
                series.setdefault(name, []).append((float(row["step"]), number))
    return series


def _of_tensorboard(folder: Path) -> Series:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(f"{folder} holds TensorBoard event files: pip install tensorboard") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def draw(series: Series, *, title: str, loss: str | None = None) -> Figure:
    """The learning rate in force above, with the learned one in the title, and the loss below.

    Args:
        series: From `read`.
        title: What the run is called.
        loss: The name of the loss in the log; None takes every name with "loss" in it.

    Raises:
        ValueError: The log holds no learning rate of Mechanic's, or no loss of that name.
    """
    lrs, losses = _lrs(series), _losses(series, loss)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'mechanic-plugins[plot]'") from error
    figure = Figure(figsize=(8, 6 if losses else 3.5), layout="constrained")
    panels: Any = figure.subplots(2 if losses else 1, 1, sharex=True, squeeze=False)[:, 0]
    _plot(panels[0], lrs, "learning rate in force", "crimson")
    if losses:
        _plot(panels[1], losses, "loss", "0.3")
    peak = next((pairs[-1][1] for name, pairs in series.items() if PEAK in name), None)
    panels[0].set_title(title if peak is None else f"{title}: learned lr {peak:.3g}")
    panels[-1].set_xlabel("step")
    return figure


def _lrs(series: Series) -> Series:
    """The learning rates under short names; per group if the log has groups that differ."""
    found = {name.partition(LR)[2].strip("/-") or "lr": pairs for name, pairs in series.items() if LR in name}
    if not found:
        raise ValueError(
            f"the log holds no {LR}: was the run made with Mechanic, and with a plugin that logs it? "
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


def _plot(axes: Axes, series: Series, label: str, color: str) -> None:
    values = [value for pairs in series.values() for _, value in pairs if math.isfinite(value)]
    axes.set_prop_cycle(color=[color, "tab:blue", "tab:orange", "tab:green", "tab:purple"])
    for name, pairs in series.items():
        axes.plot(*zip(*pairs, strict=True), label=name, linewidth=1.5, marker="." if len(pairs) < 30 else "")
    if values and max(values) > 0 and min(values) >= 0:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
    if len(series) > 1:
        axes.legend()


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
    try:
        log = find_log(args.run)
        draw(read(log), title=log.parent.name or log.name, loss=args.loss).savefig(args.out, dpi=120)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{log} -> {args.out}\n")


if __name__ == "__main__":
    main()
