"""Mechanized optimizers as classes, for programs that take one by its dotted name or read its signature.

    from mechanic_plugins.optim import AdamW
    optimizer = AdamW(model.parameters(), weight_decay=0.1, scope="group")

    --optimizer mechanic_plugins.optim.AdamW

Each takes the arguments of the optimizer it is named after, then the options of `mechanize`. The default lr is 1, so
that the learned scale is the learning rate itself. The default rule is this package's own; `rule="paper"` is the
paper's, Algorithm 1.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from mechanic_plugins import lion, muon
from mechanic_plugins.classes import Mechanized, class_with
from mechanic_plugins.options import Options, hint
from mechanic_plugins.weights import facts

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "NAdam", "RMSprop", "wrap"]

_ON_DEMAND = {"AdamW8bit": "bitsandbytes"}
"""Classes whose package is imported on first access."""


def wrap(optimizer_class: type[Optimizer], **options: Unpack[Options]) -> type[Mechanized]:
    """A class like those of this module, for any optimizer class.

        MyOptimizer = wrap(package.MyOptimizer, scope="group")

    Args:
        optimizer_class: A subclass of `torch.optim.Optimizer`.
        options: Those of `mechanize`, as defaults of the constructor.

    Raises:
        TypeError: Not an optimizer class.
        ValueError: The class is mechanized already, or an option is out of range.
    """
    given: Any = optimizer_class
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(f"wrap() takes a subclass of torch.optim.Optimizer, got {given!r}: see mechanize().")
    return class_with(optimizer_class, options, _lr(optimizer_class))


def _lr(base: type[Optimizer]) -> float | None:
    """The default lr: 1, unless the base's lr is more than a factor, as Adafactor's, which also bounds its steps."""
    return 1.0 if facts.is_linear_in_lr(base) else None


def _named(name: str, base: type[Optimizer]) -> type[Mechanized]:
    return class_with(base, {}, _lr(base), __module__=__name__, __qualname__=name)


AdamW = _named("AdamW", torch.optim.AdamW)
Adam = _named("Adam", torch.optim.Adam)
SGD = _named("SGD", torch.optim.SGD)
Adagrad = _named("Adagrad", torch.optim.Adagrad)
RMSprop = _named("RMSprop", torch.optim.RMSprop)
NAdam = _named("NAdam", torch.optim.NAdam)
Adafactor = _named("Adafactor", torch.optim.Adafactor)
Lion = _named("Lion", lion.Lion)
Muon = _named("Muon", muon.MuonWithAdamW)

# for torch.load(weights_only=True) of checkpoints that name one of these classes, as darts' do
torch.serialization.add_safe_globals([AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, Adafactor, Lion, Muon])


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        question = hint(name, [*__all__, *_ON_DEMAND])
        raise AttributeError(f"{__name__} has no optimizer {name!r}{question} wrap(cls) makes one of any class.")
    package = _ON_DEMAND[name]
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{__name__}.{name} needs {package}: pip install {package}")
    globals()[name] = _named(name, getattr(importlib.import_module(package).optim, name))
    return globals()[name]


def __dir__() -> list[str]:
    """Lists only names that can be imported here."""
    found = {name for name, package in _ON_DEMAND.items() if importlib.util.find_spec(package) is not None}
    return sorted({*globals(), *found})
