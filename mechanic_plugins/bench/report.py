"""The results as text and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mechanic_plugins.bench.timing import Result

__all__ = ["plot", "table"]


def table(results: Sequence[Result]) -> str:
    """The results as aligned text."""
    head = ("params", "tensors", "optimizer", "ms a step", "ratio", "ms of host", "B/param", "of the limit",
            "state B/param", "transient B/param", "launches")  # fmt: skip
    rows = [head]
    for r in results:
        rows.append(
            (
                f"{r.params / 1e6:.0f}M",
                str(r.tensors),
                r.name,
                f"{r.seconds * 1e3:.3f}",
                f"{r.ratio:.3f}",
                f"{r.host_seconds * 1e3:.3f}",
                "-" if r.moved_bytes is None else str(r.moved_bytes),
                "-" if r.of_limit is None else f"{r.of_limit:.2f}",
                f"{r.state_bytes:.2f}",
                "-" if r.transient_bytes is None else f"{r.transient_bytes:.3f}",
                "-" if r.launches is None else str(r.launches),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def plot(results: Sequence[Result], path: Path) -> None:
    """Plots time against parameters, and launches against tensors."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for name in dict.fromkeys(r.name for r in results):
        mine = sorted((r for r in results if r.name == name), key=lambda r: r.params)
        left.loglog([r.params for r in mine], [r.seconds * 1e3 for r in mine], "o-", label=name)
        if mine[0].launches is not None:
            right.plot([r.tensors for r in mine], [r.launches for r in mine], "o-", label=name)
    sizes = sorted({r.params for r in results})
    left.set_xticks(sizes, [f"{size / 1e6:.0f}M" if size >= 1e6 else str(size) for size in sizes])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    left.set(xlabel="parameters", ylabel="ms a step", title="time against parameters")
    right.set(xlabel="tensors", ylabel="launches a step", yscale="log", title="launches against tensors")
    if not right.lines:
        right.set_title("launches: counted on GPUs only")
    left.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
