"""Hugging Face: `--optim mechanic_adamw` in Trainer and TrainingArguments.

    import mechanic_plugins.transformers
    TrainingArguments(optim="mechanic_adamw", optim_args="scope=group")

The default rule is this package's own; `optim_args="rule=paper"` is the paper's, Algorithm 1.

The import registers the names of `mechanic_plugins.hf.optim_names.BASES`. transformers has no registry, so three places
are patched in memory: the enum of names, the static method that turns a name into a class, and the constructor that
collects a Trainer's callbacks, to add the one that logs the scale. transformers' own optimizers are unaffected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

try:
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
    from transformers.training_args import OptimizerNames, TrainingArguments
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.transformers cannot import transformers ({error}): "
        "pip install 'mechanic-plugins[transformers]'"
    ) from error
if importlib.util.find_spec("accelerate") is None:
    raise ImportError("transformers' Trainer needs accelerate: pip install 'mechanic-plugins[transformers]'")

import mechanic_plugins.accelerate as accelerate_plugin
from mechanic_plugins.api import chain, find, peak_lr
from mechanic_plugins.hf.bases import class_and_kwargs, is_mechanic, name_of
from mechanic_plugins.hf.checkpoint import demechanize_checkpoint, refuse_unscaled_resume
from mechanic_plugins.hf.optim_names import BASES, PREFIX, add_name, add_names
from mechanic_plugins.hf.schedules import objection
from mechanic_plugins.optimizer import MechanicOptimizer
from mechanic_plugins.patches import patch
from mechanic_plugins.summary import ScaleHistory, remarks, report, rules

__all__ = ["MechanicCallback", "demechanize_checkpoint", "register"]


def register(name: str, base: str | type[Optimizer]) -> None:
    """Adds a name to `--optim`: `register("mechanic_myopt", MyOptimizer)`.

    Args:
        name: Must start with "mechanic_".
        base: An optimizer class, built with the learning rate and the keys of `optim_args` that are not Mechanic's; or
            the name of one of transformers' optimizers.

    Raises:
        ValueError: The name is taken or lacks the prefix, or transformers has no such optimizer.
        TypeError: Not an optimizer class.
    """
    if not name.startswith(PREFIX) or name == PREFIX:
        raise ValueError(f"the name must start with {PREFIX!r}, got {name!r}: the Trainer recognises Mechanic by it.")
    if BASES.get(name, base) != base:
        raise ValueError(f"{name!r} is already registered for {BASES[name]!r}, got {base!r}: choose another name.")
    if isinstance(base, str):
        _refuse_unsuitable(OptimizerNames(base).value)
    elif Optimizer not in getattr(base, "__mro__", ()):
        raise TypeError(
            f"{name} needs a subclass of torch.optim.Optimizer, or transformers' name of one, got {base!r}."
        )
    BASES[name] = base
    add_name(OptimizerNames, name)


def _refuse_unsuitable(name: str) -> None:
    if name.startswith(PREFIX):
        raise ValueError(f"{name!r} is already mechanized: pass the base's own name.")
    if "lomo" in name or "layerwise" in name:
        raise ValueError(f"{name!r} steps inside the backward pass, before all gradients of a step are known.")
    if name.startswith("schedule_free"):
        raise ValueError(f"{name!r} moves the weights between train() and eval(), which Mechanic would undo.")


# -------------------------------------------------------------------------------- the logs


logger = logging.get_logger("transformers.mechanic")  # same verbosity as transformers itself


class MechanicCallback(TrainerCallback):
    """Adds the scale to every training log. Added to the Trainer automatically.

    At the end it logs the learned learning rate, and adds it to the metrics as `mechanic/peak_lr`. The rule is
    `mechanic/rule` in W&B's config and in the last record of the log history.
    """

    def __init__(self) -> None:
        self.history = ScaleHistory()
        self._is_in_wandb = False

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Rejects an optimizer that lost its scale, which would train silently at the wrong learning rate."""
        self.history, self._is_in_wandb = ScaleHistory(), False
        if find(optimizer) is not None:
            _warn_of_schedule(args, state)
            return
        if is_mechanic(args):
            raise RuntimeError(
                f"--optim {name_of(args)} was requested, but the optimizer is {chain(optimizer)} without Mechanic: it "
                'was replaced. Remove the "optimizer" block from the DeepSpeed config, and do not pass an optimizer to '
                "Trainer."
            )
        refuse_unscaled_resume(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        mechanic = find(optimizer)
        if mechanic is not None:
            self.history.record(mechanic)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        mechanic = find(optimizer)
        if mechanic is None or logs is None:
            return
        metrics: dict[str, float] = {}
        texts: dict[str, str] = {}
        if "loss" in logs:
            metrics = _worth_logging(mechanic)
        elif "train_runtime" in logs and len(self.history):
            metrics, texts = {"mechanic/peak_lr": mechanic.learned_lr}, rules([mechanic])
        logs.update(metrics)  # numbers only: TensorBoard and MLflow refuse texts
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update({**metrics, **texts})  # Trainer has copied the logs there already
        if "wandb" in (args.report_to or ()) and not self._is_in_wandb:
            self._is_in_wandb = _add_to_wandb(rules([mechanic]))

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        mechanic = find(optimizer)
        if mechanic is None or not len(self.history):
            return
        lines = [report(mechanic), *remarks(mechanic, self.history)]
        if state.is_world_process_zero:
            if not args.disable_tqdm:
                sys.stderr.write("\n")  # tqdm's bar has no line end yet
                sys.stderr.flush()
            for line in lines:
                logger.warning(line)


def _add_to_wandb(config: dict[str, str]) -> bool:
    """Adds to the config of W&B's run, if this process has one. Trainer's callback starts it after ours has begun."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.config.update(config, allow_val_change=True)  # a resumed run may go on by another rule
    return run is not None


def _warn_of_schedule(args: TrainingArguments, state: Any) -> None:
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}
    if state.is_world_process_zero and (text := objection(kind, options, args.learning_rate)):
        warnings.warn(text, stacklevel=2)


def _worth_logging(mechanic: MechanicOptimizer) -> dict[str, float]:
    """The metrics to log. Trainer's two param groups, with and without decay, are separate only if they differ."""
    metrics = mechanic.metrics()
    wanted = {"mechanic/scale", "mechanic/effective_lr"}
    if metrics["mechanic/skipped_steps"]:
        wanted.add("mechanic/skipped_steps")
    if mechanic.settings.scope == "group":
        wanted.update(key for key in metrics if key.startswith(("mechanic/scale/", "mechanic/effective_lr/")))
    if len(set(map(peak_lr, mechanic.param_groups))) > 1:
        wanted.update(key for key in metrics if key.startswith("mechanic/effective_lr/"))
    return {key: value for key, value in metrics.items() if key in wanted}


# -------------------------------------------------------------------------------- registration


def _add_callback(original: Any, handler: CallbackHandler, callbacks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
    """Adds the callback where callbacks are called: programs such as ms-swift replace Trainer's DEFAULT_CALLBACKS."""
    callbacks = list(callbacks)
    kinds = [each if isinstance(each, type) else type(each) for each in callbacks]
    if not any(issubclass(kind, MechanicCallback) for kind in kinds):
        callbacks.insert(1, MechanicCallback)  # after DefaultFlowCallback, before those that read the logs
    original(handler, callbacks, *args, **kwargs)


def install() -> None:
    """Adds Mechanic to transformers. Done by the import; idempotent."""
    add_names(OptimizerNames)
    accelerate_plugin.install()
    patch(importlib.import_module("transformers.trainer").Trainer, "get_optimizer_cls_and_kwargs", class_and_kwargs)
    patch(CallbackHandler, "__init__", _add_callback)


install()
