"""Prints a table of losses on two small problems for every optimizer of pytorch_optimizer, alone and mechanized.

    python tests/outside/compare.py CHECKOUT [NAME ...]

Alone, an optimizer runs at its default learning rate and at ten times that, and the better loss counts; mechanized, it
starts from its default. The learning rate follows a cosine, since at a constant one many final losses are a matter of
chance. An optimizer is worse if the mechanized loss is more than RATIO times the other on either problem, or if it
raises. `[[table]]` in expected.toml and its list of refused optimizers say which are expected to be worse, and why; any
difference from that makes the exit status 1.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from mechanized import expected, refused
from torch import Tensor, nn
from torch.nn import functional as F

from mechanic_plugins import mechanize

STEPS, BATCH, SAMPLES, HELD_OUT = 300, 64, 512, 2048
RATIO = 3.0
CLOSURE = ("alig", "bsam", "emofact", "emolynx", "emonavi", "lbfgs")
OPTIONS: dict[str, dict[str, Any]] = {
    "bsam": {"num_data": SAMPLES},
    "lbfgs": {"max_iter": 1},
    "ranger21": {"num_iterations": STEPS},
}


class Problem(NamedTuple):
    """A problem with noisy labels, so that no loss comes near 0, where a ratio would mean nothing."""

    name: str
    x: Tensor
    y: Tensor
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]


class Row(NamedTuple):
    name: str
    results: list[tuple[float, float]]
    """For each problem, the losses alone and mechanized."""
    error: str = ""

    @property
    def is_worse(self) -> bool:
        return bool(self.error) or any(not ours <= RATIO * alone for alone, ours in self.results)

    def __str__(self) -> str:
        cells = [f"{alone:9.4f} {ours:9.4f} {ours / alone:9.3g}" for alone, ours in self.results]
        return f"{self.name:20}" + (self.error or "   ".join(cells)) + ("   worse" if self.is_worse else "")


def problems() -> list[Problem]:
    g = torch.Generator().manual_seed(0)
    rows = SAMPLES + HELD_OUT
    x = torch.randn(rows, 8, generator=g)
    y = (x[:, :2].sin().sum(1, keepdim=True) + x[:, 2:3] * x[:, 3:4]) + 0.3 * torch.randn(rows, 1, generator=g)
    centres = torch.randn(4, 8, generator=g)
    label = torch.randint(4, (rows,), generator=g)
    points = centres[label] + torch.randn(rows, 8, generator=g)
    noisy = torch.where(torch.rand(rows, generator=g) < 0.1, torch.randint(4, (rows,), generator=g), label)
    return [
        Problem("regression", x, y, lambda: mlp(1), F.mse_loss),
        Problem("classification", points, noisy, lambda: mlp(4), F.cross_entropy),
    ]


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs))


def train(problem: Problem, name: str, *, wrap: Callable[[Any], Any], **options: Any) -> float:
    """The final loss on held-out samples."""
    model = problem.build()
    opt = wrap(build(name, model, **options))
    groups = [(group, group["lr"]) for group in opt.param_groups if "lr" in group]
    g = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        for group, lr in groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / STEPS)) / 2
        batch = torch.randint(SAMPLES, (BATCH,), generator=g)

        def closure(batch: Tensor = batch) -> Tensor:
            opt.zero_grad()
            with torch.enable_grad():
                loss = problem.loss(model(problem.x[batch]), problem.y[batch])
                set_gradients(model, loss, create_graph=name in ("adahessian", "sophiah"))
            return loss.detach()

        closure()
        opt.step(closure) if name in CLOSURE else opt.step()
    with torch.no_grad():
        return problem.loss(model(problem.x[SAMPLES:]), problem.y[SAMPLES:]).item()


def set_gradients(model: nn.Module, loss: Tensor, *, create_graph: bool) -> None:
    """Sets gradients, as backward(create_graph=True) would make a reference cycle that is never freed."""
    params = list(model.parameters())
    for p, grad in zip(params, torch.autograd.grad(loss, params, create_graph=create_graph), strict=True):
        p.grad = grad


def build(name: str, model: nn.Module, **options: Any) -> Any:
    """Builds the optimizer with the groups and options of its own tests."""
    from tests.optimizer_cases import MODEL_OPTIMIZERS
    from tests.utils import build_optimizer, build_optimizer_parameters

    given = model if name in MODEL_OPTIMIZERS else model.parameters()
    params, options = build_optimizer_parameters(given, name, {**OPTIONS.get(name, {}), **options})
    return build_optimizer(name, params, **options)


def compare(name: str, cls: Any) -> Row:
    lr = getattr(inspect.signature(cls).parameters.get("lr"), "default", None)
    rates = [{}, {"lr": 10 * lr}] if isinstance(lr, float) else [{}]
    results = []
    for problem in problems():
        try:
            alone = min((train(problem, name, wrap=lambda base: base, **rate) for rate in rates), key=finite_first)
        except Exception as error:  # the table shows whatever a foreign optimizer raises
            return Row(name, [], f"alone: {told(error)}")
        try:
            results.append((alone, train(problem, name, wrap=mechanize)))
        except Exception as error:
            return Row(name, [], f"mechanized: {told(error)}")
    return Row(name, results)


def finite_first(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def verdict(rows: Iterable[Row], reasons: dict[str, str]) -> list[str]:
    """The differences from expected.toml."""
    wrong = []
    for row in rows:
        if row.is_worse and row.name not in reasons:
            wrong.append(f"{row.name} is worse mechanized than alone, which is not expected")
        if not row.is_worse and row.name in reasons:
            wrong.append(f"{row.name} is expected to be worse mechanized than alone, and is not: take it off the list")
    return wrong


def main(checkout: str, *names: str) -> int:
    sys.path.insert(0, checkout)
    from pytorch_optimizer.optimizer import OPTIMIZERS

    warnings.simplefilter("ignore")
    reasons = {name: entry["reason"] for entry in expected("table") for name in entry["bases"]}
    reasons |= {name.lower(): reason for name, reason in refused("pytorch_optimizer").items()}
    unknown = sorted(reasons.keys() - OPTIMIZERS.keys())
    print(f"{'':20}" + "   ".join(f"{p.name + ': alone, mechanized, ratio':29}" for p in problems()))
    rows = []
    for name in names or OPTIMIZERS:
        rows.append(compare(name, OPTIMIZERS[name]))
        print(rows[-1], f"(expected: {reasons[name]})" if name in reasons else "", flush=True)
    wrong = verdict(rows, reasons) + [f"{name} is expected, but is not in the table" for name in unknown]
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
