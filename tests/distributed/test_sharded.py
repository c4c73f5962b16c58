"""A sharded run equals the unsharded one on the same global batch, in both h and the weights.

The scale alone does not reveal double counting, since it does not change when h is scaled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, distance
from ranks import Ranks
from setups import SETUPS, STEPS, Run, collectives_of, full, make_net

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.distributed.reduction import Reduction, Shares
from mechanic_plugins.distributed.sharding import shares_of

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
BASES = ("adamw", "sgd")
PAPER = Settings(rule="paper", s_init=1e-3)
"""Its sums include the weights."""

# name, ranks, even sizes, collectives per step
CASES = [
    ("ddp", 2, False, 0),
    ("fsdp2", 2, False, 1),
    ("fsdp2", 4, False, 1),  # the head's 3 rows leave the last rank empty
    ("fsdp2_ignored", 2, False, 1),
    ("hsdp", 4, False, 1),
    ("mixed_meshes", 4, False, 1),
    ("tp", 2, True, 1),
    ("sequence_parallel", 2, True, 1),
    ("fsdp2_tp", 4, True, 1),
    ("ddp_tp", 4, True, 1),
    ("fsdp1_full_shard_original", 2, False, 1),
    ("fsdp1_full_shard_flat", 2, False, 1),
    ("fsdp1_full_shard_original", 4, False, 1),
    ("fsdp1_shard_grad_op_original", 2, False, 1),
    ("fsdp1_shard_grad_op_flat", 2, False, 1),
    ("fsdp1_hybrid_shard_original", 4, False, 1),
    ("fsdp1_hybrid_shard_flat", 4, False, 1),
    ("fsdp1_no_shard_original", 2, False, 0),
    ("fsdp1_no_shard_flat", 2, False, 0),
]


def train(rank: int, name: str, options: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
    run = Run.start(name, **options)
    run.train(0, STEPS, **loop)
    return run.result()


def train_many(rank: int, name: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(rank, name, options, loop) for options, loop in runs]


_ALONE: dict[str, dict[str, Any]] = {}


def alone(options: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
    key = repr((sorted(options.items()), sorted(loop.items())))
    if key not in _ALONE:
        _ALONE[key] = train(0, "alone", options, loop)
    return _ALONE[key]


@pytest.mark.parametrize(("name", "world", "even", "collectives"), CASES, ids=lambda v: str(v))
def test_sharded_equals_alone(
    ranks: Callable[[int], Ranks], name: str, world: int, even: bool, collectives: int
) -> None:
    # each base in one precision here and the other in the next case, since all four would take twice the time
    turned = CASES.index((name, world, even, collectives)) % 2
    dtypes = sorted(TOLERANCE, reverse=bool(turned))
    variants = [{"base": base, "dtype": dtype, "even": even} for base, dtype in zip(BASES, dtypes, strict=True)]
    variants[turned]["settings"] = PAPER
    results = ranks(world)(train_many, name, [(options, {}) for options in variants])
    for index, options in enumerate(variants):
        mine = [rank[index] for rank in results]
        expected = collectives_of(collectives, rule="paper" if "settings" in options else "relative")
        expected[0] += name == "ddp"  # once, all ask whether a rank has its own parameters
        assert mine[0]["collectives"] == expected
        assert_all_close(mine, alone(options, {}), tolerance=TOLERANCE[str(options["dtype"])])


def train_broken(rank: int, name: str, how: str) -> dict[str, Any]:
    run = Run.start(name, even=name == "tp", counted=False)
    right = shares_of([p for group in run.optimizer.param_groups for p in group["params"]])
    reduction = Reduction(spans_ranks=False) if how == "no reduction" else right.reduction
    wrong = Shares(reduction, dict.fromkeys(right.weights, 1.0))
    run.optimizer.shares_by_engine = lambda params: wrong
    run.train(0, STEPS)
    return run.result()


@pytest.mark.parametrize(
    ("name", "world", "how"),
    [("fsdp2", 2, "no reduction"), ("hsdp", 4, "no reduction"), ("hsdp", 4, "weights 1"), ("tp", 2, "weights 1")],
)
def test_wrong_counting_is_seen(ranks: Callable[[int], Ranks], name: str, world: int, how: str) -> None:
    """Without the reduction, or with all shares 1, the comparison above must fail, or it would prove nothing."""
    even = name == "tp"
    results = ranks(world)(train_broken, name, how)
    expected = alone({"base": "adamw", "dtype": "float64", "even": even}, {})
    with pytest.raises(AssertionError):
        assert_all_close(results, expected, tolerance=TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("name", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("fsdp1_full_shard_original", 2)], ids=str
)
def test_accumulation_and_clipping(ranks: Callable[[int], Ranks], name: str, world: int) -> None:
    # FSDP1's clip_grad_norm_ takes norms in float32 and refuses float64
    dtype = "float32" if name.startswith("fsdp1") else "float64"
    options, loop = {"base": "adamw", "dtype": dtype, "counted": False}, {"accumulate": 2, "clip": 0.1}
    results = ranks(world)(train, name, options, loop)
    assert_all_close(results, alone(options, loop), tolerance=TOLERANCE[dtype])


def test_groups_share_one_collective(ranks: Callable[[int], Ranks]) -> None:
    """With a tuner for each param group, all their sums share one all-reduce, and so do their layers' changes."""
    results = ranks(2)(train_groups, "fsdp2")
    assert results[0]["collectives"] == collectives_of(1)
    assert_all_close(results, train_groups(0, "alone"), tolerance=TOLERANCE["float64"])


