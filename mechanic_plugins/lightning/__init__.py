"""Mechanic for Lightning: add one callback, change nothing else.

    from mechanic_plugins.lightning import Mechanic
    Trainer(callbacks=[Mechanic()]).fit(model)              # by this package's own rule, the default
    Trainer(callbacks=[Mechanic(rule="paper")]).fit(model)  # by the paper's, Algorithm 1

The optimizers that `configure_optimizers` returns are mechanized before the first step and before a checkpoint's
optimizer state is loaded. One class serves `lightning.pytorch` and `pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from mechanic_plugins.api import find
from mechanic_plugins.lightning.attach import (
    attach,
    load_plain_checkpoints_without_mechanic,
    mechanize_before_the_engine,
    redirect_schedulers,
    release,
)
from mechanic_plugins.lightning.checks import (
    DEEPSPEED,
    check_callbacks,
    check_strategy,
    is_a,
    warn_of_floors,
)
from mechanic_plugins.lightning.packages import Callback, installed
from mechanic_plugins.lightning.reports import BAR, is_logged, log_rules, metrics, show_digits, summarize
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.optimizer.saving import strip
from mechanic_plugins.optimizer.to_plain import filled, rescale, save_whole
from mechanic_plugins.optimizer.wrapper import Backend
from mechanic_plugins.options import DEFAULTS, Options, configured
from mechanic_plugins.rule.settings import Rule, Scope, Settings
from mechanic_plugins.summary import ScaleHistory

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

__all__ = ["LogLearnedLr", "Mechanic", "demechanize_checkpoint", "installed", "metrics"]


class Mechanic(Callback):
    """Learns the scale of the learning rate of every optimizer returned by `configure_optimizers`.

        Trainer(callbacks=[Mechanic()])
        Trainer(callbacks=[Mechanic(max_grad_norm=1.0, prog_bar=True)])

    The lr, weight decay and schedule in `configure_optimizers` keep their meaning: the effective learning rate is
    `scale * lr`. The default rule is this package's own, the relative rule, without a regret bound; `rule="paper"` is
    the paper's Algorithm 1. Use the default to train; use the paper's to reproduce or study the paper.

    Training does not depend on lr, unless the schedule ends at an absolute learning rate (`eta_min`, `min_lr`), which
    causes a warning. `mechanic/scale` and `mechanic/effective_lr` are logged, and `mechanic/peak_lr`, the learned
    learning rate, at the end of fit; `mechanic/rule` is a hyper-parameter. The tuner is part of the optimizer's state,
    so `fit(ckpt_path=...)` resumes exactly. Validation needs no mode switch.

    A module may be fitted again, with this callback or another. The tuner belongs to the optimizer: if the module keeps
    its optimizer, tuning continues; if `configure_optimizers` builds a new one, it starts over. A later fit without
    Mechanic uses the optimizer's own lr; call `demechanize(callback.optimizers[0])` first to keep the learned one.

    Args:
        rule: None or "relative" is this package's own rule, "paper" the paper's Algorithm 1; "experiments", "optax" and
            "theory" are other published forms of it.
        scope: "all" learns one scale per optimizer, "group" one per param group.
        max_scale: Upper bound on the scale.
        max_grad_norm: Clip the gradients in the step, which takes no pass of its own as `gradient_clip_val` does.
        kept_dtype: `torch.bfloat16` keeps what the step remembers of each weight in 2 bytes.
        group: The ranks that share the parameters, if not all ranks.
        sync_replicas: Average the sums over data-parallel replicas too, for replicas on different hardware.
        backend: The implementation: "auto", "fused", "triton" or "foreach".
        s_init: A published rule's first scale.
        s_decay: A published rule's norm penalty, the paper's lambda.
        tuner_betas: Memory lengths of a published rule's learners; one number is one learner.
        tuner_eps: Added to a published rule's divisor.
        settings: All of the tuner's constants as a `Settings` object. Not with the options that it contains.
        log: Log the scale and the effective lr, in the steps that the Trainer logs and at the end of each epoch.
        prog_bar: Show the effective lr in the progress bar as `mechanic_lr`, which synchronises with the device.
    """

    def __init__(
        self,
        *,
        rule: Rule | None = None,
        scope: Scope = "all",
        max_scale: float | None = None,
        max_grad_norm: float | None = None,
        kept_dtype: torch.dtype | Literal["float32", "bfloat16"] | None = None,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
        s_init: float | None = None,
        s_decay: float | None = None,
        tuner_betas: Sequence[float] | float | None = None,
        tuner_eps: float | None = None,
        settings: Settings | None = None,
        log: bool = True,
        prog_bar: bool = False,
    ) -> None:
        given = locals()  # the signature spells the options out for editors and LightningCLI
        self.options = cast(Options, {name: given[name] for name in DEFAULTS})
        super().__init__()
        configured(self.options)  # rejects invalid values here, not at the first step
        self.optimizers: list[MechanicOptimizer] = []
        self._redirected: list[Any] = []
        self._histories: dict[MechanicOptimizer, ScaleHistory] = {}
        self._recorded = -1
        self._log, self._prog_bar = log, prog_bar

    def setup(self, trainer: Trainer, pl_module: LightningModule | None = None, stage: str = "fit") -> None:
        if not is_a(self, ("Mechanic",)):  # a class in place of a callback: Lightning then passes the trainer as `self`
            raise TypeError("callbacks=[Mechanic] holds the class instead of a callback: write Mechanic().")
        if stage == "fit":
            check_callbacks(trainer, self)
            check_strategy(trainer)
            if is_a(trainer.strategy, DEEPSPEED):
                mechanize_before_the_engine(trainer.strategy, self.options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches here: the optimizers exist, and no state has been loaded into them yet."""
        self.optimizers = []  # the tuner of an earlier fit is in its optimizer's state
        self._histories, self._recorded = {}, -1
        self._attach(trainer)
        if self._prog_bar:
            show_digits(trainer)
        warn_of_floors(config.scheduler for config in trainer.strategy.lr_scheduler_configs)
        if is_a(trainer.strategy, ("ModelParallelStrategy",)):
            load_plain_checkpoints_without_mechanic(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attach(trainer)
        log_rules(trainer, self.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Attaches again, since other callbacks may have replaced the optimizers."""
        self._attach(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorded != trainer.global_step:  # not while gradients accumulate
            self._recorded = trainer.global_step
            for optimizer in self.optimizers:
                self._histories.setdefault(optimizer, ScaleHistory()).record(optimizer)
        shows = self._prog_bar and not trainer.barebones
        if not (shows or (self._log and is_logged(trainer))):
            return
        logged = metrics(self.optimizers)
        if self._log and is_logged(trainer):
            pl_module.log_dict(logged, on_step=True, on_epoch=False)
        if shows:
            ours = {k: v for k, v in logged.items() if k.startswith("mechanic/effective_lr") and k.count("/") == 1}
            shown = {k.replace("mechanic/effective_lr", BAR): v for k, v in ours.items()}
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        summarize(trainer, self.optimizers, self._histories)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the scales for `demechanize_checkpoint`. Resuming needs only the optimizer's state."""
        if not is_a(trainer.strategy, DEEPSPEED):
            checkpoint["mechanic"] = learned(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any = None) -> None:
        """Cleans up, since Lightning does not call `on_train_end` and `teardown` after an exception."""
        if not is_a(self, ("Mechanic",)):  # see `setup`, whose error this one would hide
            return
        self._release(trainer)
        if isinstance(exception, KeyboardInterrupt):
            summarize(trainer, self.optimizers, self._histories)

    def _attach(self, trainer: Trainer) -> None:
        self.optimizers = attach(trainer.strategy, self.options, known=self.optimizers)
        self._redirected += redirect_schedulers(trainer.strategy, self.optimizers)

    def _release(self, trainer: Trainer) -> None:
        release(trainer.strategy, self._redirected)
        vars(trainer.progress_bar_callback or self).pop("get_metrics", None)
        self._redirected = []


class LogLearnedLr(Callback):
    """Logs what `Mechanic` logs, for optimizers mechanized without it, such as by `mechanic-run --replace`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_rules(trainer, _without_callback(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        optimizers = _without_callback(trainer)
        if optimizers and is_logged(trainer):
            pl_module.log_dict(metrics(optimizers), on_step=True, on_epoch=False)


def _without_callback(trainer: Trainer) -> list[MechanicOptimizer]:
    """The trainer's mechanized optimizers, or none where `Mechanic` logs them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # missing from its annotations
    if any(isinstance(each, Mechanic) for each in callbacks):
        return []
    return [found for each in trainer.optimizers if (found := find(each)) is not None]


# -------------------------------------------------------------------- leaving


def demechanize_checkpoint(source: str | Path, target: str | Path) -> None:
    """Rewrites a checkpoint so that a Trainer without Mechanic continues at the learned learning rates.

        demechanize_checkpoint("last.ckpt", "plain.ckpt")
        Trainer(max_epochs=20).fit(model, ckpt_path="plain.ckpt")

    For checkpoints in one file. Weights and moments are kept; the learning rates of the optimizers and of torch's
    schedulers are multiplied by the scale. A group without a learned scale takes the smallest of its optimizer's.

    Raises:
        ValueError: The checkpoint holds no scale above 0.
    """
    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    scales: dict[str, list[list[float]]] = checkpoint.pop("mechanic", {"optimizer_states": []})
    if not any(scales["optimizer_states"]):
        raise ValueError(_nothing_learned(source, scales))
    for part, entries in scales.items():
        for state, row in zip(checkpoint[part], entries, strict=True):
            if part == "optimizer_states":
                strip(state["param_groups"], state["state"])
            try:
                rescale(state, filled(row) if row else [])
            except ValueError as error:
                raise ValueError(_nothing_learned(source, scales)) from error
    save_whole(checkpoint, target)


def _nothing_learned(source: str | Path, scales: object) -> str:
    return (
        f"{source} holds no learned scale above 0 (found {scales}): it was saved without the Mechanic callback, or "
        "before the first steps. Resume from it directly."
    )


def learned(strategy: Strategy) -> dict[str, list[list[float]]]:
    """The groups' scales, under the names and in the order of the lists in a Trainer's checkpoint."""
    ours = [optimizer for optimizer in strategy.optimizers if isinstance(optimizer, MechanicOptimizer)]

    def scales(of: Any) -> list[float]:
        mechanic = next((o for o in ours if of is o or of is o.base), None)  # schedulers hold the base after fit
        return mechanic.scales.tolist() if mechanic is not None else [1.0] * len(of.param_groups)

    return {
        "optimizer_states": [scales(optimizer) for optimizer in strategy.optimizers],
        "lr_schedulers": [scales(config.scheduler.optimizer) for config in strategy.lr_scheduler_configs],
    }
