"""Turns Trainer's arguments into an optimizer class and its arguments."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers.optimization
from torch import Tensor
from torch.optim import Optimizer
from transformers.training_args import OptimizerNames, TrainingArguments

from mechanic_plugins.api import mechanize
from mechanic_plugins.hf.optim_names import BASES
from mechanic_plugins.lion import Lion
from mechanic_plugins.muon import MuonWithAdamW
from mechanic_plugins.options import parsed

__all__ = ["class_and_kwargs", "is_mechanic", "name_of"]

Kwargs = dict[str, Any]
Found = tuple[type[Optimizer], Kwargs]


def is_mechanic(args: TrainingArguments) -> bool:
    """Whether `--optim` names a mechanized optimizer."""
    return name_of(args) in BASES


def name_of(args: TrainingArguments) -> str:
    """The value of `--optim`."""
    return str(getattr(args.optim, "value", args.optim))


def class_and_kwargs(original: Callable[..., Found], args: TrainingArguments, model: Any = None) -> Found:
    """The mechanized class that Trainer builds its optimizer from, and its arguments other than the param groups.

    Replaces Trainer's own static method, which every version uses.
    """
    if not is_mechanic(args):
        return original(args, model)
    _refuse_lr_zero(args)
    base, given = BASES[name_of(args)], parsed(args.optim_args)
    for key, option in {"lr": "--learning_rate", "weight_decay": "--weight_decay"}.items():
        if key in given:
            raise ValueError(f"optim_args has {key}={given[key]}, which the Trainer sets itself: use {option}.")
    if isinstance(base, str):
        cls, kwargs = _from_transformers(original, args, _on_this_device(base, args), model)
        handled = next((keys for part, keys in _HANDLED.items() if part in base), ())
        given = {key: value for key, value in given.items() if key not in handled}
    else:
        cls, kwargs = base, _kwargs_of(base, args, model)
    return mechanize(cls), {**kwargs, **given}


def _refuse_lr_zero(args: TrainingArguments) -> None:
    if args.learning_rate == 0:
        raise ValueError(
            f"learning_rate must not be 0, got {args.learning_rate!r}: {name_of(args)} learns a factor of it, and the "
            "product would stay 0. Leave it out or write 1.0: all values above 0 give the same training."
        )


def _on_this_device(base: str, args: TrainingArguments) -> str:
    """The base's name, without torch's fused kernels on devices that lack them."""
    fused = args.device.type in ("cpu", "cuda", "mps", "xpu")
    return "adamw_torch" if base == "adamw_torch_fused" and not fused else base


def _from_transformers(original: Callable[..., Found], args: TrainingArguments, name: str, model: Any) -> Found:
    """The class and arguments that transformers itself would use. It drops most keys of `optim_args`."""
    if ("bnb" in name or "8bit" in name) and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"{name_of(args)} needs bitsandbytes: pip install bitsandbytes")
    args = copy.copy(args)
    args.optim = OptimizerNames(name)
    cls, kwargs = original(args, model)
    return (Adafactor if name == "adafactor" else cls), kwargs


_HANDLED = {
    "galore": ("rank", "update_proj_gap", "scale", "proj_type"),
    "apollo": ("rank", "proj", "scale_type", "update_proj_gap", "scale", "proj_type"),
    "ademamix": ("beta1", "beta2", "beta3"),
}
"""Keys of `optim_args` that transformers handles itself, not the constructor, by a part of the optimizer's name."""


class Adafactor(transformers.optimization.Adafactor):
    """Linear in lr as Trainer builds it, without relative steps."""

    linear_in_lr = True


def _kwargs_of(base: type[Optimizer], args: TrainingArguments, model: Any) -> Kwargs:
    kwargs: Kwargs = {"lr": args.learning_rate}
    if base in (Lion, MuonWithAdamW):
        kwargs["betas"] = (args.adam_beta1, args.adam_beta2)
    if base is MuonWithAdamW:
        kwargs.update(eps=args.adam_epsilon, adamw_params=_embeddings(model))
    return kwargs


def _embeddings(model: Any) -> list[Tensor]:
    """Token embeddings and the output layer, for which Muon is not suited."""
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [p for m in (*modules, *([output] if output is not None else [])) for p in m.parameters()]
