"""Mechanic for Lightning: add one callback, change nothing else.

    from mechanic_plugins.lightning import Mechanic
    Trainer(callbacks=[Mechanic()]).fit(model)

Whatever `configure_optimizers` returned is mechanized before the first step and before a checkpoint's optimizer state
is loaded. The hooks only call the plain functions below. One class serves `lightning.pytorch` and `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.api import Options, mechanize
from mechanic_plugins.checkpoint import DELTA, strip
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.passes import Backend
from mechanic_plugins.settings import Preset, Rule, Scope
from mechanic_plugins.summary import TOO_SHORT, ScaleHistory, is_still_rising, report

__all__ = ["Mechanic", "demechanize_checkpoint"]

_OLDEST = (2, 5)


def check_version(package: str, version: str) -> None:
    """Refuses a Lightning that this plugin was never run with."""
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"{package} {version} is too old: Mechanic's callback needs {'.'.join(map(str, _OLDEST))} or later. "
            f"pip install --upgrade {package.partition('.')[0].replace('_', '-')}"
        )


def installed() -> list[ModuleType]:
    """The Lightnings that are there, one or both."""
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.partition(".")[0])]
    if not names:
        raise ImportError(
            "mechanic_plugins.lightning needs Lightning: pip install 'mechanic-plugins[lightning]', "
            "or 'mechanic-plugins[pytorch-lightning]' for the older name."
        )
    modules = [import_module(name) for name in names]
    for module in modules:
        check_version(module.__name__, module.__version__)
    return modules


_LIGHTNINGS = installed()

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
else:
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

    # Trainers and command lines ask for instances of their own package's class.
    Callback = type("Callback", tuple(module.Callback for module in _LIGHTNINGS), {})


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
        betas: The memories of the tuners whose bets are added up.
        s_init: The first scale ["auto": the first move is the share `first_move` of the weights' norm].
        first_move: See s_init [1e-3].
        s_decay: The paper's lambda, a pull on the scale towards small weights [0].
        eps: Guards a division [1e-8].
        rule: Which published tuner: "paper", "experiments", "optax" or "theory".
        preset: "paper" sets the paper's constants. What is left None has the value in brackets, or the preset's.
        normalize_lr: Let the result not depend on the optimizer's lr: the constants above are stated for an lr of 1.
        smoothing: Play a log-average of the scale; 0 plays it as it is [0.97; 0 with a rule other than "paper"].
        hindsight: The share of a change of scale that the updates of the past follow; the paper's is 1 [0.3; 1 with a
            rule other than "paper"].
        own_warmup: Let the scale's own rise take the place of a schedule's warm-up: as the base's lr rises above all
            earlier ones, the scale falls by as much [True; False with a rule other than "paper"].
        scope: "all" learns one scale for each optimizer, "group" one for each param group.
        max_scale: Never play a scale above this.
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
        rule: Rule = "paper",
        preset: Preset | None = None,
        normalize_lr: bool = True,
        smoothing: float | None = None,
        hindsight: float | None = None,
        own_warmup: bool | None = None,
        scope: Scope = "all",
        max_scale: float | None = None,
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
            check_callbacks(trainer)
            check_strategy(trainer)
            if _is_a(trainer.strategy, _DEEPSPEED):
                mechanize_before_the_engine(trainer.strategy, self.options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizers exist, and no state was loaded into them yet."""
        self.optimizers = []  # an optimizer of an earlier fit has what was learned in its own state
        self._histories, self._recorded = {}, -1
        self._attach(trainer)
        warn_of_floors(config.scheduler for config in trainer.strategy.lr_scheduler_configs)
        if _is_a(trainer.strategy, ("ModelParallelStrategy",)):
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
        if not _is_a(trainer.strategy, _DEEPSPEED):
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


# -------------------------------------------------------------------- putting Mechanic in place


