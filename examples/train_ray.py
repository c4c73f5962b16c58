"""Ray Train: a loop of your own on two workers, with Mechanic, checkpoints and restore.

    python examples/train_ray.py                 # run it again to resume from the last checkpoint
    python examples/train_ray.py --epochs 20 --storage /shared/runs --name digits

Mechanic is the one line with `mechanize` in it. The workers are DDP replicas: they see equal gradients and so learn
the same scale. On several machines, `--storage` must be on a disk that all of them share.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic_plugins import mechanize


def load_data():
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def batches(epoch, size):
    """This worker's batches. The shuffle depends on the epoch alone, so that a resumed run sees the same batches."""
    x, y = load_data()
    context = train.get_context()
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
    for rows in order[: 1500 // size * size].split(size):
        mine = rows.chunk(context.get_world_size())[context.get_world_rank()]
        yield x[mine].to(get_device()), y[mine].to(get_device())


@torch.no_grad()
def accuracy(model):
    x, y = (part[1500:].to(get_device()) for part in load_data())
    return (model(x).argmax(1) == y).float().mean().item()


def report(metrics, state):
    """Reports metrics. Only rank 0 saves, since model and optimizer are the same on all workers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        train.report(metrics, checkpoint=checkpoint)


def train_worker(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), weight_decay=0.01))
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True, map_location=get_device())
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, config["epochs"]):
        for x, y in batches(epoch, config["batch_size"]):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch + 1, "accuracy": accuracy(model), **optimizer.metrics()}
        report(metrics, {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


def main():
    parser = argparse.ArgumentParser(description="Digits on two Ray workers, without choosing a learning rate.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=50, help="of all workers together")
    parser.add_argument("--storage", type=Path, default=Path("ray_results"))
    parser.add_argument("--name", default="digits")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"epochs": args.epochs, "batch_size": args.batch_size},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=args.name, storage_path=str(args.storage.resolve()), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )
    metrics = trainer.fit().metrics or {}
    print(", ".join(f"{name} {value}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
