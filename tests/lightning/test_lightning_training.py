"""A Trainer with the callback equals a plain loop with `mechanize` bit for bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import (
    BATCHES,
    QUIET,
    adamw,
    batches,
    lightning_of,
    loader,
    module,
    net,
    plain_loop,
    same,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lightning import Mechanic

pytestmark = QUIET


def test_one_line_changes_nothing_but_the_optimizer(pl: ModuleType) -> None:
    model, callback = module(pl), Mechanic()
    trainer(pl, callback).fit(model, loader())
    plain = plain_loop()
    assert same(weights(model), plain.weights)
    assert callback.optimizers[0].scale.item() == plain.optimizer.scale.item() > 0
    assert callback.optimizers[0].tuner.steps.item() == 3 * BATCHES


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "optax", "max_scale": 0.5},
        {"scope": "group", "max_grad_norm": 0.1},
        {"settings": Settings(rule="paper", s_init=1e-2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_keyword_reaches_mechanize(options: Any) -> None:
    pl = lightning_of("lightning.pytorch")
    model, callback = module(pl), Mechanic(**options)
    trainer(pl, callback).fit(model, loader())
    plain = plain_loop(**options)
    assert callback.optimizers[0].settings == plain.optimizer.settings
    assert same(weights(model), plain.weights)


@dataclass(frozen=True)
class Form:
    """A form of configure_optimizers' return value, and the schedule it stands for."""

    name: str
    returned: Callable[[nn.Module], Any]
    schedule: Callable[[Optimizer], Any] | None = None
    every: int = 0
    """Batches between steps of the scheduler."""


def cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=3 * BATCHES + 1)


def sequential(optimizer: Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine(optimizer)], milestones=[4])


def scheduled(model: nn.Module, schedule: Callable[[Optimizer], Any], **config: Any) -> Any:
    optimizer = adamw(model)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **config}}


def in_lists(model: nn.Module) -> Any:
    optimizer = adamw(model)
    return [optimizer], [cosine(optimizer)]


def two_groups(model: nn.Module) -> Optimizer:
    first, second = model[0], model[2]  # type: ignore[index]
    return torch.optim.SGD([{"params": first.parameters(), "lr": 0.3}, {"params": second.parameters()}], lr=0.1)


FORMS = [
    Form("optimizer", adamw),
    Form("list", lambda model: [adamw(model)]),
    Form("dict", lambda model: {"optimizer": adamw(model)}),
    Form("list of dicts", lambda model: [{"optimizer": adamw(model)}]),
    Form("lists, by epoch", in_lists, cosine, every=BATCHES),
    Form("by step", lambda model: scheduled(model, cosine, interval="step"), cosine, every=1),
    Form("frequency", lambda model: scheduled(model, cosine, interval="step", frequency=2), cosine, every=2),
    Form("one cycle", lambda model: scheduled(model, one_cycle, interval="step"), one_cycle, every=1),
    Form("sequential", lambda model: scheduled(model, sequential, interval="step"), sequential, every=1),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_whatever_configure_optimizers_returns(form: Form) -> None:
    def follow(scheduler: Any, index: int) -> None:
        if form.every and index % form.every == 0:
            scheduler.step()

    pl = lightning_of("lightning.pytorch")
    model = module(pl, form.returned)
    trainer(pl, Mechanic()).fit(model, loader())
    assert same(weights(model), plain_loop(schedule=form.schedule, after_step=follow).weights)


def test_reduce_on_plateau_with_a_monitor() -> None:
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)

    def optimizers(model: nn.Module) -> Any:
        optimizer = adamw(model)
        return {"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "loss_epoch"}

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        return loss

    pl = lightning_of("lightning.pytorch")
    model, callback = module(pl, optimizers, training_step=training_step), Mechanic()
    trainer(pl, callback, max_epochs=6).fit(model, loader())
    lr = callback.optimizers[0].param_groups[0]["lr"]
    assert lr < 1e-2, "the scheduler must have reached the groups that the base steps with"
    assert callback.optimizers[0].base.param_groups[0]["lr"] == lr


def test_groups_of_their_own_lr() -> None:
    pl = lightning_of("lightning.pytorch")
    model = module(pl, two_groups)
    trainer(pl, Mechanic(scope="group")).fit(model, loader())
    assert same(weights(model), plain_loop(optimizers=two_groups, scope="group").weights)


def test_two_optimizers_by_hand(pl: ModuleType) -> None:
    def optimizers(model: Any) -> Any:
        first, second = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)
        return [first, second], [cosine(first)]

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()
        self.lr_schedulers().step()

    model, callback = module(pl, optimizers, training_step=training_step), Mechanic()
    model.automatic_optimization = False
    trainer(pl, callback).fit(model, loader())

    plain = net()
    (base, second), (scheduler,) = optimizers(plain)
    mechanized = [mechanize(base), mechanize(second)]
    for x, y in batches(3):
        for optimizer in mechanized:
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
        scheduler.step()
    assert same(weights(model), weights(plain))
    assert [o.scale.item() for o in callback.optimizers] == [o.scale.item() for o in mechanized]