def train_groups(rank: int, name: str) -> dict[str, Any]:
    setup = SETUPS[name](make_net(even=False, dtype=torch.float64))
    params = list(setup.model.parameters())
    base = torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 1e-3}], lr=1e-2)
    run = Run(setup, mechanize(base, scope="group"), even=False, dtype=torch.float64)
    run.train(0, STEPS)
    return run.result()


def train_and_recompute(rank: int, name: str, dtype: str, lose_gradients_on: int | None) -> list[tuple[float, float]]:
    """Returns h as seen by the optimizer, and as defined from the gathered tensors."""
    run = Run.start(name, dtype=dtype, counted=False, settings=PAPER)
    pairs = []
    for step in range(6):
        run.backward(step)
        if rank == lose_gradients_on:
            run.optimizer.zero_grad()
        expected = _h_from_full_tensors(run)
        run.step()
        pairs.append((run.hs[-1], expected))
    return pairs


def _h_from_full_tensors(run: Run) -> float:
    opt = run.optimizer
    d, g, x = [], [], []
    for p in run.setup.model.parameters():
        known = opt.state.get(p, {}).get("mechanic_delta")
        grad = p.grad if p.grad is not None else torch.zeros_like(p)
        delta = known if known is not None else torch.zeros_like(p)
        takes_part = p.grad is not None or known is not None
        for total, t in ((d, delta), (g, grad), (x, p.detach() * takes_part)):
            total.append(full(t).double().flatten())
    delta, grad, weights = torch.cat(d), torch.cat(g), torch.cat(x)
    lr = opt.param_groups[0]["lr"]
    decay = opt.settings.s_decay * opt.scale.item() * lr * grad.norm() * (delta @ weights) / weights.norm()
    return (delta @ grad + decay).item()


def test_mixed_precision_policy(ranks: Callable[[int], Ranks]) -> None:
    """bf16 compute over float32 shards has no unsharded equivalent, so h is checked by its definition at each step."""
    for pairs in ranks(2)(train_and_recompute, "fsdp2_bf16", "float32", None):
        seen, expected = zip(*pairs, strict=True)
        assert distance(seen, expected) < 1e-6
        assert any(h != 0 for h in seen)


def test_a_rank_without_any_gradient_still_takes_part(ranks: Callable[[int], Ranks]) -> None:
    """Prodigy and D-Adaptation hang here, since they enter the collective only if there is a gradient."""
    for pairs in ranks(2)(train_and_recompute, "fsdp2", "float64", 1):
        seen, expected = zip(*pairs, strict=True)
        assert distance(seen, expected) < 1e-12
        assert any(h != 0 for h in seen)


def train_averaged(rank: int) -> dict[str, Any]:
    run = Run.start("ddp", sync_replicas=True)
    run.train(0, STEPS)
    return run.result()


def test_sync_replicas_averages_over_ddp(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(2)(train_averaged)
    assert results[0]["collectives"] == collectives_of(1)
    assert_all_close(results, alone({"base": "adamw", "dtype": "float64", "even": False}, {}), tolerance=1e-12)


def skip_together(rank: int) -> dict[str, Any]:
    run = Run.start("fsdp2", counted=False)
    run.train(0, 3)
    before = run.weights()
    run.backward(3)
    if rank == 1:
        next(p for p in run.setup.model.parameters()).grad.to_local()[0] = math.nan  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.step()
    return {"same": run.weights() == before, "skipped": run.optimizer.metrics()["mechanic/skipped_steps"]}


def test_a_nan_on_one_rank_skips_the_step_on_all(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(skip_together) == [{"same": True, "skipped": 1.0}] * 2