def attach(strategy: Strategy, options: Options, *, known: Sequence[MechanicOptimizer]) -> list[MechanicOptimizer]:
    """Mechanizes the strategy's optimizers where they are not yet, and returns them.

    Args:
        strategy: Holds the optimizers and the schedulers.
        options: For `mechanize`.
        known: What an earlier call returned: an optimizer that is met again keeps what it has learned.
    """
    if _is_a(strategy, _DEEPSPEED):
        return [_mechanic_of(strategy)]
    wanted = [_mechanized(optimizer, options, known) for optimizer in strategy.optimizers]
    if any(new is not old for new, old in zip(wanted, strategy.optimizers, strict=True)):
        strategy.optimizers = wanted
    return _ours(strategy)


def _ours(strategy: Strategy) -> list[MechanicOptimizer]:
    return [optimizer for optimizer in strategy.optimizers if isinstance(optimizer, MechanicOptimizer)]


def release(strategy: Strategy, schedulers: Iterable[Any]) -> None:
    """Leaves a module's own optimizers and schedulers as a later fit expects them, with Mechanic or without.

    The strategy keeps the mechanized optimizers: checkpoints may be saved after fit. Their tuners are written to the
    param groups, where the next `mechanize` of the same base finds them.
    """
    restore_schedulers(schedulers)
    for planted in ("_init_optimizers", "load_checkpoint"):
        vars(strategy).pop(planted, None)
    for optimizer in _ours(strategy):
        optimizer.state_dict()


def mechanize_before_the_engine(strategy: Any, options: Options) -> None:
    """DeepSpeed's engine takes the optimizer when it is built, before on_fit_start: the engine then attaches itself."""
    import_module("mechanic_plugins.deepspeed")
    configure = type(strategy)._init_optimizers

    def _init_optimizers() -> tuple[Optimizer, Any]:
        optimizer, config = configure(strategy)
        return _mechanized(optimizer, options, ()), config

    strategy._init_optimizers = _init_optimizers


def _mechanic_of(strategy: Any) -> MechanicOptimizer:
    found: MechanicOptimizer | None = import_module("mechanic_plugins.deepspeed").mechanic_of(strategy.deepspeed_engine)
    if found is None:
        raise ValueError(
            f"the DeepSpeed config builds its own optimizer, {strategy.config.get('optimizer')}, without Mechanic: "
            "return it from configure_optimizers instead, or name it there as MechanicAdamW, MechanicSGD, ..."
        )
    return found


