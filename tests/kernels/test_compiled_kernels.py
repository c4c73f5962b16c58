"""The GPU kernels, compiled for a GPU that need not be here.

The interpreter runs them on numpy, which forgives types and operations that a compiler does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mechanic_plugins.core import relative
from mechanic_plugins.core.tuner import CLIP_EPS
from mechanic_plugins.kernels import gpu_tuner
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
    ("kind", "dtype", "delta"),
    [
        (0, torch.float32, torch.float32),
        (1, torch.float32, torch.bfloat16),
        (1, torch.bfloat16, torch.float32),
        (2, torch.float16, torch.bfloat16),
        (3, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_base_and_move_in_one(kind: int, dtype: torch.dtype, delta: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_fused import fused_kernel

    types = {**TABLE, **GRADS, "count": "i32", "scales": "*fp64"}
    types |= dict.fromkeys(("norms", "corrections", "lr"), "*fp32") | dict.fromkeys(("wd", "a", "b", "c"), "fp32")
    constants = {"xtype": dtype, "gtype": dtype, "mtype": torch.float32, "dtype": delta}
    flags = {"KIND": kind, "MOMENTUM": True, "NESTEROV": True, "MAXIMIZE": True, "SIZE": 512}
    flags |= {"LOW": dtype in LOW, "DITHERED": delta == torch.bfloat16, "ALIGNED": kind != 2}
    assert_compiles(fused_kernel, types, {**{k: triton_type(v) for k, v in constants.items()}, **flags})


@pytest.mark.parametrize(
    ("dtype", "delta"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_the_passes_around_any_base(dtype: torch.dtype, delta: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_passes import move_kernel, snapshot_kernel, sums_kernel

    acc = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = {name: triton_type(kind) for name, kind in (("xtype", dtype), ("dtype", delta), ("acc", acc))}
    part = {**TABLE, "first_block": "i32", "last_block": "i32", "snapshot": POINTER[dtype], "first": "i32"}
    cut = {"ALIGNED": True, "SIZE": 512}
    flags = {"LOW": dtype in LOW, "DITHERED": delta == torch.bfloat16, "APART": dtype in LOW, **cut}
    assert_compiles(move_kernel, {**part, "scales": "*fp64", "norms": POINTER[acc]}, {**kinds, **flags})
    assert_compiles(snapshot_kernel, part, {"xtype": kinds["xtype"], **cut})
    sums = {**TABLE, **GRADS, "out": POINTER[acc], "count": "i32"}
    assert_compiles(sums_kernel, sums, {**kinds, "gtype": kinds["xtype"], "NORMS": True, **cut})


@pytest.mark.parametrize("rule", ["relative", "paper", "theory"])
def test_the_tuner(rule: Any) -> None:
    from mechanic_plugins.kernels.triton_tuner import tuner_kernel

    names = ("sums", "old", "new", "constants", "counters", "new_counters", "scales", "lrs")
    types = {**dict.fromkeys(names, "*fp64"), "norm_high": "fp32", "norm_low": "fp32", "tuners": "i32"}
    constants = ("PRIOR", "GAIN", "ADVERSE", "DOUBT", "MEMORY", "BEGINNING", "OUTLIER")
    flags: dict[str, Any] = {name: getattr(relative, name) for name in constants}
    flags |= {"RULE": gpu_tuner._RULES.index(rule), "HOLD": False, "CAPPED": True, "CLIPS": True, "CLIP_EPS": CLIP_EPS}
    n = 1 if rule == "relative" else 6
    assert_compiles(tuner_kernel, types, {**flags, "NUMBERS": 8, "n": n, "N": 1 if n == 1 else 8})


@pytest.mark.parametrize("apart", [False, True])
def test_the_small_ones(apart: bool) -> None:
    from mechanic_plugins.kernels.triton_fused import adam_steps_kernel
    from mechanic_plugins.kernels.triton_passes import collect_kernel

    types = {"sums": "*fp32", "programs": "i32", "norms": "*fp32", "norm_programs": "i32"}
    types |= {"constants": "*fp64", "out": "*fp64", "count": "*fp64"}
    assert_compiles(collect_kernel, types, {"NORMS_APART": apart, "MAXIMIZE": apart, "SIZE": 1024})
    types = {"table": "*i64", **GRADS, "count": "i32", "scales": "*fp64", "constants": "*fp64", "corrections": "*fp32"}
    assert_compiles(adam_steps_kernel, types, {"SIZE": 128})