def test_lightnings_own_proxy_shows_the_live_tuner(pl: ModuleType) -> None:
    """The proxy runs our properties with itself as `self`. Read before the first step, it kept a tuner of its own."""
    seen: list[float] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append(self.optimizers().scale.item())
        if len(seen) == 10:
            self.optimizers().freeze()

    def on_train_start(self: Any) -> None:
        assert self.optimizers().scale.item() == 0

    model = module(pl, on_train_start=on_train_start, on_train_batch_end=on_train_batch_end)
    trainer(pl, Mechanic()).fit(model, loader())
    assert 0 < seen[5] < seen[9]
    assert set(seen[10:]) == {seen[9]}, "freeze() through the proxy must hold"


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_accumulated_and_clipped(algorithm: str) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    pl = lightning_of("lightning.pytorch")
    model = module(pl)
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    trainer(pl, Mechanic(), accumulate_grad_batches=2, **clipping).fit(model, loader())
    plain = plain_loop(accumulate=2, clip=lambda params: clip(params, 0.05))
    assert same(weights(model), plain.weights)
    assert not same(plain.weights, plain_loop(accumulate=2).weights), "nothing was clipped"


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_true_precisions(precision: str, dtype: torch.dtype) -> None:
    pl = lightning_of("lightning.pytorch")
    model = module(pl)
    trainer(pl, Mechanic(), precision=precision).fit(model, loader())
    plain = plain_loop(model=net(dtype), forward=lambda model, x, y: F.mse_loss(model(x.to(dtype)), y.to(dtype)))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert same(weights(model), plain.weights)


def test_bf16_mixed() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x), y)

    pl = lightning_of("lightning.pytorch")
    model = module(pl)
    trainer(pl, Mechanic(), precision="bf16-mixed").fit(model, loader())
    assert same(weights(model), plain_loop(forward=forward).weights)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_16_mixed_with_a_real_scaler_skips_steps_that_overflow(fused: bool) -> None:
    """A fused base unscales by itself, so Lightning would refuse to clip. The wrapper must report that it does not.

    The loss scale starts so high that the first steps overflow, and these must leave no trace.
    """
    pl = lightning_of("lightning.pytorch")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    model, callback = module(pl, functools.partial(adamw, fused=fused)), Mechanic()
    trainer(pl, callback, plugins=[plugin], gradient_clip_val=0.5, max_epochs=8).fit(model, loader())

    plain = net()
    optimizer = mechanize(adamw(plain, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for x, y in batches(8):
        with torch.autocast("cpu", torch.half):
            loss = F.mse_loss(plain(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert same(weights(model), weights(plain))
    assert 0 < callback.optimizers[0].tuner.steps.item() < 8 * BATCHES, "no step overflowed"


def test_a_training_step_that_returns_none_moves_nothing(pl: ModuleType) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor | None:
        return None if self.trainer.current_epoch == 1 else F.mse_loss(self.net(batch[0]), batch[1])

    model, callback = module(pl, training_step=training_step), Mechanic()
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer(pl, callback).fit(model, loader())
    assert same(weights(model), plain_loop(epochs=2).weights)
    assert callback.optimizers[0].tuner.steps.item() == 2 * BATCHES


def test_validation_in_between_changes_nothing() -> None:
    pl = lightning_of("lightning.pytorch")
    model = module(pl)
    fitted = trainer(pl, Mechanic(), val_check_interval=2)
    fitted.fit(model, loader(), loader())
    between = weights(model)
    fitted.validate(model, loader(), verbose=False)
    assert same(weights(model), between)
    assert same(between, plain_loop().weights)


def test_fitting_twice_goes_on_with_the_same_optimizer(pl: ModuleType) -> None:
    """If configure_optimizers always returns one object, its tuner must continue, not restart with old references."""
    kept: list[Optimizer] = []

    def optimizers(model: nn.Module) -> Optimizer:
        kept.extend([] if kept else [adamw(model)])
        return kept[0]

    model, callback = module(pl, optimizers), Mechanic()
    fitted = trainer(pl, callback, max_epochs=1)
    fitted.fit(model, loader())
    fitted.fit_loop.max_epochs = 3
    fitted.fit(model, loader())
    assert same(weights(model), plain_loop().weights)


def test_a_module_without_an_optimizer() -> None:
    pl = lightning_of("lightning.pytorch")
    model, callback = module(pl, lambda model: None), Mechanic()
    with pytest.warns(UserWarning, match="no optimizer"):
        trainer(pl, callback, max_epochs=1).fit(model, loader())
    assert callback.optimizers == []
    assert same(weights(model), weights(net()))


def test_fabric_takes_a_mechanized_optimizer(tmp_path: Path) -> None:
    """As the README says of Fabric: call mechanize() before fabric.setup(), nothing else."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    raw = net()
    model, optimizer = fabric.setup(raw, mechanize(adamw(raw)))
    for x, y in batches(3):
        fabric.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    expected = plain_loop()
    assert same(weights(raw), expected.weights)
    assert optimizer.scale.item() == expected.optimizer.scale.item() > 0
    fabric.save(tmp_path / "fabric.ckpt", {"optimizer": optimizer})
    saved = torch.load(tmp_path / "fabric.ckpt", weights_only=True)["optimizer"]
    assert json.loads(saved["param_groups"][0]["mechanic_tuner"])["tuner"]["steps"] == 3 * BATCHES
