"""Steps that replay CUDA graphs equal launched ones bit for bit; run by hand on a GPU.

`python tests/gpu/check_recording.py` trains every case twice, with and without recordings, and changes something under
the live graph. Exits with 1 if a check fails. Needs one CUDA GPU, torch with Triton, and this repository.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from check_core import BASES, DEVICE, make_net, three_params
from torch import Tensor, nn

from mechanic_plugins import MechanicOptimizer, mechanize

STEPS, CHANGE = 60, 30
Change = Callable[["Run"], None]


class Counted(torch.cuda.CUDAGraph):
    """Counts the replays of all graphs."""

    replays = 0

    def replay(self) -> None:
        Counted.replays += 1
        super().replay()


def wide_net() -> nn.Sequential:
    """A network with short, medium and long weights, which torch operations treat differently."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 4200), nn.GELU(), nn.LayerNorm(4200), nn.Linear(4200, 1024), nn.GELU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).to(DEVICE)


class Run:
    """Trains a network on noise, with an event in mid-run."""

    def __init__(
        self, base: str, *, recorded: bool, dtype: torch.dtype = torch.float32, wide: bool = False, **options: Any
    ) -> None:
        self.net = wide_net() if wide else make_net(dtype)
        self.spare = nn.Parameter(torch.ones(33, 5, device=DEVICE, dtype=dtype))
        groups = [{"params": list(self.net[:3].parameters())}, {"params": list(self.net[3:].parameters())}]
        self.recorded, self.options = recorded, options
        self.optimizer = self.mechanized(BASES[base](groups))
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self.replays, self.set_to_none, self.base = 0, True, base
        self.stream = torch.cuda.current_stream()
        self.norms: list[Tensor] = []

    def mechanized(self, base: torch.optim.Optimizer) -> MechanicOptimizer:
        optimizer = mechanize(base, **self.options)
        self.allow(optimizer)
        return optimizer

    def allow(self, optimizer: MechanicOptimizer) -> None:
        optimizer._recorder._can_record = self.recorded

    def step(self, index: int, poison: float = 1.0) -> None:
        dtype = next(self.net.parameters()).dtype
        x = torch.randn(128, 64, device=DEVICE, generator=self.generator).to(dtype)
        loss = nn.functional.cross_entropy(self.net(x).float(), x[:, :10].argmax(1)) + self.spare.float().square().sum()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        (loss * poison).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - index / STEPS)
        before = Counted.replays
        self.optimizer.step()
        self.norms.append(self.optimizer.grad_norm)
        self.replays += Counted.replays > before

    def train(self, change: Change | None) -> list[Tensor]:
        for index in range(STEPS):
            if index == CHANGE and change is not None:
                change(self)
            with torch.cuda.stream(self.stream):
                self.step(index)
        torch.cuda.synchronize()
        states = [t for p in self.optimizer._params() for t in self.optimizer.state[p].values()]
        weights = [p.detach() for p in (*self.net.parameters(), self.spare)]
        norms = torch.stack(self.norms).nan_to_num(nan=-1.0)
        return [*weights, *states, *self.optimizer.tuner, self.optimizer.scale, norms]


# ------------------------------------------------------------------------------------- events in mid-run


def freeze(run: Run) -> None:
    run.optimizer.freeze()


def freeze_and_unfreeze(run: Run) -> None:
    run.optimizer.freeze()
    for index in range(6):
        run.step(index)
    run.optimizer.unfreeze()


def other_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.3


def another_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [run.spare]})


