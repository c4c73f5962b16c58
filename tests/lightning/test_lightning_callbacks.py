"""The callback among others: what it logs, which others it works with, and what it refuses before training starts."""

from __future__ import annotations

import csv
import functools
import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning_helpers import (
    BATCHES,
    QUIET,
    adamw,
    lightning_of,
    loader,
    module,
    net,
    plain_loop,
    same,
    trainer,
    weights,
)
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lightning import Mechanic
from mechanic_plugins.lightning.checks import warn_of_floors
from mechanic_plugins.lightning.reports import metrics
from mechanic_plugins.options import DEFAULTS, Options, parameters

pytestmark = QUIET


def rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as lines:
        return list(csv.DictReader(lines))


def in_groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 0.3, "name": "body"}, {"params": model[2].parameters()}]


# -------------------------------------------------------------------- logging


def test_the_effective_lr_is_logged_with_the_lr_of_the_step_that_was_made(pl: ModuleType, tmp_path: Path) -> None:
    """The scheduler has already run by then, so scale times the group's lr would be the next step's."""

    def optimizers(model: nn.Module) -> Any:
        optimizer = adamw(model)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logger = pl.loggers.CSVLogger(tmp_path)
    fitted = trainer(pl, Mechanic(), logger=logger, log_every_n_steps=1)
    fitted.fit(module(pl, optimizers), loader())
    *logged, end = rows(tmp_path)
    assert len(logged) == 3 * BATCHES, "one row a step, the loss's own"
    assert all(row["loss"] for row in logged)
    assert float(end["mechanic/peak_lr"]) == fitted.optimizers[0].learned_lr > 0
    for step, row in enumerate(logged):
        scale = float(row["mechanic/scale"])
        assert float(row["mechanic/effective_lr"]) == pytest.approx(scale * 1e-2 * 0.5**step, rel=1e-6)
    assert float(logged[-1]["mechanic/scale"]) != float(logged[5]["mechanic/scale"]) > 0
    assert fitted.callback_metrics["mechanic/scale"].item() == pytest.approx(float(logged[-1]["mechanic/scale"]))


def test_several_optimizers_and_groups_are_named_apart(pl: ModuleType) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
            optimizer.step()

    def optimizers(model: nn.Module) -> Any:
        return [adamw(model), torch.optim.SGD(in_groups(model), lr=0.1)]

    model, callback = module(pl, optimizers, training_step=training_step), Mechanic(scope="group")
    model.automatic_optimization = False
    fitted = trainer(pl, callback)
    fitted.fit(model, loader())
    logged = {name: value.item() for name, value in fitted.callback_metrics.items()}
    first, second = callback.optimizers
    body, head = second.effective_lrs
    assert logged == pytest.approx(
        {
            "mechanic/scale": first.scale.item(),
            "mechanic/effective_lr": first.effective_lrs[0],
            "mechanic/scale-1": second.scale.item(),
            "mechanic/effective_lr-1": max(body, head),
            "mechanic/scale-1/body": second.scales[0].item(),
            "mechanic/scale-1/pg2": second.scales[1].item(),
            "mechanic/effective_lr-1/body": body,
            "mechanic/effective_lr-1/pg2": head,
        }
    )
    assert body != head


def test_metrics_are_tensors_without_a_synchronisation() -> None:
    optimizer = mechanize(
        torch.optim.SGD(in_groups(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))), lr=1.0)
    )
    logged = metrics([optimizer])
    assert set(logged) == {
        "mechanic/scale",
        "mechanic/effective_lr",
        "mechanic/effective_lr/body",
        "mechanic/effective_lr/pg2",
    }
    assert all(value.shape == () and not value.requires_grad for value in logged.values())


def test_logging_can_be_left_out() -> None:
    pl = lightning_of("lightning.pytorch")
    fitted = trainer(pl, Mechanic(log=False))
    fitted.fit(module(pl), loader())
    assert set(fitted.callback_metrics) == {"loss"}


def test_barebones_trains_and_logs_nothing() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().mean()

    pl = lightning_of("lightning.pytorch")
    model = module(pl, training_step=training_step)
    fitted = pl.Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=3, callbacks=[Mechanic()])
    fitted.fit(model, loader())
    assert same(weights(model), plain_loop().weights)


# -------------------------------------------------------------------- other callbacks


