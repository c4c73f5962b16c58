"""`gradient_clip_val`: Mechanic's step clips instead of Lightning, only where nobody can tell."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from lightning_helpers import QUIET, Plain, lightning_of, loader, module, plain_loop, trainer, weights
from torch import nn

from mechanic_plugins.lightning import Mechanic

pytestmark = QUIET
NORM = 0.05


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The norms that torch was asked to clip to."""
    seen: list[float] = []
    clip = nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        seen.append(max_norm)
        return clip(parameters, max_norm, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)
    return seen


def assert_clipped(model: Any, plain: Plain) -> None:
    for seen, expected in zip(weights(model), plain.weights, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def by_hand() -> Plain:
    return plain_loop(clip=lambda params: nn.utils.clip_grad_norm_(params, NORM))


def test_the_step_clips(pl: ModuleType, calls: list[float], by_hand: Plain) -> None:
    callback, model = Mechanic(), module(pl)
    fit = trainer(pl, callback, gradient_clip_val=NORM)
    fit.fit(model, loader())
    assert not calls
    assert_clipped(model, by_hand)
    assert callback.optimizers[0].grad_norm > NORM
    assert callback.optimizers[0].max_grad_norm is None, "a later fit may clip to another norm, or not at all"
    assert "clip_grad_by_norm" not in vars(fit.precision_plugin)


def _own(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=NORM, gradient_clip_algorithm="norm")


def _own_step(self: Any, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)


class NotTorchs(torch.optim.AdamW):
    """Who knows how often it evaluates the closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_lightning_clips_for_modules_and_bases_that_may_tell(calls: list[float], by_hand: Plain) -> None:
    pl = lightning_of("lightning.pytorch")
    own_hook = module(pl, configure_gradient_clipping=_own)
    own_step = module(pl, optimizer_step=_own_step)
    own_base = module(pl, lambda model: NotTorchs(model.parameters(), lr=1e-2))
    for model in (own_hook, own_step, own_base):
        calls.clear()
        trainer(pl, Mechanic(), gradient_clip_val=NORM).fit(model, loader())
        assert set(calls) == {NORM}
        assert_clipped(model, by_hand)


@pytest.mark.parametrize(("own", "trainers"), [(NORM, 1.0), (1.0, NORM), (NORM, None)])
def test_the_smaller_norm_wins(own: float, trainers: float | None, by_hand: Plain) -> None:
    """As when both clip one after the other."""
    pl = lightning_of("lightning.pytorch")
    callback, model = Mechanic(max_grad_norm=own), module(pl)
    trainer(pl, callback, gradient_clip_val=trainers).fit(model, loader())
    assert_clipped(model, by_hand)
    assert callback.optimizers[0].max_grad_norm == own


def test_an_exception_gives_the_clipping_back() -> None:
    pl = lightning_of("lightning.pytorch")

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("stop")
        return self.net(batch[0]).square().sum()

    callback, model = Mechanic(), module(pl, training_step=training_step)
    fit = trainer(pl, callback, gradient_clip_val=NORM)
    with pytest.raises(RuntimeError, match="stop"):
        fit.fit(model, loader())
    assert callback.optimizers[0].max_grad_norm is None
    assert "clip_grad_by_norm" not in vars(fit.precision_plugin)
