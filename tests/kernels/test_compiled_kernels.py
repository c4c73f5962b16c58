"""The GPU kernels compile, without needing a GPU.

The interpreter runs them on NumPy, which accepts types and operations that a compiler rejects.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mechanic_plugins.kernels.triton_support import triton_type

pytestmark = pytest.mark.slow

LOW = (torch.bfloat16, torch.float16)
TABLE = {"table": "*i64", "blocks": "*i32", "firsts": "*i64"}
GRADS = {"grads": "*i64"}
POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64"}


def assert_compiles(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    assert set(names) == {*types, *constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(0, torch.float32), (1, torch.float32), (1, torch.bfloat16), (2, torch.float16), (3, torch.float32)],
)
def test_the_bases_update(kind: int, dtype: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_fused import fused_kernel

    types = {**TABLE, **GRADS, "count": "i32", "scales": "*fp64", "corrections": "*fp32", "lr": "*fp64"}
    types |= dict.fromkeys(("wd", "a", "b", "c"), "fp32")
    constants = {"xtype": dtype, "gtype": dtype, "mtype": torch.float32}
    flags = {"KIND": kind, "MOMENTUM": True, "NESTEROV": True, "MAXIMIZE": True, "SIZE": 512}
    flags |= {"LOW": dtype in LOW, "ALIGNED": kind != 2}
    assert_compiles(fused_kernel, types, {**{k: triton_type(v) for k, v in constants.items()}, **flags})


@pytest.mark.parametrize(
    ("dtype", "ref"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_the_sums(dtype: torch.dtype, ref: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_passes import sums_kernel

    acc = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = {"xtype": dtype, "gtype": dtype, "rtype": ref, "acc": acc}
    flags = {"LOW": dtype in LOW, "PENALTY": True, "ALIGNED": True, "SIZE": 512}
    types = {**TABLE, **GRADS, "out": POINTER[acc], "count": "i32"}
    assert_compiles(sums_kernel, types, {**{name: triton_type(kind) for name, kind in kinds.items()}, **flags})


def test_the_tuner() -> None:
    from mechanic_plugins.kernels.triton_tuner import tuner_kernel

    names = ("sums", "old", "new", "constants", "scales", "lrs")
    types = {**dict.fromkeys(names, "*fp64"), "tuners": "i32"}
    assert_compiles(tuner_kernel, types, {"HOLD": False, "CAPPED": True, "CLIPS": True, "NUMBERS": 8})


@pytest.mark.parametrize("maximize", [False, True])
def test_the_small_ones(maximize: bool) -> None:
    from mechanic_plugins.kernels.triton_fused import adam_steps_kernel
    from mechanic_plugins.kernels.triton_passes import collect_kernel

    types = {"sums": "*fp32", "programs": "i32", "constants": "*fp64", "out": "*fp64", "count": "*fp64"}
    assert_compiles(collect_kernel, types, {"MAXIMIZE": maximize, "SIZE": 1024})
    types = {"table": "*i64", **GRADS, "count": "i32", "scales": "*fp64", "constants": "*fp64", "corrections": "*fp32"}
    assert_compiles(adam_steps_kernel, types, {"SIZE": 128})
