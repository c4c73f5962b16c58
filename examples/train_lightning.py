"""Lightning with Mechanic: scikit-learn's digits, no learning rate to choose.

    python examples/train_lightning.py
    tensorboard --logdir digits_logs          # mechanic/scale and mechanic/effective_lr beside the loss

Mechanic is the one callback; the rest of the script is the same without it. Afterwards `digits_lr.png` shows the
learned learning rate. Needs: pip install '.[lightning,demo]' tensorboard
"""

import argparse
import csv
from pathlib import Path

import lightning as L
import matplotlib
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mechanic_plugins.lightning import Mechanic

matplotlib.use("Agg")  # to a file, without a window


class Digits(L.LightningDataModule):
    """1500 images to train on, 297 to test on."""

    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        self.train, self.test = (TensorDataset(x[i], y[i]) for i in (order[:1500], order[1500:]))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.test, batch_size=len(self.test))


class Classifier(L.LightningModule):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())  # the lr does not matter: Mechanic scales it
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plot(metrics: Path, picture: Path):
    """Plots the learned learning rate and the loss over the steps."""
    from matplotlib import pyplot as plt

    with metrics.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["mechanic/effective_lr"]]
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    steps = [int(row["step"]) for row in rows]
    above.semilogy(
        steps, [float(row["mechanic/effective_lr"]) or None for row in rows], color="crimson", label="scale * lr"
    )
    above.set(ylabel="learning rate in force", title="Mechanic on digits")
    above.legend()
    below.semilogy(steps, [float(row["loss"]) for row in rows], color="0.3")
    below.set(xlabel="step", ylabel="training loss")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Lightning with Mechanic on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path(), help="where logs and picture go")
    args = parser.parse_args(argv)

    L.seed_everything(0)
    logs = args.folder / "digits_logs"
    table = CSVLogger(logs, name="table")
    trainer = L.Trainer(
        max_epochs=args.epochs,
        callbacks=[Mechanic(prog_bar=True)],
        logger=[TensorBoardLogger(logs, name="tensorboard"), table],
        log_every_n_steps=1,
        accelerator="auto",
        devices=1,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=Digits(args.batch_size))

    plot(Path(table.log_dir) / "metrics.csv", args.folder / "digits_lr.png")
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    learned = trainer.callbacks[0].optimizers[0].learned_lr
    print(f"accuracy {metrics['accuracy']:.3f}, learned learning rate {learned:.2g}")
    print(f"logs in {logs}, picture in {args.folder / 'digits_lr.png'}")
    return metrics


if __name__ == "__main__":
    main()
