"""Prints a table of Mechanic in pip-installable programs against their own default learning rate.

`make test-programs ARGS="--only quick-starts"` installs the programs of `quick_starts.py` and runs this with Mechanic;
`--methods sweep mechanic` runs the plain optimizers too, whose results are kept in quality.jsonl. Any Python with the
programs will do:

    python tests/programs/quality.py                              the table of kept results
    python tests/programs/quality.py --methods mechanic           run Mechanic again
    python tests/programs/quality.py --methods sweep --only skorch

Each program runs unchanged in its own process: `mechanic-run --replace` is all that Mechanic needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quick_starts import HIGHER, QUICK_STARTS

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "quality.jsonl"
FACTORS = {"default": [1.0], "sweep": [0.1, 0.3, 1.0, 3.0, 10.0], "mechanic": [1.0]}

Record = dict[str, Any]
Key = tuple[str, bool, float, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", choices=FACTORS, nargs="*", default=[], help="Mechanic is run anew each time")
    parser.add_argument("--only", choices=QUICK_STARTS, nargs="+", default=list(QUICK_STARTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=0, help="how many [as many as each program has]")
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    text = args.records.read_text() if args.records.exists() else ""
    records = {key_of(record): record for record in map(json.loads, text.splitlines())}
    failed = []
    for name in args.only:
        seeds = list(range(args.seeds or QUICK_STARTS[name].seeds))
        for method in args.methods:
            keys = [(name, method == "mechanic", factor, seed) for factor in FACTORS[method] for seed in seeds]
            missing = [key for key in keys if method == "mechanic" or key not in records]
            new = list(results(name, method, missing)) if missing else []
            records.update({key_of(record): record for record in new})
            failed += [name] if len(new) < len(missing) else []
            args.records.write_text("".join(f"{json.dumps(records[key])}\n" for key in sorted(records)))
    print(table(list(records.values()), args.only))
    print(f"\nfailed: {', '.join(failed)}" if failed else "")
    return bool(failed)


def key_of(record: Record) -> Key:
    return record["program"], record["mechanic"], record["factor"], record["seed"]


def results(name: str, method: str, keys: Sequence[Key]) -> Iterator[Record]:
    """Runs a program for some seeds and rates."""
    mechanic_run = ["-m", "mechanic_plugins.run", "--replace", f"torch.optim.{QUICK_STARTS[name].optimizer}"]
    command = [sys.executable, *(mechanic_run if method == "mechanic" else []), str(HERE / "quick_starts.py"), name]
    command += [f"{factor}:{seed}" for _, _, factor, seed in keys]
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        print(f"{name}, {method}: status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
    for record in map(json.loads, done.stdout.splitlines()):
        if record["mechanic"] != (method == "mechanic"):
            print(f"{name}, {method}: {'not ' * (not record['mechanic'])}mechanized", file=sys.stderr)
            continue
        yield record


def table(records: Sequence[Record], names: Sequence[str]) -> str:
    """The means over the shared seeds. The last column counts the sweep's rates that are no better than Mechanic."""
    head = ["program, measure, seeds", "its own rate", "best of the sweep", "default rule", "rates no better"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        program = QUICK_STARTS[name]
        values, seeds = means([record for record in records if record["program"] == name])
        swept = {factor: value for (mechanic, factor), value in values.items() if not mechanic}
        learned = values.get((True, 1.0))
        if not swept or learned is None:
            continue
        about = f"{name}: {program.measure} {'↑' if program.better == HIGHER else '↓'}, {seeds}"
        best = min(swept, key=lambda factor: cost(swept[factor], program.better))
        found = f"{shown(swept[best])} at x{best:g}" if len(swept) > 1 else ""
        behind = ""
        if len(swept) > 1:
            own = cost(learned, program.better)
            behind = f"{sum(cost(value, program.better) >= own for value in swept.values())} of {len(swept)}"
        rows.append(f"| {about} | {shown(swept.get(1.0))} | {found} | {shown(learned)} | {behind} |")
    return "\n".join(rows)


def means(records: Sequence[Record]) -> tuple[dict[tuple[bool, float], float], int]:
    """The mean of each method over the seeds that all methods have, and the number of these seeds."""
    values: dict[tuple[bool, float], dict[int, float]] = {}
    for record in records:
        values.setdefault((record["mechanic"], record["factor"]), {})[record["seed"]] = record["value"]
    shared = set.intersection(*map(set, values.values())) if values else set()
    return {key: sum(each[seed] for seed in shared) / len(shared) for key, each in values.items() if shared}, len(
        shared
    )


def cost(value: float, better: str) -> float:
    """The value as a cost to minimise; NaN is the worst."""
    if math.isnan(value):
        return math.inf
    return -value if better == HIGHER else value


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
