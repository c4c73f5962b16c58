"""The installed Lightning packages. Imported first, to report a missing one with the pip command."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["LIGHTNINGS", "Callback", "installed", "rank_zero_info", "rank_zero_warn"]


def installed() -> list[ModuleType]:
    """`lightning.pytorch`, `pytorch_lightning` or both."""
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.partition(".")[0])]
    if not names:
        raise ImportError(
            "mechanic_plugins.lightning needs Lightning: pip install 'mechanic-plugins[lightning]', "
            "or 'mechanic-plugins[pytorch-lightning]' for the older name."
        )
    return [import_module(name) for name in names]


LIGHTNINGS = installed()

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # Trainer and LightningCLI check for their own package's class
    Callback = type("Callback", tuple(module.Callback for module in LIGHTNINGS), {})

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn  # noqa: E402
