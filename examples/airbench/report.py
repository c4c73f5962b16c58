"""The tables and the picture of docs/airbench.md, from the records.

    python examples/airbench/report.py --page docs/airbench.md --picture docs/images/airbench.png

writes the tables between the page's marks, and the picture.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "results"
PUBLISHED = 94.01
"""The mean accuracy of 1,000 runs, by the script's first lines."""
NAMES = {"script": "its own SGD", "mechanic": "Mechanic"}
PLACES = {"optimizer": "", "file": ", `lr` in the file"}
FACTORS = (0.1, 1.0, 10.0)
PUBLISHED_MNIST = {"schedule-free": 99.35, "adadelta": 99.22}
"""After 14 epochs, one run of each, by the example's own page."""
MNIST_NAMES = {
    "schedule-free": "Schedule-Free AdamW, its rate of 0.0025",
    "adadelta": "Adadelta, rate 1, 0.7 times that after each epoch: torch's own example",
    "mechanic": "Mechanic around AdamW, no schedule",
    "mechanic, gamma 0.7": "Mechanic around AdamW, the schedule of torch's example",
}
MECHANIC, OTHER = "crimson", "0.45"
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.25, "savefig.dpi": 200}

Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracies(records: Records, method: str, factor: float, where: str) -> list[float]:
    """In percent. Where the rates are right, it does not matter where they would have been changed."""
    return [
        100 * r["accuracy"]
        for r in records
        if r["method"] == method and r["factor"] == factor and (factor == 1 or r["where"] == where)
    ]


def cell(found: Sequence[float]) -> str:
    """Mean, standard error of the mean, and how many."""
    if len(found) < 2:
        return ""
    error = statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.mean(found):.2f} ± {error:.2f} ({len(found)})"


def row(*cells: str) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def table(records: Records) -> str:
    lines = ["| accuracy, %, ± standard error (runs) | rates / 10 | as they are | rates x 10 |", "|---|---|---|---|"]
    lines += [f"| published, on an A100 | | {PUBLISHED} (1000) | |"]
    for where, place in PLACES.items():
        for method, name in NAMES.items():
            cells = [cell(accuracies(records, method, f, where)) for f in FACTORS]
            if where == "file":
                cells[1] = ""  # the row above has it
            if any(cells):
                lines.append(row(f"{name}{place}", *cells))
    return "\n".join(lines)


def mnist_table(records: Records) -> str:
    lines = [
        "| accuracy after 14 epochs, % | published | here, mean of the seeds | the seeds |",
        "|---|---|---|---|",
    ]
    for method, name in MNIST_NAMES.items():
        ends = [100 * r["accuracies"][-1] for r in records if r["method"] == method]
        if ends:
            each = ", ".join(f"{end:.2f}" for end in ends)
            lines.append(row(name, str(PUBLISHED_MNIST.get(method, "")), f"{statistics.mean(ends):.2f}", each))
    return "\n".join(lines)


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with these tables between `<!-- name -->` and `<!-- end -->`."""
    for name, text in tables.items():
        pattern = rf"<!-- {name} -->\n.*?<!-- end -->"
        page = re.sub(pattern, f"<!-- {name} -->\n{text}\n<!-- end -->", page, flags=re.DOTALL)
    return page


def picture(records: Records, path: Path) -> None:
    """All runs at the script's rates, and what happens to the error where they are wrong."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
        for method, color in (("script", OTHER), ("mechanic", MECHANIC)):
            label, mine = NAMES[method], method == "mechanic"
            found = accuracies(records, method, 1.0, "optimizer")
            bins = [number / 10 for number in range(int(10 * min([*found, 93.0])), int(10 * max([*found, 94.0])) + 2)]
            left.hist(found, bins, density=True, color=color, alpha=0.55, label=f"{label}, {len(found)} runs")
            rows = [(f, accuracies(records, method, f, "file")) for f in FACTORS]
            xs, ys = zip(*((f, 100 - statistics.mean(each)) for f, each in rows if each), strict=True)
            right.plot(xs, ys, "*-" if mine else "o-", color=color, markersize=11 if mine else 5, label=label)
        left.axvline(PUBLISHED, color="0.2", linestyle="--", linewidth=1.2, label="published mean")
        left.set(title="The script's rates", xlabel="test accuracy, %", yticks=[])
        right.set(title="Its lr wrong by ten", xlabel="lr over the script's", ylabel="test error, %")
        right.set(xscale="log", yscale="log", xticks=FACTORS, xticklabels=["0.1", "1", "10"])
        right.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
        right.minorticks_off()
        left.legend(fontsize=8)
        right.legend(fontsize=8)
        figure.savefig(path)
        plt.close(figure)


def tables_of(folder: Path) -> dict[str, str]:
    found = {"airbench": table(read(folder / "airbench.jsonl"))}
    if (folder / "mnist.jsonl").exists():
        found["mnist"] = mnist_table(read(folder / "mnist.jsonl"))
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder with airbench.jsonl and mnist.jsonl")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(words)
    tables = tables_of(given.records)
    print(*tables.values(), sep="\n\n")
    if given.page:
        given.page.write_text(filled(given.page.read_text(), tables))
    if given.picture:
        picture(read(given.records / "airbench.jsonl"), given.picture)


if __name__ == "__main__":
    main()
