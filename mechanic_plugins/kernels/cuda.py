"""The current GPU, our own CUDA graphs, and whether the user is capturing one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

__all__ = ["Habit", "captured", "is_capturing", "on"]

T = TypeVar("T")
_ALIKE = 3
"""How many steps in a row need the same key before it is recorded: recording changing keys does not pay."""
_this_thread = threading.local()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one. Triton launches and graph capture use that, wherever the tensors are."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


class Habit:
    """Counts how many steps in a row had the same key."""

    def __init__(self) -> None:
        self._last: Any = None
        self._times = 0

    def has(self, key: Any) -> bool:
        """Records the key of a step. True from the fourth step in a row with the same key."""
        self._times = self._times + 1 if key == self._last else 1
        self._last = key
        return self._times > _ALIKE


def captured(launch: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures a graph for our own replays. Nothing runs during the capture, so nothing is waited for."""
    with on(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            graph.capture_begin(capture_error_mode="thread_local")
            _this_thread.is_recording = True
            try:
                result = launch()
            finally:
                _this_thread.is_recording = False
                graph.capture_end()
    return graph, result


def is_capturing(device: torch.device) -> bool:
    """Whether the user is capturing a CUDA graph, which will replay without running this code."""
    if device.type != "cuda" or getattr(_this_thread, "is_recording", False):
        return False
    return torch.cuda.is_current_stream_capturing()