def load(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.step(0)
    run.optimizer.load_state_dict(saved)


def load_into_a_new_one(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    groups = [{"params": group["params"]} for group in run.optimizer.param_groups]
    run.optimizer = run.mechanized(BASES[run.base](groups))
    run.optimizer.load_state_dict(saved)


def write_into_the_weights(run: Run) -> None:
    with torch.no_grad():
        run.net[0].weight.mul_(0.5)


def swap_the_weights(run: Run) -> None:
    run.net[3].weight.data = run.net[3].weight.data.clone()


def swap_a_moment(run: Run) -> None:
    state = run.optimizer.state[run.net[3].weight]
    for name, kept in state.items():
        state[name] = kept.clone()


def drop_a_state(run: Run) -> None:
    del run.optimizer.state[run.net[3].weight]


def without_a_gradient(run: Run) -> None:
    for index in range(6):
        run.net[5].requires_grad_(index % 2 == 0)
        run.step(index)
    run.net[5].requires_grad_(True)


def keep_gradients(run: Run) -> None:
    run.set_to_none = False


def not_a_number(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.step(0, poison=float("nan"))


def lr_of_zero(run: Run) -> None:
    run.step(STEPS)


def other_clipping(run: Run) -> None:
    run.optimizer.max_grad_norm = 0.05


def another_stream(run: Run) -> None:
    torch.cuda.synchronize()
    run.stream = torch.cuda.Stream()


def deepcopied(run: Run) -> None:
    net, optimizer = copy.deepcopy((run.net, run.optimizer))
    run.net, run.optimizer = net, optimizer
    run.allow(optimizer)


def free_memory(run: Run) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    run.junk = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(64)]  # type: ignore[attr-defined]


CHANGES: list[Change | None] = [
    None,
    freeze,
    freeze_and_unfreeze,
    other_decay,
    another_group,
    load,
    load_into_a_new_one,
    write_into_the_weights,
    swap_the_weights,
    swap_a_moment,
    drop_a_state,
    without_a_gradient,
    keep_gradients,
    not_a_number,
    lr_of_zero,
    other_clipping,
    another_stream,
    deepcopied,
    free_memory,
]


def check_changes() -> Iterator[tuple[str, bool]]:
    for change in CHANGES:
        yield compared("adamw", change, max_grad_norm=0.3)
        yield compared("adamw", change, wide=True)
    for base in BASES:
        yield compared(base, None)
        yield compared(base, freeze_and_unfreeze, max_grad_norm=0.3, scope="group")
        yield compared(base, load, dtype=torch.bfloat16)
        yield compared(base, load_into_a_new_one, delta_dtype=torch.bfloat16)


def compared(base: str, change: Change | None, **options: Any) -> tuple[str, bool]:
    runs = [Run(base, recorded=recorded, **options) for recorded in (False, True)]
    launched, replayed = (run.train(change) for run in runs)
    same = len(launched) == len(replayed) and all(map(torch.equal, launched, replayed))
    name = "nothing" if change is None else change.__name__.replace("_", " ")
    said = f"{base}, {options}, {name}: {runs[1].replays} of {len(runs[1].norms)} steps replayed, equal: {same}"
    return said, same and runs[1].replays > STEPS // 2 and runs[0].replays == 0


def check_users_graph() -> Iterator[tuple[str, bool]]:
    """A user captures a step, replays it, and continues without the graph."""
    ends = []
    for recorded in (False, True):
        params = three_params()
        optimizer = mechanize(torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=True))
        optimizer._recorder._can_record = recorded
        graph = torch.cuda.CUDAGraph()
        for step in range(40):
            for p in params:
                p.grad.copy_(p.detach() - step)  # type: ignore[union-attr]
            if step == 15:
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay() if 15 <= step < 25 else optimizer.step()
            if step == 24:  # the graph must keep reading what it was captured with
                optimizer.zero_grad()
                for p in params:
                    p.grad = torch.zeros_like(p)
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    same = torch.equal(*ends)
    yield f"a graph of the user's in between, equal: {same}", same


def check_memory() -> Iterator[tuple[str, bool]]:
    """Recordings are freed with the optimizer, immediately."""
    Run("adamw", recorded=True).train(None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        Run("adamw", recorded=True).train(None)
    more = torch.cuda.memory_allocated() - before
    yield f"memory after three more runs: {more / 2**20:.2f} MiB more", more < 2**20


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    torch.cuda.CUDAGraph = Counted  # type: ignore[misc]
    failed = False
    for check in (check_changes, check_users_graph, check_memory):
        for said, holds in check():
            print("ok    " if holds else "FAILED", said, flush=True)
            failed |= not holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
