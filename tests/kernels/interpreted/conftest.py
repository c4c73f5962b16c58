from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import watch_launches

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

OWN_TESTS = ("test_kernels.py", "test_moves.py", "test_tuner_kernel.py")
"""Those that a GPU can run too."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if IS_INTERPRETED or collection_path.suffix != ".py":
        return None
    return None if torch.cuda.is_available() and collection_path.name in OWN_TESTS else True


@pytest.fixture(autouse=True)
def _few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the first steps and one later. The host decides those, and most steps of a test should be the kernels'.

    Otherwise the first ten would all be measured.
    """
    monkeypatch.setattr("mechanic_plugins.optimizer.step.is_due", lambda step: step in (1, 2, 6))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each kernel is launched."""
    counted: Counter[str] = Counter()
    watch_launches(monkeypatch, lambda name: counted.update([name]))
    return counted


def _patch_language_once() -> None:
    """Keeps Triton's language patched for the interpreter after the first launch.

    In every launch and every call of a device function, Triton searches the whole language for what to patch, which
    takes half of these tests' time. This process compiles nothing, so it never needs the original language.
    """
    from triton.runtime import interpreter

    original, scopes = interpreter._patch_lang, {}

    def patch(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = original(fn)
            scopes[module].restore = lambda: None
        return scopes[module]

    interpreter._patch_lang = patch


def _remember_dtypes() -> None:
    """Caches NumPy dtypes, whose table Triton rebuilds for every operation."""
    from triton.runtime import interpreter

    original, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype


if IS_INTERPRETED:
    _patch_language_once()
    _remember_dtypes()
