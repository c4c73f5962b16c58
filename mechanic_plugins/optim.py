"""Mechanized optimizers as classes, for programs that want one by its dotted name or look at its signature.

    from mechanic_plugins.optim import AdamW
    optimizer = AdamW(model.parameters(), weight_decay=0.1, s_decay=0.0)

    --optimizer mechanic_plugins.optim.AdamW

Each takes the arguments of the optimizer that it is named after, then the options of `mechanize`. Where both have an
argument of one name, it is the optimizer's, and Mechanic's is `mechanic_betas`, `mechanic_eps`. The lr is 1 by default,
and the learned scale is then the learning rate itself.
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
from mechanic_plugins.core import known_bases
from mechanic_plugins.options import Options, hint

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "NAdam", "RMSprop", "wrap"]

_ON_DEMAND = {"AdamW8bit": "bitsandbytes"}
"""Their packages are imported when they are asked for."""


def wrap(optimizer_class: type[Optimizer], **options: Unpack[Options]) -> type[Mechanized]:
    """A class like those of this module, of any optimizer class.

        MyOptimizer = wrap(package.MyOptimizer, s_decay=0.0)

    Args:
        optimizer_class: A subclass of `torch.optim.Optimizer`.
        options: Those of `mechanize`, as defaults of the constructor.

    Raises:
        TypeError: Not an optimizer class.
        ValueError: The class is mechanized already, or an option is out of range.
    """
    _refuse_other_than_class(optimizer_class)
    return class_with(optimizer_class, options, _lr(optimizer_class))


def _refuse_other_than_class(given: Any) -> None:
    if isinstance(given, Optimizer):
        raise TypeError(
            f"wrap() takes a class, got an instance of {type(given).__name__}: mechanize(optimizer) is for one that is "
            "built already."
        )
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(f"wrap() takes a subclass of torch.optim.Optimizer, got {given!r}.")


def _lr(base: type[Optimizer]) -> float | None:
    """1, except where lr is more than a factor: Adafactor's is also a bound on its steps."""
    return 1.0 if known_bases.is_kind_linear_in_lr(base) else None


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


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        question = hint(name, [*__all__, *_ON_DEMAND])
        raise AttributeError(f"{__name__} has no optimizer {name!r}{question} wrap(cls) makes one of any class.")
    package = _ON_DEMAND[name]
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{__name__}.{name} needs {package}: pip install {package}")
    made = _named(name, getattr(importlib.import_module(package).optim, name))
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    """Without those whose package is missing: whoever lists the module may ask for all of them."""
    found = {name for name, package in _ON_DEMAND.items() if importlib.util.find_spec(package) is not None}
    return sorted({*globals(), *found})
