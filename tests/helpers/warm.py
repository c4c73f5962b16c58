"""Runs `mechanic-run` in forks of a process that has imported torch, as that import is slower than most programs here.

For tests of what the runner prints and does around a program. What it imports, and when, is tested in new processes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Runner = Callable[..., subprocess.CompletedProcess[str]]
"""`run("--replace", ..., "train.py")`: the fixtures of tests/runner."""


class Warm:
    """`Warm()(words, folder, variables)` is `python -m mechanic_plugins.run` with these arguments in this folder."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen([sys.executable, __file__], **pipes)

    def __call__(
        self, words: tuple[str, ...], folder: Path, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as said:
            files = [str(Path(said) / name) for name in ("stdout", "stderr")]
            request = {"words": words, "folder": str(folder), "variables": variables, "files": files}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(words, code, *(Path(file).read_text() for file in files))

    def stop(self) -> None:
        self._server.communicate()


def serve() -> None:
    """Forks a child for each request and returns in it after its program; returns in the parent at the end."""
    import torch._dynamo  # noqa: F401  what an optimizer's first step imports

    gc.freeze()  # so that exiting children do not scan the imports
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            _become(**json.loads(line))
            runpy.run_module("mechanic_plugins.run", run_name="__main__", alter_sys=True)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _become(words: list[str], folder: str, variables: dict[str, str], files: list[str]) -> None:
    for number, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[0] = folder
    sys.path[1:1] = variables["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["run", *words]
    tempfile.tempdir = None  # may come from the old environment


if __name__ == "__main__":
    serve()
