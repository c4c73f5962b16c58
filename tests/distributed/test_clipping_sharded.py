"""`max_grad_norm` clips by the norm over all ranks in every set-up, without an extra collective."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, assert_close
from ranks import Ranks
from setups import STEPS, Run, collectives_of, full
from test_sharded import BASES, CASES, TOLERANCE

NORM = 0.3
# The norm is one more sum, counted like those that test_sharded.py compares in every case. So one case for each kind
# of gradient tensor and each kind of counting is enough here.
CLIPPED = [
    case
    for case in CASES
    if case[:2]
    in {
        ("ddp", 2),
        ("fsdp2", 4),
        ("mixed_meshes", 4),
        ("tp", 2),
        ("sequence_parallel", 2),
        ("fsdp2_tp", 4),
        ("fsdp1_full_shard_flat", 2),
        ("fsdp1_hybrid_shard_original", 4),
        ("fsdp1_no_shard_flat", 2),
    }
]
Result = dict[str, Any]


def train(rank: int, name: str, options: dict[str, Any], clip: float | None = None) -> Result:
    run = Run.start(name, **options)
    norms = []
    for step in range(STEPS):
        run.backward(step)
        if clip is not None:
            run.clip(clip)
        run.step()
        norms.append(run.optimizer.grad_norm.item())
    return {**run.result(), "norms": norms}


_ALONE: dict[str, Result] = {}


def alone(options: dict[str, Any]) -> Result:
    """The unsharded run, with a clip before the step."""
    key = repr(sorted(options.items()))
    if key not in _ALONE:
        plain = {name: value for name, value in options.items() if name != "max_grad_norm"}
        clipped, unclipped = train(0, "alone", plain, NORM), train(0, "alone", plain)
        with pytest.raises(AssertionError):  # otherwise the comparison proves nothing
            assert_close(clipped, unclipped, tolerance=1e-3)
        _ALONE[key] = clipped
    return _ALONE[key]


@pytest.mark.parametrize(("name", "world", "even", "collectives"), CLIPPED, ids=str)
def test_sharded_clipping_equals_a_clip_before_the_step(
    ranks: Callable[[int], Ranks], name: str, world: int, even: bool, collectives: int
) -> None:
    # each case gets one of the four pairs of base and precision, as test_sharded runs every case with both of each
    turn = CLIPPED.index((name, world, even, collectives))
    options = {"base": BASES[turn % 2], "dtype": sorted(TOLERANCE)[turn // 2 % 2], "even": even, "max_grad_norm": NORM}
    results = ranks(world)(train, name, options)
    assert results[0]["collectives"][1:] == collectives_of(collectives)[1:]
    expected = alone(options)
    assert_all_close(results, expected, tolerance=TOLERANCE[str(options["dtype"])])
    for rank in results:  # norms before clipping, which the run clipped by hand no longer has
        assert max(rank["norms"]) > NORM
        assert rank["norms"] == results[0]["norms"]
    assert max(expected["norms"]) <= NORM * (1 + 1e-6)


def norms_of_full_gradients(rank: int, name: str, even: bool) -> list[tuple[float, float]]:
    run = Run.start(name, even=even, max_grad_norm=NORM, counted=False)
    pairs = []
    for step in range(4):
        run.backward(step)
        gradients = [full(p.grad) for p in run.setup.model.parameters() if p.grad is not None]
        expected = torch.nn.utils.get_total_norm(gradients).item()
        run.step()
        pairs.append((run.optimizer.grad_norm.item(), expected))
    return pairs


@pytest.mark.parametrize(("name", "world"), [("fsdp2", 2), ("hsdp", 4), ("sequence_parallel", 2)])
def test_the_norm_is_that_of_the_whole_gradient(ranks: Callable[[int], Ranks], name: str, world: int) -> None:
    for pairs in ranks(world)(norms_of_full_gradients, name, name == "sequence_parallel"):
        for seen, expected in pairs:
            assert seen == pytest.approx(expected, rel=1e-12)


def skip_together(rank: int) -> dict[str, Any]:
    run = Run.start("fsdp2", max_grad_norm=NORM, counted=False)
    run.train(0, 3)
    before = run.weights()
    run.backward(3)
    params = list(run.setup.model.parameters())
    if rank == 1:
        params[0].grad.to_local()[0] = math.inf  # type: ignore[union-attr]
    grads = [p.grad.to_local().clone() for p in params]  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.optimizer.step()
    return {
        "same": run.weights() == before,
        "gradients": all(torch.equal(g, p.grad.to_local()) for g, p in zip(grads, params, strict=True)),  # type: ignore[union-attr]
        "skipped": run.optimizer.metrics()["mechanic/skipped_steps"],
        "norm": run.optimizer.grad_norm.item(),
    }


def test_an_infinity_on_one_rank_skips_the_step_and_leaves_all_gradients(ranks: Callable[[int], Ranks]) -> None:
    expected = {"same": True, "gradients": True, "skipped": 1.0, "norm": math.inf}
    assert ranks(2)(skip_together) == [expected] * 2
