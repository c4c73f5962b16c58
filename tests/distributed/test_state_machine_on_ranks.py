"""Random training loops on two ranks, with randomly placed parameters, against the same loop on one.

A program (steps, lost gradients, NaN on one rank, late groups, frozen parameters, learning rates, checkpoints) is drawn
here and run by every rank on its own shards: uneven ones, empty ones, replicated and plain parameters. The weights
must equal those of the unsharded loop, and the tuner's vectors must be the same bits on both ranks.

CI runs the same programs every time. `make test-long`, or MECHANIC_EXAMPLES=33 pytest FILE, runs 33 times
as many.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from comparing import distance
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mechanic_plugins import MechanicOptimizer, mechanize

TIMES = float(os.environ.get("MECHANIC_EXAMPLES", "1"))
TOLERANCE = 1e-9
SHAPES = [(4, 3), (3,), (1, 5), (5, 2), (1,), (0, 2), (7, 1)]
PLACES = ["fsdp", "rows", "columns", "replicated", "plain"]
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.3, weight_decay=0.1, foreach=False),
}

Spec = list[tuple[int, str]]
"""A param group: the shape and placement of each parameter."""


class Bag(nn.Module):
    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p

    def forward(self) -> Tensor:
        return self.p


@dataclass
class Loop:
    """One rank's side of a training loop, or the whole loop if there is no mesh."""

    spec: list[Spec]
    base: str
    options: dict[str, Any]
    mesh: DeviceMesh | None
    rank: int
    params: list[nn.Parameter] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    bags: list[Bag] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        groups = [{"params": self.new_params(group)} for group in self.spec]
        self.opt: MechanicOptimizer = mechanize(BASES[self.base](groups), **self.options)

    def randn(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def new_params(self, spec: Spec) -> list[nn.Parameter]:
        new = [self.placed(self.randn(SHAPES[index]), place) for index, place in spec]
        self.params += new
        self.places += [place for _, place in spec]
        return new

    def placed(self, x: Tensor, place: str) -> nn.Parameter:
        if self.mesh is None or place == "plain":
            return nn.Parameter(x)
        if place == "fsdp":
            self.bags.append(fully_shard(Bag(nn.Parameter(x)), mesh=self.mesh))
            return self.bags[-1].p
        return nn.Parameter(distribute_tensor(x, self.mesh, [_placement(place, x)]))

    def full(self) -> list[Tensor]:
        return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in self.params]

    def gradients(self, seed: int) -> list[Tensor]:
        """Unsharded gradients, the same on every rank."""
        self.generator.manual_seed(seed)
        return [x - 1 + 0.3 * self.randn(x.shape) for x in self.full()]

    def set_gradients(self, whole: list[Tensor], missing: tuple[int, ...]) -> None:
        for i, (p, g) in enumerate(zip(self.params, whole, strict=True)):
            if i in missing or not p.requires_grad:
                p.grad = None
            elif isinstance(p, DTensor):
                p.grad = distribute_tensor(g, p.device_mesh, p.placements)
            else:
                p.grad = g.clone()

    # ---------------------------------------------------------------- the parts of a program

    def steps(self, seed: int, count: int, missing: tuple[int, ...]) -> None:
        for i in range(count):
            self.set_gradients(self.gradients(seed + i), missing)
            self.opt.step()

    def step_not_finite(self, seed: int, where: int) -> None:
        """Makes a step with a NaN in one element of one parameter, so on one rank only if that is sharded."""
        whole = self.gradients(seed)
        full = [g for g in whole if g.numel()]
        if full:
            full[where % len(full)].view(-1)[-1] = float("nan")
        self.set_gradients(whole, ())
        self.opt.step()

    def step_lost(self, seed: int, loser: int) -> None:
        """Makes a step where one rank has no gradients for its shards, which for plain SGD equals zeros there."""
        self.set_gradients(self.gradients(seed), ())
        for p, place in zip(self.params, self.places, strict=True):
            if place in ("plain", "replicated") or p.grad is None:
                continue
            if self.mesh is None:
                dim = _placement(place, p).dim
                shards = list(p.grad.chunk(2, dim))
                if loser < len(shards):
                    shards[loser].zero_()
            elif self.rank == loser:
                p.grad = None
        self.opt.step()

    def step_empty(self) -> None:
        self.opt.zero_grad()
        self.opt.step()

    def set_lr(self, factor: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 0.3 * factor

    def freeze_parameter(self, index: int, trains: bool) -> None:
        self.params[index % len(self.params)].requires_grad_(trains)

    def freeze_scale(self, holds: bool) -> None:
        if self.opt.scale > 0:
            (self.opt.freeze if holds else self.opt.unfreeze)()

    def add_group(self, spec: Spec) -> None:
        self.opt.add_param_group({"params": self.new_params(spec), "lr": 0.1})

    def reload(self) -> None:
        saved = copy.deepcopy(self.opt.state_dict())
        groups = [{"params": g["params"]} for g in self.opt.param_groups]
        self.opt = mechanize(BASES[self.base](groups), **self.options)
        self.opt.load_state_dict(saved)

    def result(self) -> dict[str, Any]:
        metrics = self.opt.metrics()
        return {
            "weights": [x.flatten().tolist() for x in self.full()],
            "tuner": {name: t.flatten().tolist() for name, t in zip("srmv", self.opt.tuner[:4], strict=True)},
            "scales": self.opt.scales.tolist(),
            "counts": [metrics["mechanic/steps"], metrics["mechanic/skipped_steps"]],
        }


def _placement(place: str, x: Tensor) -> Any:
    if place == "replicated":
        return Replicate()
    return Shard(1 if place == "columns" and x.dim() > 1 else 0)


def play(rank: int, is_sharded: bool, program: list[tuple[str, tuple[Any, ...]]], **of_loop: Any) -> list[Any]:
    """Returns the loop's result after each part of the program."""
    loop = Loop(mesh=init_device_mesh("cpu", (2,)) if is_sharded else None, rank=rank, **of_loop)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, arguments in program:
            getattr(loop, name)(*arguments)
            results.append(loop.result())
    return results


seeds = st.integers(0, 999)
groups = st.lists(st.tuples(st.integers(0, len(SHAPES) - 1), st.sampled_from(PLACES)), min_size=1, max_size=3)


def programs(*, can_lose: bool) -> st.SearchStrategy[list[tuple[str, tuple[Any, ...]]]]:
    missing = st.lists(st.integers(0, 4), max_size=2).map(tuple)
    steps = st.tuples(st.just("steps"), st.tuples(seeds, st.integers(1, 5), missing))
    others = [
        steps,
        st.tuples(st.just("step_not_finite"), st.tuples(seeds, st.integers(0, 9))),
        st.tuples(st.just("step_empty"), st.just(())),
        st.tuples(st.just("set_lr"), st.tuples(st.sampled_from([0.0, 0.1, 1.0, 10.0]))),
        st.tuples(st.just("freeze_parameter"), st.tuples(st.integers(0, 4), st.booleans())),
        st.tuples(st.just("freeze_scale"), st.tuples(st.booleans())),
        st.tuples(st.just("add_group"), st.tuples(groups)),
        st.tuples(st.just("reload"), st.just(())),
    ]
    if can_lose:
        others.append(st.tuples(st.just("step_lost"), st.tuples(seeds, st.integers(0, 1))))
    begin = st.tuples(st.just("steps"), st.tuples(seeds, st.integers(2, 5), st.just(())))
    parts = st.lists(st.one_of(steps, *others), min_size=4, max_size=12)
    return st.tuples(begin, parts).map(lambda drawn: [drawn[0], *_with_full_steps(drawn[1])])


def _with_full_steps(parts: list[Any]) -> list[Any]:
    """Gives a late group all gradients in its first step, as a shard that never had one is not counted."""
    return [p for part in parts for p in ([part, ("steps", (0, 1, ()))] if part[0] == "add_group" else [part])]


@given(data=st.data())
@settings(
    max_examples=int(16 * TIMES),
    derandomize=TIMES == 1,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate] if TIMES == 1 else list(Phase),
)
def test_training_loops_on_two_ranks(ranks: Callable[[int], Ranks], data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(sorted(BASES)), label="base")
    loop = {
        "base": base,
        "spec": data.draw(st.lists(groups, min_size=1, max_size=2), label="groups"),
        "options": {
            "scope": data.draw(st.sampled_from(["all", "group"])),
            "rule": data.draw(st.sampled_from([None, None, "paper"])),
        },
    }
    program = data.draw(programs(can_lose=base == "sgd"), label="program")
    expected = play(0, False, program, **loop)
    first, second = ranks(2)(play, True, program, **loop)
    for part, alone, one, other in zip(program, expected, first, second, strict=True):
        assert one["tuner"] == other["tuner"], part
        assert one["counts"] == other["counts"] == alone["counts"], part
        for key in ("weights", "scales"):
            for a, b in zip(one[key], alone[key], strict=True):
                assert distance(a, b) <= TOLERANCE, (key, part)
