"""The GPU kernels compile, without needing a GPU.

The interpreter runs them on NumPy, which accepts types and operations that a compiler rejects.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mechanic_plugins.kernels.triton_support import triton_type
from mechanic_plugins.rule.default import DefaultTuner
from mechanic_plugins.rule.published import PublishedTuner
from mechanic_plugins.rule.settings import Rule

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


def dtypes(**kinds: torch.dtype) -> dict[str, Any]:
    return {name: triton_type(kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "summed", "ktype"),
    [
        (0, torch.float32, False, torch.float32),
        (1, torch.float32, False, torch.bfloat16),
        (1, torch.bfloat16, False, torch.bfloat16),
        (2, torch.float16, False, torch.float16),
        (3, torch.float32, False, torch.float32),
        (1, torch.float32, True, torch.float32),
        (0, torch.float32, True, torch.bfloat16),
        (1, torch.bfloat16, True, torch.float32),
        (2, torch.float16, True, torch.float32),
    ],
    ids=str,
)
def test_the_bases_update(kind: int, dtype: torch.dtype, summed: bool, ktype: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_fused import fused_kernel

    types = {**TABLE, **GRADS, "count": "i32", "scales": "*fp64", "corrections": "*fp32", "lr": "*fp64"}
    types |= dict.fromkeys(("wd", "a", "b", "c"), "fp32")
    flags = {"KIND": kind, "MOMENTUM": True, "NESTEROV": True, "MAXIMIZE": True, "SIZE": 512, "SUMMED": summed}
    flags |= {"LOW": dtype in LOW, "ALIGNED": kind != 2, "DITHERED": summed and ktype == torch.bfloat16}
    kinds = dtypes(xtype=dtype, gtype=dtype, ktype=ktype, mtype=torch.float32)
    assert_compiles(fused_kernel, types, {**kinds, **flags})


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize(("summed", "decay"), [(False, False), (True, False), (True, True)])
def test_the_sums(dtype: torch.dtype, kept: torch.dtype, summed: bool, decay: bool) -> None:
    from mechanic_plugins.kernels.triton_passes import sums_kernel

    acc = torch.float64 if dtype == torch.float64 else torch.float32
    flags = {"SUMMED": summed, "LOW": dtype in LOW and not summed, "DX": decay or not summed, "XX": decay}
    flags |= {"ALIGNED": True, "SIZE": 512}
    types = {**TABLE, **GRADS, "out": POINTER[acc], "count": "i32"}
    assert_compiles(sums_kernel, types, {**dtypes(xtype=dtype, gtype=dtype, ktype=kept, acc=acc), **flags})


@pytest.mark.parametrize("rule", get_args(Rule))
def test_the_tuner(rule: str) -> None:
    from mechanic_plugins.kernels.triton_decide import tuner_kernel

    n = 1 if rule == "relative" else 6
    kind = DefaultTuner if rule == "relative" else PublishedTuner
    names = ("sums", "old", "new", "constants", "table", "lrs")
    types = {**dict.fromkeys(names, "*fp64"), "tuners": "i32"}
    flags = {"RULE": get_args(Rule).index(rule), "HOLD": False, "CAPPED": True, "CLIPS": True, "NUMBERS": 8}
    sizes = {"FLOATS": len(kind.floats()), "LANES": 32, "WIDTH": kind.width(n), "n": n, "N": 8}
    assert_compiles(tuner_kernel, types, {**flags, **sizes})


@pytest.mark.parametrize(
    ("dtype", "delta"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16)],
    ids=str,
)
def test_the_move_after_any_bases_step(dtype: torch.dtype, delta: torch.dtype) -> None:
    from mechanic_plugins.kernels.triton_move import move_kernel, snapshot_kernel

    types = {**TABLE, "first_block": "i32", "last_block": "i32", "snapshot": POINTER[dtype], "first_place": "i64"}
    assert_compiles(snapshot_kernel, types, {**dtypes(xtype=dtype), "ALIGNED": True, "SIZE": 512})
    flags = {"DITHERED": delta == torch.bfloat16, "ALIGNED": True, "SIZE": 512}
    assert_compiles(
        move_kernel,
        {**types, "scales": "*fp64", "shrink": "fp32"},
        {**dtypes(xtype=dtype, ktype=delta, acc=dtype), **flags},
    )


@pytest.mark.parametrize("maximize", [False, True])
def test_the_small_ones(maximize: bool) -> None:
    from mechanic_plugins.kernels.triton_fused import adam_steps_kernel
    from mechanic_plugins.kernels.triton_passes import collect_kernel

    types = {"sums": "*fp32", "programs": "i32", "constants": "*fp64", "out": "*fp64", "count": "*fp64"}
    assert_compiles(collect_kernel, types, {"MAXIMIZE": maximize, "DECAY": maximize, "SIZE": 1024})
    types = {"table": "*i64", **GRADS, "count": "i32", "scales": "*fp64", "constants": "*fp64", "corrections": "*fp32"}
    assert_compiles(adam_steps_kernel, types, {"SIZE": 128})
