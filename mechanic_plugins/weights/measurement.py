"""How much one step changes the layers, at the steps that the default rule measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.distributed.layout import Layout
from mechanic_plugins.distributed.reduction import Shares
from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.weights.changes import Changes
from mechanic_plugins.weights.host_sums import exact
from mechanic_plugins.weights.slots import MASTER, REF, is_16_bit

__all__ = ["Measurement", "median_change"]


class Measurement:
    """Copies the weights that a step is about to move, and compares them with what has become of them."""

    def __init__(
        self, base: Optimizer, params: Sequence[Tensor], layout: Layout, shares: Shares, *, has_moved: Sequence[bool]
    ) -> None:
        """Called before the move.

        Args:
            base: The base optimizer.
            params: The parameters to compare.
            layout: Theirs.
            shares: How they are counted.
            has_moved: Whether each one's tuner had a scale before this step: else the weights are at their start.
        """
        self._base, self._params = base, params
        weights = [_weights(base, p) for p in params]
        self._olds = [None if p.grad is None else x.clone() for p, x in zip(params, weights, strict=True)]
        self._updates: dict[Tensor, Tensor] = {}
        grads = [local(p.grad) for p in params]
        kept = [base.state.get(p, {}).get(REF) if moved else None for p, moved in zip(params, has_moved, strict=True)]
        starts = [x if each is None else local(each) for x, each in zip(weights, kept, strict=True)]
        factors = [shares.weights.get(id(p), 1.0) for p in params]
        self._before = Changes.before(weights, grads, starts, layout, factors, shares.reduction)

    def changes(self, unapplied: Mapping[Tensor, Tensor]) -> list[tuple[float, bool]]:
        """The relative change of each whole parameter, and whether it is a matrix: see `Changes.after`.

        Called after the move. `unapplied` has the updates that were only measured: their weights have not moved.
        """
        for p, old in zip(self._params, self._olds, strict=True):
            if p in unapplied:
                self._updates[p] = unapplied[p]
            elif old is not None:
                self._updates[p] = torch.sub(_weights(self._base, p), old, out=old)
        return self._before.after([self._updates.get(p) for p in self._params])

    def take_back(self, params: Iterable[Tensor]) -> None:
        """Puts these weights back to where they were before the step."""
        for p in params:
            if p in self._updates:
                x = _weights(self._base, p).sub_(self._updates[p])
                local(p).detach().copy_(x)
                if MASTER in self._base.state.get(p, {}):
                    local(self._base.state[p][MASTER]).copy_(x)


def median_change(changes: Iterable[tuple[float, bool]]) -> float:
    """The median change of the matrices or, if that is larger, of the vectors; 0 if nothing has changed.

    In most networks it is that of the matrices. Where gradients vanish on the way down, biases move a hundred times as
    far as weights, in relation, and would kill the units that they belong to.
    """
    changed = [(change, is_matrix) for change, is_matrix in changes if change > 0]
    kinds = [[change for change, is_matrix in changed if is_matrix == kind] for kind in (True, False)]
    return max((median_low(kind) for kind in kinds if kind), default=0.0)


def _weights(base: Optimizer, p: Tensor) -> Tensor:
    """This rank's weights in full precision."""
    master = base.state.get(p, {}).get(MASTER)
    if master is not None:
        return exact(local(p), local(master))
    x: Tensor = local(p).detach()
    return x.float() if is_16_bit(x.dtype) else x
