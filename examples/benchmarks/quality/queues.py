"""Runs jobs in parallel on one machine: each process takes the next one as soon as it is free."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

from training import Job, Record, Setup, run

__all__ = ["Failure", "finished"]


class Failure(NamedTuple):
    """The traceback of a failed run."""

    traceback: str


Result = list[Record] | Failure


def finished(jobs: Sequence[Job], setup: Setup, workers: int, ends: float | None) -> Iterator[tuple[Job, Result]]:
    """Yields each job with its records as it ends.

    Args:
        jobs: In the order to start them.
        setup: Shared by all jobs.
        workers: Number of processes.
        ends: When all must be over (by `time.monotonic`). A job that would take longer, judging by others of its
            problem, is not started.
    """
    queue, took = list(reversed(jobs)), dict[str, float]()
    running: dict[Future[Result], tuple[Job, float]] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while queue or running:
            while queue and len(running) < workers:
                job, now = queue.pop(), time.monotonic()
                if ends is None or now + took.get(job.problem, 0.0) < ends:
                    running[pool.submit(_run, job, setup)] = job, now
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                job, began = running.pop(future)
                took[job.problem] = max(took.get(job.problem, 0.0), time.monotonic() - began)
                yield job, future.result()


def _run(job: Job, setup: Setup) -> Result:
    try:
        return run(job, setup)
    except Exception:  # reported; the other runs continue
        return Failure(traceback.format_exc())
