"""The optimizers that are measured."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mechanic_plugins import api
from mechanic_plugins.lion import Lion

__all__ = ["Factory", "bases", "rivals"]

Factory = Callable[[list[nn.Parameter]], Any]


def bases(device: torch.device) -> dict[str, Factory]:
    """The plain optimizers, in the form most used on the device: fused on a GPU, foreach on a CPU."""
    return _bases("fused" if device.type == "cuda" else "foreach")


def _bases(form: str | None) -> dict[str, Factory]:
    fast: dict[str, Any] = {} if form is None else {form: True}
    return {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, **fast),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, **fast),
        "lion": lambda params: Lion(params, lr=1e-3),
    }


def rivals(base: str, device: torch.device, *, max_grad_norm: float | None = None) -> dict[str, Factory]:
    """Mechanic with every backend that works on the device, and similar packages that are installed.

    With `max_grad_norm` Mechanic clips in its step; the others leave it to their caller.
    """
    plain = bases(device)[base]
    mechanize = functools.partial(api.mechanize, max_grad_norm=max_grad_norm)
    backends = ("fused", "triton", "foreach") if device.type == "cuda" else ("foreach",)
    found: dict[str, Factory] = {
        f"mechanic, {backend}": lambda params, backend=backend: mechanize(plain(params), backend=backend)  # type: ignore[misc]
        for backend in backends
    }
    if device.type != "cuda" and base != "lion":
        as_it_comes = _bases(None)[base]
        found["base alone, fused"] = _bases("fused")[base]
        found["mechanic"] = lambda params: mechanize(as_it_comes(params))
    if base != "adamw":
        return found
    peers: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
        "mechanic_pytorch": lambda module, params: module.mechanize(torch.optim.AdamW)(params, lr=1.0),
        "prodigyopt": lambda module, params: module.Prodigy(params),
        "dadaptation": lambda module, params: module.DAdaptAdam(params),
        "schedulefree": _schedule_free,
    }
    for name, build in peers.items():
        module = _installed(name)
        if module is not None:
            found[name] = functools.partial(build, module)
    return found


def _schedule_free(module: Any, params: list[nn.Parameter]) -> Any:
    optimizer = module.AdamWScheduleFree(params)
    optimizer.train()
    return optimizer


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
