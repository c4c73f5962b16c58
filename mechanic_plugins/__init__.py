"""Train without tuning the learning rate: `mechanize` any torch optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mechanic_plugins.api import demechanize as demechanize
    from mechanic_plugins.api import mechanize as mechanize
    from mechanic_plugins.api import unwrap as unwrap
    from mechanic_plugins.classes import Mechanized as Mechanized
    from mechanic_plugins.optimizer import MechanicOptimizer as MechanicOptimizer
    from mechanic_plugins.rule.settings import Settings as Settings

__version__ = "0.2.0"

_HOMES = {
    "MechanicOptimizer": "optimizer",
    "Mechanized": "classes",
    "Settings": "rule.settings",
    "demechanize": "api",
    "mechanize": "api",
    "unwrap": "api",
}

__all__ = ["MechanicOptimizer", "Mechanized", "Settings", "demechanize", "mechanize", "unwrap"]


if not TYPE_CHECKING:  # or mypy accepts any name

    def __getattr__(name: str) -> object:
        """Imports torch on first use: a script under the runner may have to configure it first."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