def test_learning_rate_monitor_lists_each_optimizer_once(pl: ModuleType, tmp_path: Path) -> None:
    """It used to list base and wrapper as two optimizers if a scheduler still held the base."""

    def optimizers(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(in_groups(model), lr=0.1)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    monitor = pl.callbacks.LearningRateMonitor()
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer(pl, Mechanic(), monitor, logger=logger).fit(module(pl, optimizers), loader())
    assert monitor.lrs == {
        "lr-MechanicSGD/body": [0.3, 0.15, 0.075],
        "lr-MechanicSGD/pg2": [0.1, 0.05, 0.025],
    }


@pytest.mark.parametrize(("name", "logged"), [(None, "lr-MechanicSGD"), ("rate", "rate")])
def test_what_watches_the_bases_own_learning_rate_finds_it_under_this_name(
    name: str | None, logged: str, tmp_path: Path
) -> None:
    """For monitor="lr-SGD" the README advises the new name, or a fixed one in the scheduler's config."""

    def optimizers(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "name": name},
        }

    pl = lightning_of("lightning.pytorch")
    stopping = pl.callbacks.EarlyStopping(logged, stopping_threshold=0.06, check_on_train_epoch_end=True)
    best = pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor=logged)
    watching = [pl.callbacks.LearningRateMonitor(), stopping, best]
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    trainer(pl, Mechanic(), *watching, logger=logger, enable_checkpointing=True).fit(module(pl, optimizers), loader())
    assert (stopping.stopped_epoch, best.best_model_score.item()) == (1, pytest.approx(0.05))


def test_early_stopping_and_checkpoints_can_watch_the_scale(tmp_path: Path) -> None:
    pl = lightning_of("lightning.pytorch")
    stopping = pl.callbacks.EarlyStopping(
        "mechanic/scale", stopping_threshold=0.0, mode="max", check_on_train_epoch_end=True
    )
    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="mechanic/effective_lr", mode="max")
    trainer(pl, Mechanic(), stopping, best, enable_checkpointing=True).fit(module(pl), loader())
    assert stopping.stopped_epoch == 0
    assert best.best_model_score.item() > 0


def finetuning(pl: ModuleType) -> Any:
    class Unfreeze(pl.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=5e-3)
            elif epoch > 1:  # after a resume, which restores the groups but not `requires_grad`
                self.make_trainable(pl_module.net[0])

    return Unfreeze()


def head_only(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("mechanic_first", [True, False])
def test_finetuning_adds_a_group_half_way_and_resumes(mechanic_first: bool, tmp_path: Path) -> None:
    pl = lightning_of("lightning.pytorch")

    def fit(model: Any, saved: Path | None = None, **kwargs: Any) -> Mechanic:
        mechanic = Mechanic()
        callbacks = [mechanic, finetuning(pl)] if mechanic_first else [finetuning(pl), mechanic]
        fitted = trainer(pl, *callbacks, **kwargs)
        fitted.fit(model, loader(), ckpt_path=saved)
        fitted.save_checkpoint(tmp_path / "last.ckpt")
        return mechanic

    whole, half, rest = (module(pl, head_only) for _ in range(3))
    expected = fit(whole, max_epochs=4)
    fit(half, max_epochs=2)
    resumed = fit(rest, tmp_path / "last.ckpt", max_epochs=4)
    assert [len(group["params"]) for group in expected.optimizers[0].param_groups] == [2, 2]
    assert not same(weights(whole)[:2], plain_loop(epochs=0).weights[:2]), "the added group never moved"
    assert same(weights(whole), weights(rest))
    assert expected.optimizers[0].scale.item() == resumed.optimizers[0].scale.item() > 0


def test_weight_averaging_leaves_the_training_alone(pl: ModuleType) -> None:
    """It swaps in the averaged weights for validation and back; only the final weights are the average."""
    if not hasattr(pl.callbacks, "WeightAveraging"):
        pytest.skip("Lightning 2.6 has it")
    states = []

    class Average(pl.callbacks.WeightAveraging):  # type: ignore[name-defined, misc]
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            states.append(weights(pl_module))
            super().on_train_end(trainer, pl_module)

    model = module(pl)
    trainer(pl, Mechanic(), Average()).fit(model, loader(), loader())
    assert same(states[0], plain_loop().weights)
    assert not same(weights(model), states[0])


def test_stochastic_weight_averaging_swaps_its_scheduler_in() -> None:
    """Its lr is the base's, like every lr, and is multiplied by the scale."""
    pl = lightning_of("lightning.pytorch")
    callback, averaging = (
        Mechanic(),
        pl.callbacks.StochasticWeightAveraging(5e-3, swa_epoch_start=2, annealing_epochs=1),
    )
    model = module(pl)
    trainer(pl, callback, averaging, max_epochs=6).fit(model, loader())
    (optimizer,) = callback.optimizers
    assert optimizer.tuner.steps.item() == 6 * BATCHES
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    assert all(p.isfinite().all() for p in weights(model))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_an_optimizer_that_another_callback_puts_there_later_is_mechanized_too(hook: str) -> None:
    pl = lightning_of("lightning.pytorch")
    made: list[Optimizer] = []

    def rebuild(self: Any, trainer: Any, pl_module: Any) -> None:
        if not made:
            made.append(adamw(pl_module.net))
            trainer.strategy.optimizers = list(made)

    model, callback = module(pl, lambda model: torch.optim.SGD(model.parameters())), Mechanic()
    trainer(pl, callback, type("Rebuild", (pl.Callback,), {hook: rebuild})()).fit(model, loader())
    assert callback.optimizers[0].base is made[0]
    assert same(weights(model), plain_loop().weights)


# -------------------------------------------------------------------- the command line


def test_lightning_cli_by_class_path(pl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: mechanic_plugins.lightning.Mechanic
      init_args:
        rule: paper
        scope: group
        max_scale: 10.0
        prog_bar: true
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 uses old names
    cli_module = lightning_of(f"{pl.__name__}.cli")

    class Module(type(module(pl))):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader()

    cli = cli_module.LightningCLI(
        Module, args=["fit", "--config", str(config)], save_config_callback=None, seed_everything_default=False
    )
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, Mechanic))
    settings = callback.optimizers[0].settings
    assert (settings.rule, settings.scope, settings.max_scale) == ("paper", "group", 10.0)
    assert cli.trainer.progress_bar_metrics.keys() >= {"mechanic_lr"}


