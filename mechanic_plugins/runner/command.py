"""Runs targets that are not python scripts: `mechanic-run torchrun ...`, `mechanic-run ./train.sh`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import FrameType

__all__ = ["is_command", "run"]


def is_command(target: str) -> bool:
    """Whether the target is a program, by its name on the PATH or its file, rather than a python script."""
    path = Path(target)
    if path.is_dir() or target.endswith((".py", ".zip", ".pyz")):
        return False
    if not path.exists():
        return os.sep not in target and shutil.which(target) is not None
    with path.open("rb") as file:
        first = file.readline(200)
    return first.startswith((b"#!", b"\x7fELF")) and b"python" not in first


def run(command: list[str]) -> int:
    """Returns the exit status, 128 + n after signal n. Interrupts and SIGTERM are left to the program."""
    if os.sep not in command[0] and Path(command[0]).exists():
        command = [os.path.join(os.curdir, command[0]), *command[1:]]  # noqa: PTH118  Path would drop the dot
    with subprocess.Popen(command) as process:

        def hand_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = signal.signal(signal.SIGTERM, hand_on), signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before[0])
            signal.signal(signal.SIGINT, before[1])
    return code if code >= 0 else 128 - code
