"""The summary that fit prints at its end."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning_helpers import BATCHES, QUIET, adamw, lightning_of, loader, module, trainer
from torch.optim import lr_scheduler

from mechanic_plugins.lightning import Mechanic

pytestmark = QUIET

LINE = re.compile(
    r"(\S+): Mechanic learned a learning rate of ([^\s,]+)(, the largest of \d+ param groups)? \(rule=\"relative\"\)\."
)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, float]]:
    """The optimizer's name and the learned lr of every summary line."""
    found = [LINE.fullmatch(message) for message in caplog.messages]
    return [(m[1], float(m[2])) for m in found if m]


def still_rising(record: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in record if "still looking for its scale" in str(w.message)]


def test_the_end_of_fit_names_the_highest_learning_rate_in_force(caplog: pytest.LogCaptureFixture) -> None:
    """The schedule has lowered the learning rate by the end, so the last one says nothing."""
    rates = []

    def optimizers(model: Any) -> Any:
        optimizer = adamw(model)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 40 * BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self: Any, *args: Any) -> None:
        (optimizer,) = self.trainer.optimizers
        rates.append(optimizer.effective_lrs[0])

    pl = lightning_of("lightning.pytorch")
    model = module(pl, optimizers, on_train_batch_end=on_train_batch_end)
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as record:
        trainer(pl, Mechanic(), max_epochs=40).fit(model, loader())
    (optimizer,) = model.trainer.optimizers
    assert lines(caplog) == [("AdamW", pytest.approx(optimizer.learned_lr, rel=5e-3))]
    assert rates[-1] < optimizer.learned_lr < 2 * max(rates)
    assert not still_rising(record)


def test_a_run_that_was_too_short_is_told_so(pl: ModuleType) -> None:
    with pytest.warns(UserWarning, match="AdamW: Mechanic was still looking for its scale"):
        trainer(pl, Mechanic(rule="paper")).fit(module(pl), loader())


@pytest.mark.filterwarnings("ignore:.*was not finite. the step was skipped")
def test_a_run_that_skipped_steps_is_told_so(pl: ModuleType) -> None:
    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step == 5:
            for p in self.parameters():
                p.grad.fill_(math.nan)

    model = module(pl, on_before_optimizer_step=on_before_optimizer_step)
    with pytest.warns(UserWarning, match="Mechanic skipped") as record:
        trainer(pl, Mechanic(), max_epochs=5).fit(model, loader())
    assert [str(w.message) for w in record if "Mechanic skipped" in str(w.message)] == [
        f"AdamW: Mechanic skipped 1 of {5 * BATCHES} steps, whose gradients were not finite or far larger than all "
        "before them."
    ]


def test_several_optimizers_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
            optimizer.step()

    pl = lightning_of("lightning.pytorch")
    model = module(
        pl, lambda model: [adamw(model), torch.optim.SGD(model.parameters(), lr=0.1)], training_step=training_step
    )
    model.automatic_optimization = False
    with caplog.at_level(logging.INFO):
        trainer(pl, Mechanic()).fit(model, loader())
    assert [name for name, _ in lines(caplog)] == ["AdamW", "SGD-1"]


def test_groups_that_never_move_do_not_disturb(caplog: pytest.LogCaptureFixture) -> None:
    """LoRA+ makes empty groups, and a frozen group has parameters without gradients."""

    def optimizers(model: Any) -> Any:
        model[0].requires_grad_(False)
        frozen, moving = list(model[0].parameters()), list(model[2].parameters())
        return torch.optim.AdamW([{"params": moving}, {"params": frozen}, {"params": []}], lr=1e-2)

    pl = lightning_of("lightning.pytorch")
    callback = Mechanic(scope="group")
    fitted = trainer(pl, callback, max_epochs=6)
    with caplog.at_level(logging.INFO):
        fitted.fit(module(pl, optimizers), loader())
    moving, frozen, empty = callback.optimizers[0].scales.tolist()
    assert moving > 0 == frozen == empty
    assert fitted.callback_metrics["mechanic/scale"].item() == pytest.approx(moving)
    assert lines(caplog) == [("AdamW", pytest.approx(callback.optimizers[0].learned_lr, rel=5e-3))]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_still_names_what_it_has_learned(caplog: pytest.LogCaptureFixture) -> None:
    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 2:
            raise KeyboardInterrupt

    pl = lightning_of("lightning.pytorch")
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        trainer(pl, Mechanic()).fit(module(pl, on_train_batch_start=on_train_batch_start), loader())
    assert [name for name, _ in lines(caplog)] == ["AdamW"]


@pytest.mark.slow
def test_the_line_reaches_the_console_by_default() -> None:
    here = Path(__file__).parent
    program = f"""
import sys
sys.path[:0] = {[str(here), str(here.parent / "helpers")]!r}
import lean; lean.hide("matplotlib", "scipy", "transformers")
import lightning.pytorch as pl
from lightning_helpers import loader, module, trainer
from mechanic_plugins import Settings
from mechanic_plugins.lightning import Mechanic
trainer(pl, Mechanic()).fit(module(pl), loader())
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    (line,) = [line for line in run.stderr.splitlines() if LINE.fullmatch(line)]
    assert line.startswith("AdamW: Mechanic learned a learning rate of ")