def test_it_takes_every_keyword_of_mechanize_with_its_default() -> None:
    ours = inspect.signature(Mechanic, eval_str=True).parameters
    expected = {p.name: (p.default, p.annotation) for p in parameters()}
    assert {name: (p.default, p.annotation) for name, p in ours.items() if name not in ("log", "prog_bar")} == expected


def test_every_option_is_documented() -> None:
    for documented, names in ((mechanize, {"optimizer", *DEFAULTS}), (Mechanic, {*DEFAULTS, "log", "prog_bar"})):
        section = str(inspect.getdoc(documented)).partition("Args:\n")[2].partition("\n\n")[0]
        assert set(re.findall(r"^    (\w+): ", section, flags=re.MULTILINE)) == names


def test_every_option_reaches_the_optimizer() -> None:
    """Tests each option with a value other than its default; new options must be added here."""
    other: dict[str, Any] = {"scope": "group", "max_scale": 3.0, "sync_replicas": True, "backend": "foreach"}
    other |= {"max_grad_norm": 2.0, "kept_dtype": torch.bfloat16, "group": None, "settings": None}
    paper: dict[str, Any] = {"rule": "paper", "s_init": 1e-3, "s_decay": 0.1, "tuner_betas": [0.9], "tuner_eps": 1e-6}
    assert Mechanic(**other).options == {**other, **dict.fromkeys(paper)}
    assert {**Mechanic(**paper).options, **paper} == Mechanic(**paper).options  # no bfloat16 delta with these
    assert {*other, *paper} == Options.__annotations__.keys()


# -------------------------------------------------------------------- refusals


def test_it_is_a_callback_of_both_lightnings(pl: ModuleType) -> None:
    assert isinstance(Mechanic(), pl.Callback)
    assert pl.Trainer(accelerator="cpu", callbacks=Mechanic(), logger=False, barebones=False).callbacks


def test_bad_values_are_refused_when_the_callback_is_built() -> None:
    with pytest.raises(ValueError, match="max_scale must be a finite number > 0, got 0"):
        Mechanic(max_scale=0.0)
    with pytest.raises(ValueError, match="rule cannot be combined with settings="):
        Mechanic(settings=Settings(), rule="paper")


def test_mechanic_twice(pl: ModuleType) -> None:
    with pytest.raises(ValueError, match="more than one Mechanic callback: keep one"):
        trainer(pl, Mechanic(), Mechanic()).fit(module(pl), loader())


def test_the_class_instead_of_a_callback(pl: ModuleType) -> None:
    """The message used to be `Mechanic.setup() missing 1 required positional argument`."""
    with pytest.raises(TypeError, match=r"holds the class instead of a callback: write Mechanic\(\)"):
        trainer(pl, Mechanic).fit(module(pl), loader())


def test_a_learning_rate_finder(pl: ModuleType) -> None:
    with pytest.raises(ValueError, match="LearningRateFinder cannot be combined with Mechanic"):
        trainer(pl, Mechanic(), pl.callbacks.LearningRateFinder()).fit(module(pl), loader())
    with pytest.raises(ValueError, match=r"Tuner\.lr_find"):
        pl.tuner.Tuner(trainer(pl, Mechanic())).lr_find(module(pl), loader())


def test_a_batch_size_finder_is_told_about(tmp_path: Path) -> None:
    pl = lightning_of("lightning.pytorch")
    model = module(pl, train_dataloader=lambda self: loader(self.batch_size), val_dataloader=lambda self: loader())
    model.batch_size = 2
    finder = pl.callbacks.BatchSizeFinder(max_trials=1, steps_per_trial=1)
    with pytest.warns(UserWarning, match="without Mechanic"):
        trainer(pl, finder, Mechanic(), max_epochs=1, default_root_dir=tmp_path).fit(model)


