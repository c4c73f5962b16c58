"""Starts the runner as a person does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Runner = Callable[..., subprocess.CompletedProcess[str]]
