"""The current GPU, and whether the user is capturing a CUDA graph on it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["is_capturing", "on"]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one. Triton launches on that one, wherever the tensors are."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the user is capturing a CUDA graph, which will replay without running this code."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
