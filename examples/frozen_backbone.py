"""A body that is frozen at first: what happens to the loss when it is released.

    python examples/frozen_backbone.py

A small network learns the digits 0 to 4 of scikit-learn, is given a new head, and then learns the digits 5 to 9: for
150 steps with its body frozen, for 250 more with all of it. Prints the test loss at the release, the highest in the 20
steps after it, and the last one, as means over three seeds. Takes about fifteen seconds on a CPU.
"""

import argparse
import copy
import sys

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"this example needs {error.name}: pip install '.[demo]'")
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic_plugins import mechanize

BATCH = 64
AFTER = 20


def adamw(body, head, lr=1e-3):
    return torch.optim.AdamW([{"params": body}, {"params": head}], lr=lr)


METHODS = {
    "default rule, one scale": lambda body, head: mechanize(adamw(body, head)),
    "default rule, scope='group'": lambda body, head: mechanize(adamw(body, head), scope="group"),
    "rule='paper', one scale": lambda body, head: mechanize(adamw(body, head), rule="paper"),
    "rule='paper', scope='group'": lambda body, head: mechanize(adamw(body, head), rule="paper", scope="group"),
    "plain AdamW at 1e-3": adamw,
    "plain AdamW at 1e-2": lambda body, head: adamw(body, head, lr=1e-2),
}


def digits(labels, *, seed):
    """The images of these labels, shuffled: the last 200 are for testing."""
    pixels, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    chosen = torch.isin(y, torch.tensor(labels))
    x, y = x[chosen], y[chosen] - min(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[order], y[order]


def pretrained(*, seed, steps):
    """A network that knows the digits 0 to 4, with a new head."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(128, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, digits([0, 1, 2, 3, 4], seed=seed), steps=steps, seed=seed)
    return nn.Sequential(body, nn.Linear(128, 5))


def train(model, optimizer, data, *, steps, seed, release=None):
    """Returns the test losses from the release to AFTER steps later, and the last one."""
    (x, y), losses = data, []
    scheduler = CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model[0].requires_grad_(release is None)
    for step in range(steps):
        if step == release:
            model[0].requires_grad_(True)
        if release is not None and release <= step <= release + AFTER:
            losses.append(test_loss(model, x, y))
        batch = torch.randint(len(y) - 200, (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        scheduler.step()
    return [*losses, test_loss(model, x, y)]


@torch.no_grad()
def test_loss(model, x, y):
    return cross_entropy(model(x[-200:]), y[-200:]).item()


def measure(*, seeds, steps, release):
    """For each method, the losses at the release, the highest of those after it, and the last: means over the seeds."""
    sums = {name: [0.0, 0.0, 0.0] for name in METHODS}
    for seed in range(seeds):
        start, data = pretrained(seed=seed, steps=300), digits([5, 6, 7, 8, 9], seed=seed)
        for name, build in METHODS.items():
            model = copy.deepcopy(start)
            optimizer = build(model[0].parameters(), model[1].parameters())
            before, *after, last = train(model, optimizer, data, steps=steps, seed=seed, release=release)
            sums[name] = [total + loss for total, loss in zip(sums[name], (before, max(after), last), strict=True)]
    return {name: [total / seeds for total in totals] for name, totals in sums.items()}


def main():
    parser = argparse.ArgumentParser(description="The loss when a frozen body is released.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--release", type=int, default=150, help="the step from which the body is trained")
    args = parser.parse_args()
    if not 0 < args.release < args.steps - AFTER:
        parser.error(f"--release must be above 0 and {AFTER} steps before the end, got {args.release} of {args.steps}")
    width = max(map(len, METHODS))
    print(f"{'test loss':{width}}  release  highest   end")
    for name, losses in measure(seeds=args.seeds, steps=args.steps, release=args.release).items():
        print(f"{name:{width}}" + "".join(f"{loss:9.2f}" for loss in losses))


if __name__ == "__main__":
    main()
