"""Train without tuning the learning rate: `mechanize` any torch optimizer."""

from mechanic_plugins.api import Mechanized as Mechanized
from mechanic_plugins.api import demechanize as demechanize
from mechanic_plugins.api import mechanize as mechanize
from mechanic_plugins.optimizer import MechanicOptimizer as MechanicOptimizer

__version__ = "0.1.0"
