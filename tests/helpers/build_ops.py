"""Compiles the two CPU operators that DeepSpeed needs here into the virtual environment, once.

DeepSpeed compiles them on first use, which takes minutes and happens inside whichever test comes first. A killed build
leaves a `lock` file for which every later build waits forever, so locks that no live process holds are removed here.
`make test` runs this automatically.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPS = ("deepspeed_shm_comm", "cpu_adam")


def extensions_dir() -> Path:
    """The folder of the compiled operators: in the environment, so that removing it removes them."""
    return Path(sys.prefix) / "torch_extensions"


def environment() -> dict[str, str]:
    """The variables that a process needs to find them and to run DeepSpeed without a GPU."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja may be next to python
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions_dir()), "PATH": path}


def are_compiled() -> bool:
    """Whether they are complete, for the installed torch and DeepSpeed; a lock is left by a killed build."""
    found = all((extensions_dir() / op / f"{op}.so").exists() for op in OPS)
    current = _stamp().exists() and _stamp().read_text() == _versions()
    return found and current and not any(extensions_dir().glob("*/lock"))


def _stamp() -> Path:
    return extensions_dir() / "compiled_for"


def _versions() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))


def why_not() -> str | None:
    """Why the operators cannot be built here, or None."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=environment()["PATH"]) is None]
    if not missing or are_compiled():
        return None
    return f"DeepSpeed compiles its CPU operators with g++ and ninja, and {' and '.join(missing)} cannot be found"


def build() -> None:
    """Compiles what is missing and loads it, which proves that it works."""
    os.environ.update(environment())
    extensions_dir().mkdir(parents=True, exist_ok=True)
    with _alone():
        remove_locks()
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

        for builder in (ShareMemCommBuilder(), CPUAdamBuilder()):
            builder.load(verbose=False)
        _stamp().write_text(_versions())


def build_in_subprocess() -> None:
    """Like `build`, for a process that should not import DeepSpeed."""
    subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.DEVNULL)


def remove_locks() -> None:
    """Removes torch's own locks, which inside `_alone` can only be a dead build's."""
    for lock in extensions_dir().glob("*/lock"):
        lock.unlink()


@contextmanager
def _alone() -> Iterator[None]:
    """Allows one build at a time. The kernel releases this lock however its process dies."""
    with (extensions_dir() / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Returns the exit code: without a compiler, tests that need the operators are skipped, but not in CI."""
    if reason := why_not():
        sys.stderr.write(f"{reason}: the tests that need them will be skipped\n")
        return int(bool(os.environ.get("CI")))
    if not are_compiled():
        build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
