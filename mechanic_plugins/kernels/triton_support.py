"""Where the Triton kernels can run, and on which tensors. Loads Triton only when a kernel is launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGNED",
    "can_run",
    "fits",
    "is_16_bit",
    "kind_of",
    "lies_like",
    "processors",
    "triton_type",
]

ALIGNED = 16
"""Elements that suffice for reading 16 bytes at once."""


DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
"""The kinds of devices that kernels may run on."""


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on CPU tensors, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def can_run(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return has_triton() and (device.type == "cuda" or is_interpreted())


def fits(x: Tensor, grad: Tensor | None) -> bool:
    """Whether kernels may read weights and gradient as flat memory."""
    return can_run(x.device) and x.is_floating_point() and _is_row(x) and (grad is None or lies_like(grad, x))


def _is_row(x: Tensor) -> bool:
    """Whether the tensor is dense, in an order that `zeros_like` keeps."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def lies_like(grad: Tensor, x: Tensor) -> bool:
    """Whether both have the same memory layout."""
    if grad.layout != torch.strided:
        return False
    return grad.stride() == x.stride() or (grad.is_contiguous() and x.is_contiguous())


def is_16_bit(dtype: torch.dtype) -> bool:
    """Whether an update may be smaller than the rounding of weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def kind_of(x: Tensor, grad: Tensor | None) -> tuple[torch.device, torch.dtype, torch.dtype, bool]:
    """Tensors of one kind share a launch."""
    return x.device, x.dtype, x.dtype if grad is None else grad.dtype, is_even(x)


def is_even(x: Tensor) -> bool:
    """Whether a kernel may read 16 bytes at once up to the end. One uneven tensor prevents it for a whole launch."""
    return x.numel() % ALIGNED == 0


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def triton_type(dtype: torch.dtype) -> Any:
    """Triton's name of a torch dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
