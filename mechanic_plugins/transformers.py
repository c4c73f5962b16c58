"""Hugging Face: `--optim mechanic_adamw` in Trainer and TrainingArguments.

    import mechanic_plugins.transformers
    TrainingArguments(optim="mechanic_adamw", optim_args="s_decay=0.0")

The import registers the names of `mechanic_plugins.names.BASES`. transformers has no registry, so three places are
touched in memory: the enum of names, the static method that turns a name into a class, and the list of default
callbacks, for the scale in the logs. transformers' own optimizers go their own way as before.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

try:
    import transformers.optimization
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import OptimizerNames, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.transformers cannot import transformers ({error}): "
        "pip install 'mechanic-plugins[transformers]'"
    ) from error
if importlib.util.find_spec("accelerate") is None:
    raise ImportError("transformers' Trainer needs accelerate: pip install 'mechanic-plugins[transformers]'")

import mechanic_plugins.accelerate as accelerate_plugin
from mechanic_plugins.api import chain, find, mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.muon import MuonWithAdamW
from mechanic_plugins.names import BASES, PREFIX, add_name, add_names
from mechanic_plugins.optim_args import PARSERS, literal, split_optim_args
from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["MechanicCallback", "register"]

Kwargs = dict[str, Any]
Found = tuple[type[Optimizer], Kwargs]


def register(name: str, base: str | type[Optimizer]) -> None:
    """Gives `--optim` a name of your own: `register("mechanic_myopt", MyOptimizer)`.

    Args:
        name: Starts with "mechanic_".
        base: An optimizer class, built with the learning rate and what `optim_args` says beside Mechanic's own
            keys; or the name of one of transformers' optimizers, which builds it as usual.

    Raises:
        ValueError: The name is taken or has another prefix, or transformers has no such optimizer.
        TypeError: Not an optimizer class.
    """
    if not name.startswith(PREFIX) or name == PREFIX:
        raise ValueError(
            f"the name must start with {PREFIX!r}, got {name!r}: that is how the Trainer knows it is ours."
        )
    if BASES.get(name, base) != base:
        raise ValueError(f"{name!r} stands for {BASES[name]!r} already, got {base!r}: choose another name.")
    if isinstance(base, str):
        _refuse_unsuitable(OptimizerNames(base).value)
    elif not issubclass(base, Optimizer):
        raise TypeError(
            f"{name} needs a subclass of torch.optim.Optimizer, or transformers' name of one, got {base!r}."
        )
    BASES[name] = base
    add_name(OptimizerNames, name)


def _refuse_unsuitable(name: str) -> None:
    if name.startswith(PREFIX):
        raise ValueError(f"{name!r} is mechanized already: give the base's own name.")
    if "lomo" in name or "layerwise" in name:
        raise ValueError(f"{name!r} steps inside the backward pass, where no scale can be learned for the whole step.")
    if name.startswith("schedule_free"):
        raise ValueError(f"{name!r} moves the weights between train() and eval(), which Mechanic would undo.")


# -------------------------------------------------------------------------------- from args to an optimizer


def is_mechanic(args: TrainingArguments) -> bool:
    """Whether `--optim` asks for Mechanic."""
    return _name(args) in BASES


def _name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _class_and_kwargs(original: Callable[..., Found], args: TrainingArguments, model: Any) -> Found:
    """What Trainer builds its optimizer from: a class that takes the param groups, and the other arguments."""
    options, rest = split_optim_args(args.optim_args)
    base = BASES[_name(args)]
    if isinstance(base, str):
        cls, kwargs = _from_transformers(original, _with_optim(args, _on_this_device(base, args), rest), model)
    else:
        cls, kwargs = base, _kwargs_of(base, args, model, rest)
    return mechanize(cls, **options), kwargs


def _on_this_device(base: str, args: TrainingArguments) -> str:
    """The fused kernels of torch are for some devices only."""
    fused = args.device.type in ("cpu", "cuda", "mps", "xpu")
    return "adamw_torch" if base == "adamw_torch_fused" and not fused else base


def _with_optim(args: TrainingArguments, name: str, optim_args: dict[str, str]) -> TrainingArguments:
    args = copy.copy(args)
    args.optim = OptimizerNames(name)
    args.optim_args = ",".join(f"{key}={value}" for key, value in optim_args.items()) or None
    return args


def _from_transformers(original: Callable[..., Found], args: TrainingArguments, model: Any) -> Found:
    name = _name(args)
    if ("bnb" in name or "8bit" in name) and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"{name} needs bitsandbytes: pip install bitsandbytes")
    cls, kwargs = original(args, model)
    return (Adafactor if name == "adafactor" else cls), kwargs


class Adafactor(transformers.optimization.Adafactor):
    """As Trainer builds it, without relative steps: lr is then a plain factor, and Mechanic may rely on it."""

    linear_in_lr = True


def _kwargs_of(base: type[Optimizer], args: TrainingArguments, model: Any, optim_args: dict[str, str]) -> Kwargs:
    kwargs: Kwargs = {"lr": args.learning_rate}
    if base in (Lion, MuonWithAdamW):
        kwargs["betas"] = (args.adam_beta1, args.adam_beta2)
    if base is MuonWithAdamW:
        kwargs.update(eps=args.adam_epsilon, adamw_params=_embeddings(model))
    kwargs.update({key: literal(value) for key, value in optim_args.items()})
    _refuse_unknown(base, kwargs)
    return kwargs


def _embeddings(model: Any) -> list[Tensor]:
    """Matrices that are tables of vectors, one a token, and not maps: Muon is not for them."""
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [p for m in (*modules, *([output] if output is not None else [])) for p in m.parameters()]


def _refuse_unknown(base: type[Optimizer], kwargs: Kwargs) -> None:
    accepted = inspect.signature(base).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return
    for key in kwargs.keys() - accepted.keys():
        raise ValueError(
            f"optim_args has {key}={kwargs[key]!r}, which is a key of neither Mechanic ({', '.join(PARSERS)}) nor "
            f"{base.__name__} ({', '.join(k for k in accepted if k != 'params')})."
        )


# -------------------------------------------------------------------------------- the logs


class MechanicCallback(TrainerCallback):
    """Puts the scale into every training log, beside transformers' own learning_rate. Comes along by itself."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Training at a learning rate that was meant to be scaled would fail without a word."""
        if is_mechanic(args) and find(optimizer) is None:
            raise RuntimeError(
                f"--optim {_name(args)} was asked for, but the optimizer is {chain(optimizer)} without "
                'Mechanic: somebody replaced it. Take the "optimizer" block out of the DeepSpeed config, and pass '
                "Trainer no optimizer of your own."
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        mechanic = find(optimizer)
        if mechanic is None or logs is None or "loss" not in logs:
            return
        metrics = _worth_logging(mechanic)
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # Trainer copied the logs there before it called us


def _worth_logging(mechanic: MechanicOptimizer) -> dict[str, float]:
    """Trainer makes two param groups, with decay and without: all have the one scale, unless asked otherwise."""
    metrics = mechanic.metrics()
    wanted = {"mechanic/scale", "mechanic/effective_lr"}
    if metrics["mechanic/skipped_steps"]:
        wanted.add("mechanic/skipped_steps")
    if mechanic.settings.scope == "group":
        wanted.update(key for key in metrics if key.startswith(("mechanic/scale/", "mechanic/effective_lr/")))
    return {key: value for key, value in metrics.items() if key in wanted}


# -------------------------------------------------------------------------------- registration


def _patch_trainer() -> None:
    """Wraps the one static method that every version asks for the class."""
    trainer = importlib.import_module("transformers.trainer")
    original = trainer.Trainer.get_optimizer_cls_and_kwargs
    if not hasattr(original, "_mechanic"):

        @functools.wraps(original)
        def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> Found:
            if is_mechanic(args):
                return _class_and_kwargs(original, args, model)
            return original(args, model)  # type: ignore[no-any-return]

        get_optimizer_cls_and_kwargs._mechanic = True  # type: ignore[attr-defined]
        trainer.Trainer.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)
    names = [callback.__name__ for callback in trainer.DEFAULT_CALLBACKS]
    if MechanicCallback.__name__ not in names:
        # among the default ones it comes before TensorBoard's and the others' that read the logs
        trainer.DEFAULT_CALLBACKS.append(MechanicCallback)


def _register_all() -> None:
    add_names(OptimizerNames)
    accelerate_plugin.install()
    _patch_trainer()


_register_all()
