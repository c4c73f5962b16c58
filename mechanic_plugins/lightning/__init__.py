"""Mechanic for Lightning: add one callback, change nothing else.

    from mechanic_plugins.lightning import Mechanic
    Trainer(callbacks=[Mechanic()]).fit(model)

Whatever `configure_optimizers` returned is mechanized before the first step and before a checkpoint's optimizer state
is loaded. The hooks only call plain functions. One class serves `lightning.pytorch` and `pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from mechanic_plugins.api import Options, mechanize
from mechanic_plugins.checkpoints.leaving import filled, rescale, save_whole
from mechanic_plugins.checkpoints.state import strip
from mechanic_plugins.core.settings import Preset, Rule, Scope
from mechanic_plugins.lightning.attach import (
    attach,
    load_plain_checkpoints_without_mechanic,
    mechanize_before_the_engine,
    redirect_schedulers,
    release,
    schedulers_redirected,
)
from mechanic_plugins.lightning.checks import (
    DEEPSPEED,
    check_callbacks,
    check_strategy,
    is_a,
    warn_of_floors,
)
from mechanic_plugins.lightning.packages import LIGHTNINGS, check_version, installed
from mechanic_plugins.lightning.reports import is_logged, metrics, summarize
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.passes.planner import Backend
from mechanic_plugins.summary import ScaleHistory

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
else:
    # Trainers and command lines ask for instances of their own package's class.
    Callback = type("Callback", tuple(module.Callback for module in LIGHTNINGS), {})

__all__ = ["Mechanic", "check_version", "demechanize_checkpoint", "installed", "metrics"]


class Mechanic(Callback):
    """Learns the scale of the learning rate of every optimizer that `configure_optimizers` returns.

        Trainer(callbacks=[Mechanic()])
        Trainer(callbacks=[Mechanic(s_decay=0.0, prog_bar=True)])

    The lr, weight decay and schedule in `configure_optimizers` keep their meaning: the learning rate in force is
    `scale * lr`, and any lr gives the same training, unless the schedule ends at an absolute one (`eta_min`, `min_lr`),
    which is warned of. `mechanic/scale` and `mechanic/effective_lr` are logged, and the end of fit names the highest
    learning rate that was in force. The state
    is in the optimizer's, so `fit(ckpt_path=...)` continues exactly. Nothing has to be switched for validation.

    A module may be fitted again, with this callback or another. What was learned goes with the optimizer: one that the
    module keeps is tuned further, one that `configure_optimizers` builds anew is tuned anew. A later fit without
    Mechanic uses the optimizer's own lr; call `demechanize(callback.optimizers[0])` first to keep the learned one.

    Args:
        betas: One discount factor per bettor; their scales are summed.
        s_init: The first scale ["auto": the first move is the share `first_move` of the weights' norm].
        first_move: See s_init [1e-3].
        s_decay: The paper's lambda, a pull on the scale towards small weights [0].
        eps: Added to sqrt(v) [0].
        rule: "optimistic", or a published tuner with the constants it was published with: "paper", "experiments",
            "optax" or "theory" ["optimistic"].
        preset: "paper" sets the paper's rule and constants, "0.1" what version 0.1 of this package did by default.
            What is left None has the value in brackets, or the preset's.
        normalize_lr: Let the result not depend on the optimizer's lr: the constants above are stated for an lr of 1.
        smoothing: Play a log-average of the scale; 0 plays it as it is [0.97].
        hindsight: 1 (the paper's) re-applies past updates at the new scale, 0 leaves the weights where they are [0.3].
        own_warmup: Cancel the schedule's warm-up: while the lr sets new maxima, divide the scale by its growth [True].
        scope: "all" learns one scale for each optimizer, "group" one for each param group.
        max_scale: Never play a scale above this.
        max_grad_norm: Clip the gradients in the step. Use this or the Trainer's `gradient_clip_val`.
        group: The ranks that share the parameters, where that is not all ranks.
        sync_replicas: Average the sums over data-parallel replicas too, for replicas on unlike hardware.
        backend: How the passes over memory are made: "auto", "fused", "triton" or "foreach".
        log: Log the scale and the effective lr, in the steps that the Trainer logs and at each epoch's end.
        prog_bar: Show them in the progress bar too, which waits for the device whenever the bar is drawn.
    """

    def __init__(
        self,
        *,
        betas: Sequence[float] = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999),
        s_init: float | Literal["auto"] | None = None,
        first_move: float | None = None,
        s_decay: float | None = None,
        eps: float | None = None,
        rule: Rule | None = None,
        preset: Preset | None = None,
        normalize_lr: bool = True,
        smoothing: float | None = None,
        hindsight: float | None = None,
        own_warmup: bool | None = None,
        scope: Scope = "all",
        max_scale: float | None = None,
        max_grad_norm: float | None = None,
        group: dist.ProcessGroup | None = None,
        sync_replicas: bool = False,
        backend: Backend = "auto",
        log: bool = True,
        prog_bar: bool = False,
    ) -> None:
        super().__init__()
        self.options = Options(
            betas=betas,
            s_init=s_init,
            first_move=first_move,
            s_decay=s_decay,
            eps=eps,
            rule=rule,
            preset=preset,
            normalize_lr=normalize_lr,
            smoothing=smoothing,
            hindsight=hindsight,
            own_warmup=own_warmup,
            scope=scope,
            max_scale=max_scale,
            max_grad_norm=max_grad_norm,
            group=group,
            sync_replicas=sync_replicas,
            backend=backend,
        )
        mechanize(torch.optim.SGD, **self.options)  # refuses bad values here, not at the first step
        self.optimizers: list[MechanicOptimizer] = []
        self._redirected: list[Any] = []
        self._histories: dict[MechanicOptimizer, ScaleHistory] = {}
        self._recorded = -1
        self._log = log
        self._prog_bar = prog_bar

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            check_callbacks(trainer, self)
            check_strategy(trainer)
            if is_a(trainer.strategy, DEEPSPEED):
                mechanize_before_the_engine(trainer.strategy, self.options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizers exist, and no state was loaded into them yet."""
        self.optimizers = []  # an optimizer of an earlier fit has what was learned in its own state
        self._histories, self._recorded = {}, -1
        self._attach(trainer)
        warn_of_floors(config.scheduler for config in trainer.strategy.lr_scheduler_configs)
        if is_a(trainer.strategy, ("ModelParallelStrategy",)):
            load_plain_checkpoints_without_mechanic(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attach(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Other callbacks may have put new optimizers there since."""
        self._attach(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorded != trainer.global_step:  # not while gradients accumulate
            self._recorded = trainer.global_step
            for optimizer in self.optimizers:
                self._histories.setdefault(optimizer, ScaleHistory()).record(optimizer)
        if self._log and (self._prog_bar or is_logged(trainer)):
            pl_module.log_dict(metrics(self.optimizers), on_step=True, on_epoch=False, prog_bar=self._prog_bar)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        summarize(self.optimizers, self._histories)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Only for `demechanize_checkpoint`: what resuming needs is in the optimizer's state."""
        if not is_a(trainer.strategy, DEEPSPEED):
            with schedulers_redirected(trainer.strategy):
                checkpoint["mechanic"] = learned(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls neither `on_train_end` nor `teardown` then."""
        self._release(trainer)
        if isinstance(exception, KeyboardInterrupt):
            summarize(self.optimizers, self._histories)

    def _attach(self, trainer: Trainer) -> None:
        self.optimizers = attach(trainer.strategy, self.options, known=self.optimizers)
        self._redirected += redirect_schedulers(trainer.strategy, self.optimizers)

    def _release(self, trainer: Trainer) -> None:
        release(trainer.strategy, self._redirected)
        self._redirected = []


# -------------------------------------------------------------------- leaving


def demechanize_checkpoint(source: str | Path, target: str | Path) -> None:
    """Rewrites a Trainer's checkpoint so that a Trainer without Mechanic goes on at the learned learning rates.

        demechanize_checkpoint("last.ckpt", "plain.ckpt")
        Trainer(max_epochs=20).fit(model, ckpt_path="plain.ckpt")

    For checkpoints in one file. Weights and moments stay; the optimizers' learning rates, and the schedules' of torch's
    schedulers, are multiplied by the scale. A group that has learned none takes the smallest of its optimizer's others.

    Raises:
        ValueError: There is no scale above 0 in the checkpoint.
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
        "before the first steps. Resume from it as it is."
    )


def learned(strategy: Strategy) -> dict[str, list[list[float]]]:
    """The groups' scales, for each entry of the lists that a Trainer's checkpoint has under the same names."""
    return {
        "optimizer_states": [_scales_of(optimizer) for optimizer in strategy.optimizers],
        "lr_schedulers": [_scales_of(config.scheduler.optimizer) for config in strategy.lr_scheduler_configs],
    }


def _scales_of(optimizer: Any) -> list[float]:
    is_ours = isinstance(optimizer, MechanicOptimizer)
    return optimizer.scales.tolist() if is_ours else [1.0] * len(optimizer.param_groups)
