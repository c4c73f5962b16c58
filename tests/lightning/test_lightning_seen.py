"""The learned lr is where users look: the progress bar, TensorBoard, and the dict of loggers such as W&B's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import wandb_log
from lightning_helpers import QUIET, lightning_of, loader, module

from mechanic_plugins import mechanize
from mechanic_plugins.lightning import Mechanic
from mechanic_plugins.plot import draw, find_log, read

pytestmark = QUIET
LR = "mechanic/effective_lr"


def fitted(logger: Any, *, bar: Any = None) -> Any:
    pl = lightning_of("lightning.pytorch")
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        logger=logger,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Mechanic(prog_bar=bar is not None), *([bar] if bar else [])],
        enable_progress_bar=bar is not None,
    )
    trainer.fit(module(pl), loader())
    return trainer


@pytest.mark.parametrize("name", ["TQDMProgressBar", "RichProgressBar"])
def test_the_progress_bar(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It used to show `mechanic/effecti... 0.000`: the name was cut, and Rich's three decimals are too few."""
    bar = getattr(lightning_of("lightning.pytorch").callbacks, name)()
    trainer = fitted(False, bar=bar)
    lr = float(trainer.callback_metrics[LR])
    assert lr > 0
    printed = capsys.readouterr()
    said = (printed.out + printed.err).replace("mechanic_lr: ", "mechanic_lr=").replace("e+", "e")
    assert f"mechanic_lr={lr:.3g}" in "".join(said.split())
    assert "get_metrics" not in vars(bar)


def test_a_logger_that_takes_dicts() -> None:
    pl = lightning_of("lightning.pytorch")

    class LikeWandb(pl.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            seen.append(metrics)

        def log_hyperparams(self, params: dict[str, Any], *args: Any) -> None:
            config.append(params)

    seen: list[dict[str, float]] = []
    config: list[dict[str, Any]] = []
    trainer = fitted(LikeWandb())
    lrs = [metrics[LR] for metrics in seen if LR in metrics]
    assert lrs[-1] == pytest.approx(float(trainer.callback_metrics[LR]))
    assert all(isinstance(lr, float) for lr in lrs)
    assert seen[-1] == {"mechanic/peak_lr": trainer.optimizers[0].learned_lr}
    assert config == [{"mechanic/rule": "relative"}]


def test_the_rule_that_trains_is_among_the_hyper_parameters(tmp_path: Path) -> None:
    """It is the optimizer's own where the module has mechanized it, and the module's parameters stay beside it."""
    pl = lightning_of("lightning.pytorch")
    logger = pl.loggers.CSVLogger(tmp_path)
    model = module(pl, lambda model: mechanize(torch.optim.AdamW(model.parameters()), rule="optax"))
    model.save_hyperparameters({"width": 3})
    pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[Mechanic()],
    ).fit(model, loader())
    written = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert written.splitlines() == ["mechanic/rule: optax", "width: 3"]


@pytest.mark.filterwarnings("default")  # for W&B's own
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = lightning_of("lightning.pytorch").loggers.WandbLogger(offline=True, save_dir=tmp_path)
    fitted(logger)
    logger.experiment.finish()
    assert all(wandb_log.count(tmp_path, [f"mechanic/{n}" for n in ("peak_lr", "effective_lr", "scale", "rule")]))


@pytest.mark.parametrize("name", ["TensorBoardLogger", "CSVLogger"])
def test_logs_on_disk_and_their_picture(tmp_path: Path, name: str) -> None:
    pl = lightning_of("lightning.pytorch")
    trainer = fitted(getattr(pl.loggers, name)(tmp_path))
    series = read(find_log(tmp_path))
    assert series[LR][-1][1] == pytest.approx(float(trainer.callback_metrics[LR]))
    lr, loss = draw(series, title=name).axes
    assert len(lr.get_lines()[0].get_ydata()) == len(series[LR]) > 5
    assert [line.get_label() for line in loss.get_lines()] == ["loss"]
