"""A plain PyTorch loop with Mechanic: scikit-learn's digits, warm-up and cosine, clipping, checkpoints.

    python examples/train_plain.py                      # no learning rate to choose
    python examples/train_plain.py --resume digits.pt   # resume from the last saved epoch

Mechanic is the one line with `mechanize` in it; the rest of the loop is the same without it.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from mechanic_plugins import mechanize

try:
    from tqdm import trange
except ImportError:

    def trange(first, last, **_):
        return range(first, last)


def load_data():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return (x[train], y[train]), (x[test], y[test])


def batches(x, y, *, size, epoch):
    """Batches in an order that depends on the epoch alone, so that a resumed run sees the same ones."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
    return [(x[i], y[i]) for i in order.split(size)]


def train_epoch(model, optimizer, scheduler, data, *, clip):
    total = 0.0
    for x, y in data:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        total += loss.item()
    return total / len(data)


@torch.no_grad()
def accuracy(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item()


def save(path, epoch, parts):
    """Writes to another file, then renames: a run killed in between keeps its last checkpoint."""
    beside = path.with_suffix(".tmp")
    torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}, beside)
    beside.replace(path)


def load(path, parts):
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def main():
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits without choosing a learning rate.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0, help="the gradient's largest norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="saved after every epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    training, test = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    steps = args.epochs * -(-len(training[1]) // args.batch_size)
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01))

    warmup = max(1, steps // 20)
    scheduler = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=warmup), CosineAnnealingLR(optimizer, steps - warmup)],
        milestones=[warmup],
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = load(args.resume, parts) if args.resume else 0

    progress = trange(first, args.epochs, initial=first, total=args.epochs, unit="epoch")
    for epoch in progress:
        data = batches(*training, size=args.batch_size, epoch=epoch)
        loss = train_epoch(model, optimizer, scheduler, data, clip=args.clip)
        save(args.checkpoint, epoch + 1, parts)
        if hasattr(progress, "set_postfix"):
            progress.set_postfix(loss=f"{loss:.3f}", lr=f"{optimizer.effective_lrs[0]:.1e}")

    print(f"test accuracy {accuracy(model, *test):.3f}, learned learning rate {optimizer.learned_lr:.2g}")


if __name__ == "__main__":
    main()
