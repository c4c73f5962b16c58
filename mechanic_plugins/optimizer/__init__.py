"""The optimizer that `mechanize` returns."""

from mechanic_plugins.optimizer.step import MechanicOptimizer

__all__ = ["MechanicOptimizer"]
