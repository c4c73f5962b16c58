"""Compiles the two CPU operators that DeepSpeed needs here, once, into the virtual environment.

DeepSpeed compiles them on first use, which takes minutes and happens inside whatever test comes first. A build that
was killed leaves a `lock` file on which every later build waits for ever: here a lock that no live process holds is
removed. `make test` runs this by itself.
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
    """Where the compiled operators live: in the environment, so that removing it removes them."""
    return Path(sys.prefix) / "torch_extensions"


def environment() -> dict[str, str]:
    """What a process needs to find them, and to run DeepSpeed without a GPU."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja may be beside python
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions_dir()), "PATH": path}


def are_compiled() -> bool:
    """For the torch and the DeepSpeed that are here now, and to the end: a lock tells of a build that was killed."""
    found = all((extensions_dir() / op / f"{op}.so").exists() for op in OPS)
    current = _stamp().exists() and _stamp().read_text() == _versions()
    return found and current and not any(extensions_dir().glob("*/lock"))


def _stamp() -> Path:
    return extensions_dir() / "compiled_for"


def _versions() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))


def why_not() -> str | None:
    """Why the operators cannot be had here; None when they can."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=environment()["PATH"]) is None]
    if not missing or are_compiled():
        return None
    return f"DeepSpeed compiles its CPU operators with g++ and ninja, and {' and '.join(missing)} cannot be found"


def build() -> None:
    """Compiles what is missing, and loads it, which proves that it works."""
    os.environ.update(environment())
    extensions_dir().mkdir(parents=True, exist_ok=True)
    with _alone():
        remove_locks()
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

        for builder in (ShareMemCommBuilder(), CPUAdamBuilder()):
            builder.load(verbose=False)
        _stamp().write_text(_versions())


def build_in_subprocess() -> None:
    """The same, for a process that should not import DeepSpeed."""
    subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.DEVNULL)


def remove_locks() -> None:
    """torch's own locks. Whoever is `_alone` knows that they are a dead build's."""
    for lock in extensions_dir().glob("*/lock"):
        lock.unlink()


@contextmanager
def _alone() -> Iterator[None]:
    """One build at a time. The kernel takes this lock away from a process that dies, however it dies."""
    with (extensions_dir() / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """The exit code: without a compiler the tests that need the operators are skipped, but never in CI."""
    if reason := why_not():
        sys.stderr.write(f"{reason}: the tests that need them will be skipped\n")
        return int(bool(os.environ.get("CI")))
    if not are_compiled():
        build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
