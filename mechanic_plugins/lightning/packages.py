"""The installed Lightning packages. Imported first, so that a missing one is reported with the pip command."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__ = ["LIGHTNINGS", "check_version", "installed", "rank_zero_info", "rank_zero_warn"]

_OLDEST = (2, 5)


def check_version(package: str, version: str) -> None:
    """Rejects untested versions."""
    numbers = re.match(r"(\d+)\.(\d+)", version)  # also matches "2.7rc1" and "2.6.dev0+abc"
    if numbers is not None and tuple(map(int, numbers.groups())) < _OLDEST:
        raise ImportError(
            f"{package} {version} is too old: Mechanic's callback needs {'.'.join(map(str, _OLDEST))} or later. "
            f"pip install --upgrade {package.partition('.')[0].replace('_', '-')}"
        )


def installed() -> list[ModuleType]:
    """`lightning.pytorch`, `pytorch_lightning` or both."""
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


LIGHTNINGS = installed()

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn  # noqa: E402
