"""Makes the table and the picture of docs/airbench.md from the records.

    python examples/airbench/report.py --page docs/airbench.md --picture docs/images/airbench.png

Without --page it prints the table.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "results" / "airbench.jsonl"
ROWS = {
    (1.0, "optimizer"): "the tuned rates",
    (0.1, "optimizer"): "rates / 10",
    (10.0, "optimizer"): "rates x 10",
    (0.1, "file"): "`lr` / 10 in the file",
    (10.0, "file"): "`lr` x 10 in the file",
}
"""Factor and place of the change, as in the records."""
LOOKS = {
    "script": ("the script's SGD", {"color": "0.4", "marker": "o", "markersize": 6}, -1, "right"),
    "mechanic": ("Mechanic", {"color": "crimson", "marker": "*", "markersize": 11}, 1, "left"),
}
"""Label, marker, and the side on which it is drawn."""
STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "savefig.dpi": 200}

Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(records: Records, key: str, method: str, factor: float, where: str) -> list[float]:
    return [r[key] for r in records if (r["method"], r["factor"], r["where"]) == (method, factor, where)]


def table(records: Records) -> str:
    lines = ["| | the script's SGD | Mechanic | the rate it learned |", "|---|---|---|---|"]
    for row, name in ROWS.items():
        cells = []
        for method in ("script", "mechanic"):
            found = [100 * accuracy for accuracy in values(records, "accuracy", method, *row)]
            error = statistics.stdev(found) / len(found) ** 0.5
            cells.append(f"{statistics.mean(found):.2f} ± {error:.2f} ({len(found)})")
        rates = values(records, "rate", "mechanic", *row)
        cells.append(f"{statistics.mean(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str, text: str) -> str:
    """The page with this text between its markers."""
    return re.sub(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", f"\n{text}\n\n", page, flags=re.DOTALL)


def picture(records: Records, path: Path) -> None:
    """Plots the test error of every run, and the means."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
        for method, (label, look, side, align) in LOOKS.items():
            for x, row in enumerate(ROWS):
                errors = [100 - 100 * accuracy for accuracy in values(records, "accuracy", method, *row)]
                mean, place, color = statistics.mean(errors), x + 0.1 * side, look["color"]
                ax.plot([place] * len(errors), errors, ".", color=color, alpha=0.3)
                ax.plot(place, mean, **look, linestyle="", label=None if x else label)
                style = {"textcoords": "offset points", "ha": align, "va": "center", "color": color}
                ax.annotate(f"{mean:.2f}", (place, mean), (7 * side, 0), **style)
        ax.set(yscale="log", ylabel="test error, %", xlim=(-0.5, 4.5), ylim=(5, 110))
        ax.set_xticks(range(5), [name.replace("`", "").replace(" in", "\nin") for name in ROWS.values()])
        ax.set_yticks(ticks := [5, 10, 20, 50, 100], [str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.grid(axis="x", visible=False)
        ax.legend(loc="upper left")
        figure.savefig(path)
        plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, help="the table goes between its marks")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(words)
    records = read(given.records)
    if given.page:
        given.page.write_text(filled(given.page.read_text(), table(records)))
    else:
        print(table(records))
    if given.picture:
        picture(records, given.picture)


if __name__ == "__main__":
    main()
