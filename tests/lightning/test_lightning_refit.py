"""A module fitted several times: what a fit leaves behind and what the next one starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning_helpers import (
    BATCHES,
    NAMESPACES,
    QUIET,
    built_in_init,
    halving,
    lightning_of,
    loader,
    module,
    plain_loop,
    same,
    trainer,
    weights,
)
from lightning_on_ranks import OPTIONS, refit
from ranks import Ranks

from mechanic_plugins import demechanize
from mechanic_plugins.lightning import Mechanic, demechanize_checkpoint

pytestmark = QUIET


def after_epoch(scheduler: Any, index: int) -> None:
    if index % BATCHES == 0:
        scheduler.step()


def fit(pl: ModuleType, model: Any, *callbacks: Any, **kwargs: Any) -> Any:
    fitted = trainer(pl, *callbacks, **{"max_epochs": 1, **kwargs})
    fitted.fit(model, loader())
    return fitted


@pytest.mark.parametrize("new_callback", [False, True])
def test_a_module_that_builds_optimizer_and_scheduler_in_init_is_fitted_again(
    pl: ModuleType, new_callback: bool
) -> None:
    """The scheduler used to be left pointing at the wrapper, and Lightning refused the second fit.

    Three fits of one epoch equal one fit of three: Mechanic's state belongs to the optimizer, not to the callback.
    """
    model, callback = built_in_init(pl), Mechanic()
    for _ in range(3):
        callback = Mechanic() if new_callback else callback
        fitted = fit(pl, model, callback)
        fitted.validate(model, loader(), verbose=False)
    plain = plain_loop(schedule=halving, after_step=after_epoch)
    assert same(weights(model), plain.weights)
    assert callback.optimizers[0].tuner.steps.item() == 3 * BATCHES
    assert callback.optimizers[0].scale.item() == plain.optimizer.scale.item()


@pytest.mark.slow
def test_two_ranks_are_fitted_again(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(refit, NAMESPACES[0])
    plain = plain_loop(**OPTIONS, schedule=halving, after_step=after_epoch)
    assert first == second
    assert first["steps"] == 3 * BATCHES
    for found, wanted in zip(first["weights"], plain.weights, strict=True):
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-6)


def test_the_same_trainer_goes_on(pl: ModuleType) -> None:
    model, fitted = built_in_init(pl), trainer(pl, Mechanic(), max_epochs=1)
    for epochs in (1, 2, 3):
        fitted.fit_loop.max_epochs = epochs
        fitted.fit(model, loader())
    assert same(weights(model), plain_loop(schedule=halving, after_step=after_epoch).weights)


def test_the_scheduler_is_given_back_after_fit_and_points_at_the_wrapper_meanwhile(pl: ModuleType) -> None:
    seen = []

    def on_train_batch_end(self: Any, *args: Any) -> None:
        seen.append(self.schedule.optimizer is self.trainer.optimizers[0] is not self.kept)

    model = built_in_init(pl, on_train_batch_end=on_train_batch_end)
    planted = model.kept.step
    fitted = fit(pl, model, Mechanic())
    assert seen == [True] * BATCHES
    assert model.schedule.optimizer is model.kept
    assert model.kept.step is planted
    assert "step" not in vars(fitted.optimizers[0])


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_fit_gives_the_scheduler_back(pl: ModuleType, error: type[BaseException]) -> None:
    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 3:
            raise error("in the middle of it")

    model = built_in_init(pl, on_train_batch_start=on_train_batch_start)
    model.fails = True
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):  # Lightning exits on an interrupt
        fit(pl, model, Mechanic())
    assert model.schedule.optimizer is model.kept
    model.fails, callback = False, Mechanic()
    fit(pl, model, callback)
    assert callback.optimizers[0].tuner.steps.item() == 3 + BATCHES


def test_a_scheduler_that_another_callback_has_replaced_is_given_back_too() -> None:
    """StochasticWeightAveraging removes the module's scheduler from the Trainer."""
    pl = lightning_of("lightning.pytorch")
    averaging = pl.callbacks.StochasticWeightAveraging(5e-3, swa_epoch_start=1)
    model = built_in_init(pl)
    fit(pl, model, Mechanic(), averaging, max_epochs=3)
    assert model.schedule.optimizer is model.kept


def test_a_later_fit_without_mechanic_is_the_bases_own(pl: ModuleType) -> None:
    """It trains at the base's own learning rate, or after demechanize() at the learned one."""
    model, callback = built_in_init(pl), Mechanic()
    fit(pl, model, callback)
    steps = callback.optimizers[0].tuner.steps.item()
    between = weights(model)
    plain = fit(pl, model)
    assert type(plain.optimizers[0]) is torch.optim.AdamW
    assert not same(weights(model), between)
    assert callback.optimizers[0].tuner.steps.item() == steps == BATCHES
    assert int(next(iter(model.kept.state.values()))["step"]) == 2 * BATCHES

    learned = callback.optimizers[0].learned_lr
    assert demechanize(callback.optimizers[0]) is model.kept
    assert model.kept.param_groups[0]["lr"] == learned > 0


def test_an_optimizer_built_anew_is_tuned_anew(pl: ModuleType) -> None:
    model, callback = module(pl), Mechanic()
    for _ in range(2):
        fit(pl, model, callback)
        assert callback.optimizers[0].tuner.steps.item() == BATCHES


def test_a_checkpoint_saved_after_fit_resumes_and_demechanizes(pl: ModuleType, tmp_path: Path) -> None:
    """By then the schedulers belong to the base again, and the scale must still reach their learning rates."""
    model = built_in_init(pl)
    fitted = fit(pl, model, Mechanic())
    scale = fitted.optimizers[0].scale.item()
    fitted.save_checkpoint(tmp_path / "after.ckpt")
    assert model.schedule.optimizer is model.kept
    rest = built_in_init(pl)
    trainer(pl, Mechanic()).fit(rest, loader(), ckpt_path=tmp_path / "after.ckpt")
    assert same(weights(rest), plain_loop(schedule=halving, after_step=after_epoch).weights)

    demechanize_checkpoint(tmp_path / "after.ckpt", tmp_path / "plain.ckpt")
    states = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("after", "plain")]
    (before,), (after,) = (state["lr_schedulers"][0]["base_lrs"] for state in states)
    assert after == before * scale