def test_an_optimizer_that_is_mechanized_already_is_left_as_it_is(pl: ModuleType) -> None:
    model, callback = module(pl, lambda model: mechanize(adamw(model), max_scale=0.5)), Mechanic(max_scale=0.1)
    with pytest.warns(UserWarning, match="the Mechanic callback's options are ignored") as warned:
        trainer(pl, callback).fit(model, loader())
    assert sum("options are ignored" in str(w.message) for w in warned) == 1, "said once, not in every step"
    assert same(weights(model), plain_loop(max_scale=0.5).weights)
    assert callback.optimizers[0].settings.max_scale == 0.5


def test_a_callback_without_settings_logs_what_is_mechanized_already(pl: ModuleType) -> None:
    """Under LightningCLI the optimizer has its own settings, and the callback is only for the logs."""
    model, callback = module(pl, lambda model: mechanize(adamw(model), max_scale=0.5)), Mechanic()
    fitted = trainer(pl, callback)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fitted.fit(model, loader())
    assert not [w for w in warned if "options are ignored" in str(w.message)]
    assert fitted.callback_metrics["mechanic/scale"] == callback.optimizers[0].scale > 0


def test_an_optimizer_that_cannot_be_mechanized() -> None:
    pl = lightning_of("lightning.pytorch")
    model = module(pl, lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="LBFGS cannot be mechanized"):
        trainer(pl, Mechanic()).fit(model, loader())
    assert same(weights(model), plain_loop(epochs=0).weights)


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=1e-3)


def cosine(optimizer: Optimizer, eta_min: float = 1e-4) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=eta_min)


def restarts(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, eta_min=1e-2)


def sequential(optimizer: Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine(optimizer)], milestones=[4])


@pytest.mark.parametrize(
    ("schedule", "named", "share"),
    [
        (cosine, "CosineAnnealingLR(eta_min=0.0001)", 0.01),
        (plateau, "ReduceLROnPlateau(min_lr=0.001)", 0.1),
        (restarts, "CosineAnnealingWarmRestarts(eta_min=0.01)", 1),
        (sequential, "CosineAnnealingLR(eta_min=0.0001)", 0.01),
    ],
)
def test_a_schedule_with_an_absolute_floor_is_told_about_once(schedule: Any, named: str, share: float) -> None:
    """With it, "any lr gives the same training" does not hold, as the floor is a given share of only one lr."""

    def optimizers(model: nn.Module) -> Any:
        optimizer = adamw(model)
        config = {"scheduler": schedule(optimizer), "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    pl = lightning_of("lightning.pytorch")
    with pytest.warns(UserWarning, match="is an absolute learning rate") as warned:
        trainer(pl, Mechanic()).fit(module(pl, optimizers), loader())
    (said,) = [text for text in map(str, (w.message for w in warned)) if "absolute" in text]
    assert said.startswith(f"{named} is")
    assert f"lr=0.01, so the floor is {share} times the peak" in said


@pytest.mark.parametrize(
    "schedule",
    [
        functools.partial(cosine, eta_min=0.0),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer),
    ],
    ids=["cosine", "plateau", "one cycle", "cyclic", "polynomial"],
)
def test_schedules_without_a_floor_are_not_warned_of(schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_floors([schedule(adamw(net()))])


def test_untested_strategies(pl: ModuleType) -> None:
    single = pl.strategies.SingleDeviceStrategy
    xla = type("SingleDeviceXLAStrategy", (single,), {})
    with pytest.raises(ValueError, match="untested on XLA"):
        trainer(pl, Mechanic(), strategy=xla("cpu")).fit(module(pl), loader())

    class Own(pl.strategies.Strategy):  # type: ignore[name-defined, misc]
        """Has everything of SingleDeviceStrategy without being a subclass."""

    for name, value in vars(single).items():
        if name not in ("__init__", "__dict__", "__weakref__"):
            setattr(Own, name, value)
    Own.__abstractmethods__ = frozenset()
    strategy = Own()
    strategy._root_device = torch.device("cpu")
    strategy.global_rank, strategy.local_rank, strategy.world_size = 0, 0, 1
    with pytest.warns(UserWarning, match="untested with Own"):
        trainer(pl, Mechanic(), strategy=strategy, max_epochs=1).fit(module(pl), loader())


def test_no_lightning_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user must get this message, whatever the plugin imports first."""
    for name in [name for name in sys.modules if name.startswith("mechanic_plugins.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "lightning_utilities", "pytorch_lightning"):
        for part in [part for part in sys.modules if part.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, part)
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mechanic-plugins\[lightning\]'"):
        importlib.import_module("mechanic_plugins.lightning")
