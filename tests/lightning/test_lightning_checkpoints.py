"""Stopping and resuming, with Mechanic throughout, only before the checkpoint or only after it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning_helpers import BATCHES, QUIET, adamw, lightning_of, loader, module, same, trainer, weights
from torch import nn
from torch.optim import lr_scheduler

from mechanic_plugins.lightning import Mechanic, demechanize_checkpoint

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:CosineAnnealingLR.eta_min=0.001. is an absolute")]


def by_step(model: nn.Module) -> Any:
    optimizer = adamw(model)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=1e-3)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(pl: ModuleType, epochs: int, *, mechanic: bool = True, save: Path | None = None, **kwargs: Any) -> Any:
    """Returns module and trainer after `epochs`, continued from `ckpt_path` and saved to `save` if given."""
    model, callback = module(pl, kwargs.pop("optimizers", by_step)), Mechanic()
    ckpt_path = kwargs.pop("ckpt_path", None)
    fitted = trainer(pl, *([callback] if mechanic else []), max_epochs=epochs, **kwargs)
    fitted.fit(model, loader(), ckpt_path=ckpt_path)
    if save:
        fitted.save_checkpoint(save)
    return model, fitted


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_is_exact(pl: ModuleType, precision: str, tmp_path: Path) -> None:
    whole, uninterrupted = fit(pl, 4, precision=precision)
    fit(pl, 2, precision=precision, save=tmp_path / "half.ckpt")
    rest, resumed = fit(pl, 4, precision=precision, ckpt_path=tmp_path / "half.ckpt")
    assert same(weights(whole), weights(rest))
    expected, found = uninterrupted.optimizers[0], resumed.optimizers[0]
    assert all(torch.equal(a, b) for a, b in zip(expected.tuner, found.tuner, strict=True))
    assert found.tuner.steps.item() == 4 * BATCHES
    assert found.scale.item() > 0


def test_the_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    fit(lightning_of("lightning.pytorch"), 1, save=tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert json.loads(saved["optimizer_states"][0]["param_groups"][0]["mechanic_tuner"])["tuner"]["steps"] == BATCHES
    assert not saved["callbacks"], "the state is the optimizer's, not the callback's"


def test_mechanic_joins_a_run_that_began_without_it(pl: ModuleType, tmp_path: Path) -> None:
    """The moments are kept, and the scale is learned starting from the loaded weights."""
    half, _ = fit(pl, 2, mechanic=False, save=tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="saved without Mechanic: the base's moments are kept"):
        rest, resumed = fit(pl, 4, ckpt_path=tmp_path / "plain.ckpt")
    (optimizer,) = resumed.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {4 * BATCHES}
    assert optimizer.tuner.steps.item() == 2 * BATCHES
    assert optimizer.scale.item() > 0
    assert not same(weights(half), weights(rest))


def test_a_run_goes_on_without_mechanic_at_the_learned_learning_rate(pl: ModuleType, tmp_path: Path) -> None:
    """Without the callback the scale would be lost, so demechanize_checkpoint() puts it into the learning rates."""
    half, trained = fit(pl, 2, save=tmp_path / "mechanic.ckpt")
    scale = trained.optimizers[0].scale.item()
    demechanize_checkpoint(tmp_path / "mechanic.ckpt", tmp_path / "plain.ckpt")
    rest, resumed = fit(pl, 4, mechanic=False, ckpt_path=tmp_path / "plain.ckpt")
    (optimizer,) = resumed.optimizers
    assert type(optimizer) is torch.optim.AdamW
    assert {int(state["step"]) for state in optimizer.state.values()} == {4 * BATCHES}
    assert not any(str(key).startswith("mechanic") for group in optimizer.param_groups for key in group)
    assert not any(str(key).startswith("mechanic") for state in optimizer.state.values() for key in state)

    plain = module(pl, by_step)
    undisturbed = by_step(plain.net)["lr_scheduler"]["scheduler"]
    for _ in range(4 * BATCHES):
        undisturbed.optimizer.step()
        undisturbed.step()
    expected = undisturbed.optimizer.param_groups[0]["lr"] * scale
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), "the schedule goes on, scaled"
    assert not same(weights(half), weights(rest))


def test_loading_a_mechanic_checkpoint_without_mechanic_loses_nothing(tmp_path: Path) -> None:
    """This is not recommended, as the learning rate is the unscaled one, but weights and moments are intact."""
    pl = lightning_of("lightning.pytorch")
    half, trained = fit(pl, 2, save=tmp_path / "mechanic.ckpt")
    moments = [state["exp_avg_sq"].clone() for state in trained.optimizers[0].state.values()]
    again, resumed = fit(pl, 2, mechanic=False, ckpt_path=tmp_path / "mechanic.ckpt")
    assert same(weights(again), weights(half))
    assert same([state["exp_avg_sq"] for state in resumed.optimizers[0].state.values()], moments)


def test_only_a_checkpoint_with_mechanic_can_be_demechanized(tmp_path: Path) -> None:
    fit(lightning_of("lightning.pytorch"), 1, mechanic=False, save=tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="holds no learned scale"):
        demechanize_checkpoint(tmp_path / "plain.ckpt", tmp_path / "out.ckpt")


def two_groups(model: nn.Module) -> Any:
    """The second group stays frozen."""
    first, *rest = model.parameters()
    for p in rest:
        p.requires_grad_(False)
    return torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.1)


def test_a_frozen_group_takes_the_scale_of_the_others(tmp_path: Path) -> None:
    """With scope="group" its own scale stays 0, and the checkpoint was reported to hold none."""
    pl = lightning_of("lightning.pytorch")
    model = module(pl, two_groups)
    fitted = trainer(pl, Mechanic(scope="group"), max_epochs=2)
    fitted.fit(model, loader())
    fitted.save_checkpoint(tmp_path / "mechanic.ckpt")
    scales = fitted.optimizers[0].scales.tolist()
    assert scales[0] > 0 == scales[1]
    demechanize_checkpoint(tmp_path / "mechanic.ckpt", tmp_path / "plain.ckpt")
    saved = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    lrs = [group["lr"] for group in saved["optimizer_states"][0]["param_groups"]]
    assert lrs == [0.1 * scales[0], 0.5 * scales[0]]
