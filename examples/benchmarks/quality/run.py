"""Is Mechanic as good as the best learning rate of a sweep?

    python examples/benchmarks/quality/run.py --size smoke                  # seconds, without any data
    python examples/benchmarks/quality/run.py --size cpu --data FOLDER      # hours on two cores; --only selects a part
    python examples/benchmarks/quality/run.py --size gpu --data FOLDER --device cuda --jobs 7

`paper.py` chooses what repeats experiments of the paper.

Every finished run is a line in the results file and is not run again. `report.py` makes the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from catalogue import FAMILIES
from methods import METHODS, USUAL, Method
from queues import Failure, finished
from task import Problem
from training import Job, Setup


def main(words: Sequence[str] | None = None) -> None:
    """Runs what is missing, and fails at the end if any run failed. Without words, the command line's."""
    arguments = _arguments(words)
    cache = arguments.cache or arguments.out.parent / "pretrained"
    setup = Setup(arguments.size, arguments.data, arguments.encoder, arguments.device, cache)
    table = {name: p for name, p in setup.problems().items() if _is_chosen(p, arguments.only)}
    chosen = {name: METHODS[name] for name in arguments.methods or USUAL}
    jobs = _missing(table, chosen, seeds=range(arguments.seeds), lrs=arguments.lrs, done=_done(arguments.out))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} jobs to run", flush=True)
    failed = _work(jobs, setup, arguments)
    if failed:
        sys.exit(f"{failed} of {len(jobs)} jobs failed")


def _work(jobs: Sequence[Job], setup: Setup, arguments: argparse.Namespace) -> int:
    ends = None if arguments.time_limit is None else time.monotonic() + arguments.time_limit
    failed = number = 0
    with arguments.out.open("a") as out:
        for number, (job, result) in enumerate(finished(jobs, setup, arguments.jobs, ends), 1):
            if isinstance(result, Failure):
                failed += 1
                print(f"{number}/{len(jobs)} {job.problem} | {job.method} | failed\n{result.traceback}", flush=True)
                continue
            out.writelines(json.dumps(record) + "\n" for record in result)
            out.flush()
            first = result[0]
            measure, lr = first["measure"], f"{first['lr']:g} of {len(result)}" if len(result) > 1 else first["lr"]
            about = f"{first['problem']} | {first['method']} | lr {lr} | seed {first['seed']}"
            figures = (
                f"{measure} {first[measure]:.4f} | train_loss {first['train_loss']:.3g} | {first['seconds']:.0f} s"
            )
            print(f"{number}/{len(jobs)} {about} | {figures}", flush=True)
    if number < len(jobs):
        print(f"time is up: {len(jobs) - number} jobs are left for the next call")
    return failed


def _is_chosen(problem: Problem, only: Sequence[str]) -> bool:
    families = set(itertools.chain(*FAMILIES.values()))
    whole = {word for word in only if word in families}
    words = [word for word in only if word not in families]
    return not only or problem.family in whole or any(word in f"{problem.family}: {problem.name}" for word in words)


def _done(path: Path) -> set[tuple[str, str, float, int]]:
    if not path.exists():
        return set()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {(r["problem"], r["method"], r["lr"], r["seed"]) for r in records}


def _missing(
    table: dict[str, Problem],
    methods: dict[str, Method],
    *,
    seeds: range,
    lrs: Collection[float] | None,
    done: set[tuple[str, str, float, int]],
) -> list[Job]:
    """The missing jobs, seed by seed, so that stopping early leaves something of everything."""
    jobs = []
    for (label, method), (name, problem) in itertools.product(methods.items(), table.items()):
        if not method.is_for(problem):
            continue
        tried = [lr for lr in method.lrs_for(problem) if method.lrs is not None or lrs is None or lr in lrs]
        members = [(lr, seed) for seed, lr in itertools.product(seeds, tried) if (name, label, lr, seed) not in done]
        jobs += [Job(name, label, some) for some in _shared(members, problem.ensemble)]
    return sorted(jobs, key=lambda job: job.members[0][1])


def _shared(members: Sequence[tuple[float, int]], ensemble: bool) -> Iterator[tuple[tuple[float, int], ...]]:
    if ensemble and members:
        yield tuple(members)
    elif not ensemble:
        yield from ((member,) for member in members)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    families = "; ".join(f"{size}: {', '.join(names)}" for size, names in FAMILIES.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["smoke", "cpu", "gpu", "paper"], default="smoke")
    parser.add_argument("--data", type=Path, help="a folder of data sets (tab_*.npz, img_*.npz, lm_*.xz, tc_*.xz)")
    parser.add_argument("--encoder", help="a pretrained encoder's folder, in transformers' layout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs side by side")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no run that would end later")
    parser.add_argument("--only", nargs="*", default=[], help=f"families ({families}), or words from 'family: problem'")
    parser.add_argument("--methods", nargs="*", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--lrs", nargs="*", type=float, help="only these of the sweep")
    parser.add_argument("--out", type=Path, default=Path("quality.jsonl"))
    parser.add_argument("--cache", type=Path, help="where pretrained models are kept (beside the results)")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
