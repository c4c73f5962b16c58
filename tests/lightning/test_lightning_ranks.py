"""Two ranks equal one process with the whole batch, and themselves interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import BATCHES, NAMESPACES, plain_loop
from lightning_on_ranks import OPTIONS, Result, fit, refusal
from ranks import Ranks
from torch import Tensor

pytestmark = pytest.mark.slow

RanksOf = Callable[[int], Ranks]
KINDS = ["ddp", "fsdp2", "fsdp2-full", "tp", "fsdp-sharded", "fsdp-full"]


def tensors(values: Any) -> list[Tensor]:
    return [torch.tensor(v) for v in values]


def run(ranks: RanksOf, namespace: str, kind: str, **kwargs: Any) -> Result:
    """The result, which must be the same on both ranks."""
    first, second = ranks(2)(fit, namespace, kind, **kwargs)
    assert first["weights"] == second["weights"]
    assert first["tuner"] == second["tuner"], "the ranks learned different scales"
    assert first["logged"] == second["logged"]
    assert first["said"][0].startswith("AdamW: Mechanic learned a learning rate of")
    assert [len(first["said"]), len(second["said"])] == [1, 0]
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize(("namespace", "kind"), [(NAMESPACES[1], "ddp"), *((NAMESPACES[0], kind) for kind in KINDS)])
def test_two_ranks_equal_one_process_and_resume_exactly(
    ranks: RanksOf, namespace: str, kind: str, tmp_path: Path
) -> None:
    whole = run(ranks, namespace, kind)
    expected = plain_loop(**OPTIONS)
    moved = max((a - b).abs().max() for a, b in zip(expected.weights, plain_loop(epochs=0).weights, strict=True))
    assert moved > 0.05
    for found, wanted in zip(tensors(whole["weights"]), expected.weights, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert whole["scale"] == pytest.approx(expected.optimizer.scale.item(), rel=1e-5)
    assert whole["logged"]["mechanic/scale"] == pytest.approx(whole["scale"], rel=1e-6)

    run(ranks, namespace, kind, epochs=1, save=tmp_path / "half.ckpt")
    resumed = run(ranks, namespace, kind, ckpt_path=tmp_path / "half.ckpt")
    assert resumed["tuner"] == whole["tuner"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["tuner"][-1] == 3 * BATCHES


@pytest.mark.parametrize("kind", KINDS)
def test_mechanic_joins_a_run_that_began_without_it(ranks: RanksOf, kind: str, tmp_path: Path) -> None:
    """Its moments are kept, and the scale is learned starting from the loaded weights."""
    namespace, path = NAMESPACES[0], tmp_path / "plain.ckpt"
    ranks(2)(fit, namespace, kind, epochs=1, mechanic=False, save=path)
    joined = run(ranks, namespace, kind, ckpt_path=path)
    assert joined["tuner"][-1] == 2 * BATCHES
    assert joined["scale"] > 0
    assert joined["moments"] == 3 * BATCHES


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp-sharded"])
def test_a_run_goes_on_without_mechanic(ranks: RanksOf, kind: str, tmp_path: Path) -> None:
    namespace, path = NAMESPACES[0], tmp_path / "mechanic.ckpt"
    half = run(ranks, namespace, kind, epochs=1, save=path)
    same, _ = ranks(2)(fit, namespace, kind, epochs=1, mechanic=False, ckpt_path=path)
    rest, _ = ranks(2)(fit, namespace, kind, epochs=2, mechanic=False, ckpt_path=path)
    assert same["weights"] == half["weights"]
    assert rest["weights"] != half["weights"]
    assert rest["moments"] == 2 * BATCHES


def test_sixteen_bit_weights_resume_exactly_under_fsdp2(ranks: RanksOf, tmp_path: Path) -> None:
    settings = {"namespace": NAMESPACES[0], "kind": "fsdp2", "precision": "bf16-true"}
    whole = run(ranks, **settings)
    run(ranks, **settings, epochs=1, save=tmp_path / "half.ckpt")
    resumed = run(ranks, **settings, ckpt_path=tmp_path / "half.ckpt")
    assert resumed["tuner"] == whole["tuner"]
    assert resumed["weights"] == whole["weights"]


def test_sixteen_bit_weights_under_fsdp_are_refused_before_a_checkpoint_fails(ranks: RanksOf) -> None:
    """They would train, and the first checkpoint would fail inside torch: Expected dtype == info.dtype."""
    said = ranks(2)(refusal, NAMESPACES[0], "fsdp-full", precision="bf16-true")
    assert all("Use ModelParallelStrategy (FSDP2)" in message for message in said)