def load_plain_checkpoints_without_mechanic(strategy: Strategy) -> None:
    """Torch refuses a sharded checkpoint that lacks an entry which the optimizer has: hand it the base for the load."""
    load = type(strategy).load_checkpoint

    def load_checkpoint(checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        if is_sharded_without_mechanic(checkpoint_path):
            detach(strategy)
        return load(strategy, checkpoint_path, *args, **kwargs)

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def detach(strategy: Strategy) -> None:
    """Puts the bases back, without a trace of Mechanic. `attach` starts it anew."""
    ours = _ours(strategy)
    for optimizer in ours:
        strip(optimizer.param_groups, optimizer.state)
    strategy.optimizers = [getattr(o, "base", o) if o in ours else o for o in strategy.optimizers]


def is_sharded_without_mechanic(path: str | Path) -> bool:
    """Whether this is a folder of torch.distributed.checkpoint that was saved without Mechanic; says so."""
    if not (Path(path) / ".metadata").is_file():
        return False
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if any(DELTA in key for key in FileSystemReader(path).read_metadata().state_dict_metadata):
        return False
    rank_zero_warn(
        f"{path} has no Mechanic in it: the optimizer's moments are kept, and the scale is learned anew from the "
        "loaded weights."
    )
    return True


def _mechanized(optimizer: Any, options: Options, known: Sequence[MechanicOptimizer]) -> Optimizer:
    optimizer = _without_proxy(optimizer)
    if isinstance(optimizer, MechanicOptimizer):
        if not any(optimizer is mine for mine in known):
            rank_zero_warn(
                "configure_optimizers returned a mechanized optimizer: it is used as it is, and the settings of the "
                "Mechanic callback do not reach it. Use one of the two, mechanize() or the callback."
            )
        return optimizer
    if _is_no_optimizer(optimizer):
        return optimizer  # type: ignore[no-any-return]
    return next((mine for mine in known if mine.base is optimizer), None) or mechanize(optimizer, **options)


def _without_proxy(optimizer: Any) -> Any:
    """configure_optimizers may return one of Lightning's own proxies."""
    proxies = tuple(module.core.optimizer.LightningOptimizer for module in _LIGHTNINGS)
    return optimizer._optimizer if isinstance(optimizer, proxies) else optimizer


def _is_no_optimizer(optimizer: object) -> bool:
    """Lightning's stand-in where configure_optimizers returned None; it has said so."""
    return type(optimizer).__name__ == "_MockOptimizer"


def redirect_schedulers(strategy: Strategy, optimizers: Sequence[MechanicOptimizer]) -> list[Any]:
    """Points schedulers that were built on a base at its wrapper, and returns them.

    LearningRateMonitor would list base and wrapper as two optimizers.
    """
    redirected = []
    for config in strategy.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        for optimizer in optimizers:
            if getattr(scheduler, "optimizer", None) is optimizer.base:
                scheduler.optimizer = optimizer
                optimizer.step = _tracked_step(optimizer)  # type: ignore[method-assign]
                redirected.append(scheduler)
    return redirected


def restore_schedulers(redirected: Iterable[Any]) -> None:
    """Points them at their base again: Lightning refuses a scheduler of an optimizer that it was not given."""
    for scheduler in redirected:
        if isinstance(scheduler.optimizer, MechanicOptimizer):
            vars(scheduler.optimizer).pop("step", None)
            scheduler.optimizer = scheduler.optimizer.base


@contextmanager
def schedulers_redirected(strategy: Strategy) -> Iterator[None]:
    """As they are during a fit. After it, `trainer.save_checkpoint` finds them restored."""
    redirected = redirect_schedulers(strategy, _ours(strategy))
    try:
        yield
    finally:
        restore_schedulers(redirected)


def _tracked_step(optimizer: MechanicOptimizer) -> Any:
    """What torch's schedulers do to their optimizer's step; they warn when they find one that is not so marked."""
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        me: Any = reference()
        me._opt_called = True
        return step(me, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return tracked


# -------------------------------------------------------------------- what is logged


def is_logged(trainer: Trainer) -> bool:
    """Whether somebody reads what this step logs: logging costs the host more time than a small model's step."""
    if trainer.barebones:
        return False
    return bool(trainer._logger_connector.should_update_logs) or trainer.is_last_batch


def metrics(optimizers: Sequence[MechanicOptimizer]) -> dict[str, Tensor]:
    """Scale and effective lr as 0-dim tensors, without waiting for the device.

    Named as LearningRateMonitor names: `-1`, `-2` for further optimizers, `/pg1` or the group's name for groups.
    """
    logged = {}
    for index, optimizer in enumerate(optimizers):
        suffix = f"-{index}" if index else ""
        scales = optimizer.scales.detach().unbind()
        lrs = [scale * lr for scale, lr in zip(scales, optimizer.lrs, strict=True)]
        logged[f"mechanic/scale{suffix}"] = optimizer.scale.detach()
        logged[f"mechanic/effective_lr{suffix}"] = lrs[0] if len(lrs) == 1 else torch.stack(lrs).max()
        if len(lrs) > 1:
            names = [group.get("name", f"pg{i}") for i, group in enumerate(optimizer.param_groups, start=1)]
            logged |= {f"mechanic/effective_lr{suffix}/{name}": lr for name, lr in zip(names, lrs, strict=True)}
            if optimizer.settings.scope == "group":
                logged |= {f"mechanic/scale{suffix}/{name}": s for name, s in zip(names, scales, strict=True)}
    return logged


def summarize(optimizers: Sequence[MechanicOptimizer], histories: Mapping[MechanicOptimizer, ScaleHistory]) -> None:
    """Says which learning rate each optimizer has learned, and which run was too short for it."""
    for index, optimizer in enumerate(optimizers):
        history = histories.get(optimizer)
        name = type(optimizer.base).__name__ + (f"-{index}" if index else "")
        rank_zero_info(f"{name}: {report(optimizer, history)}")
        if history is not None and is_still_rising(history):
            rank_zero_warn(f"{name}: {TOO_SHORT}")


# -------------------------------------------------------------------- leaving


def demechanize_checkpoint(source: str | Path, target: str | Path) -> None:
    """Rewrites a Trainer's checkpoint so that a Trainer without Mechanic goes on at the learned learning rates.

        demechanize_checkpoint("last.ckpt", "plain.ckpt")
        Trainer(max_epochs=20).fit(model, ckpt_path="plain.ckpt")

    For checkpoints in one file. Weights and moments stay; the optimizers' learning rates, and the schedules' of torch's
    schedulers, are multiplied by the scale.

    Raises:
        ValueError: There is no scale above 0 in the checkpoint.
    """
    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    scales: dict[str, list[list[float]]] = checkpoint.pop("mechanic", {"optimizer_states": []})
    rows = [row for row in scales["optimizer_states"] if row]
    if not rows or min(map(min, rows)) <= 0:
        raise ValueError(
            f"{source} holds no learned scale above 0 (found {scales}): it was saved without the Mechanic callback, or "
            "before the first steps. Resume from it as it is."
        )
    for state in checkpoint["optimizer_states"]:
        strip(state["param_groups"], state["state"])
    for part, entries in scales.items():
        for state, row in zip(checkpoint[part], entries, strict=True):
            _multiply(state, row)
    torch.save(checkpoint, target)


def learned(strategy: Strategy) -> dict[str, list[list[float]]]:
    """The groups' scales, for each entry of the lists that a Trainer's checkpoint has under the same names."""
    return {
        "optimizer_states": [_scales_of(optimizer) for optimizer in strategy.optimizers],
        "lr_schedulers": [_scales_of(config.scheduler.optimizer) for config in strategy.lr_scheduler_configs],
    }


def _scales_of(optimizer: Any) -> list[float]:
    is_ours = isinstance(optimizer, MechanicOptimizer)
    return optimizer.scales.tolist() if is_ours else [1.0] * len(optimizer.param_groups)


def _multiply(state: dict[str, Any], scales: Sequence[float]) -> None:
    """Scales the learning rates in an optimizer's or a scheduler's state."""
    for group, scale in zip(state.get("param_groups", ()), scales, strict=False):
        group.update({key: group[key] * scale for key in ("lr", "initial_lr", "max_lr", "min_lr") if group.get(key)})
    for key in ("base_lrs", "_last_lr", "max_lrs", "min_lrs"):
        if key in state:
            state[key] = [lr * scale for lr, scale in zip(state[key], scales, strict=True)]
    if "eta_min" in state:
        state["eta_min"] *= max(scales)
    for part in state.get("_schedulers", ()):
        _multiply(part, scales)


# -------------------------------------------------------------------- what is refused, before training starts


def check_callbacks(trainer: Trainer) -> None:
    """Refuses Mechanic twice and a learning rate finder; a batch size finder measures too little."""
    if sum(isinstance(callback, Mechanic) for callback in _callbacks(trainer)) > 1:
        raise _misconfiguration(
            trainer, "Mechanic is in the Trainer's callbacks more than once: keep one. It serves all optimizers."
        )
    if _has_callback(trainer, "LearningRateFinder"):
        raise _misconfiguration(
            trainer,
            "LearningRateFinder together with Mechanic: there is nothing to find, Mechanic learns the learning rate "
            "while it trains, whatever lr the optimizer has. Remove LearningRateFinder, or the call of Tuner.lr_find.",
        )
    if _has_callback(trainer, "BatchSizeFinder"):
        rank_zero_warn(
            "BatchSizeFinder tries batch sizes without Mechanic, which needs one more value per parameter than the "
            "optimizer alone: take a somewhat smaller batch than it finds."
        )


_DEEPSPEED = ("DeepSpeedStrategy",)
_TESTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", *_DEEPSPEED)


def check_strategy(trainer: Trainer) -> None:
    """Refuses strategies that cannot work, and warns of those that nobody has tried."""
    strategy = trainer.strategy
    if _is_a(strategy, ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")):
        raise _misconfiguration(
            trainer,
            f"{type(strategy).__name__} is not supported: Mechanic was never run on XLA devices. "
            "Train on CPU or GPU, or without Mechanic.",
        )
    if _is_a(strategy, ("FSDPStrategy",)) and trainer.world_size > 1 and trainer.precision in ("bf16-true", "16-true"):
        raise _misconfiguration(
            trainer,
            f"FSDPStrategy with precision={trainer.precision!r} could not save a checkpoint: torch's FSDP1 wants all "
            "state of a weight in one dtype, and Mechanic keeps a float32 sum beside 16-bit weights. "
            "Use ModelParallelStrategy (FSDP2), which saves both, or precision='bf16-mixed'.",
        )
    if not _is_a(strategy, _TESTED):
        rank_zero_warn(
            f"Mechanic was never tried with {type(strategy).__name__}: compare `mechanic/scale` on all ranks, which "
            f"must be equal. Tried: {', '.join(_TESTED)}."
        )


def warn_of_floors(schedulers: Iterable[Any]) -> None:
    """A schedule that ends at a learning rate, not at a share of the optimizer's, makes the choice of lr matter."""
    for scheduler in schedulers:
        name, floor = _floor(scheduler)
        if floor > 0:
            lr = _highest_lr(scheduler)
            rank_zero_warn(
                f"{type(scheduler).__name__}({name}={floor:g}) is an absolute learning rate. Mechanic scales it "
                f"together with the optimizer's lr={lr:g}: the floor is {floor / lr if lr else math.inf:.3g} times the "
                f"peak, and would be another with another lr. To have the same with any lr, write {name}=share * lr."
            )
        warn_of_floors(getattr(scheduler, "_schedulers", ()))


def _floor(scheduler: Any) -> tuple[str, float]:
    """The argument that sets a lowest learning rate, and its value; none where another sets the highest."""
    if hasattr(scheduler, "max_lrs"):
        return "", 0.0
    if hasattr(scheduler, "min_lrs"):  # ReduceLROnPlateau
        return "min_lr", max(map(float, scheduler.min_lrs))
    return "eta_min", float(getattr(scheduler, "eta_min", 0.0))


def _highest_lr(scheduler: Any) -> float:
    lrs = getattr(scheduler, "base_lrs", None) or [group["lr"] for group in scheduler.optimizer.param_groups]
    return max(map(float, lrs))


def _has_callback(trainer: Trainer, name: str) -> bool:
    return any(_is_a(callback, (name,)) for callback in _callbacks(trainer))


def _callbacks(trainer: Any) -> list[object]:
    return list(trainer.callbacks)  # which the Trainer's own annotations forget


def _is_a(thing: object, names: Iterable[str]) -> bool:
    """By name, since both Lightnings have a class of that name."""
    return not {cls.__name__ for cls in type(thing).__mro__}.isdisjoint(names)


def _misconfiguration(trainer: Trainer, message: str) -> Exception:
    """The exception class of the trainer's own package."""
    package = next(module for module in _LIGHTNINGS if isinstance(trainer, module.Trainer))
    error: Exception = package.utilities.exceptions.MisconfigurationException(message)
    return error
