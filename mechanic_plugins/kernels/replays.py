"""Operations of torch as CUDA graphs, one for each set of places in memory that comes again and again.

A graph knows the places of the tensors that it was captured with. Weights and deltas stay where they are; gradients
come back to a few places, since every step allocates and frees the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from mechanic_plugins.kernels.cuda import captured, is_capturing

__all__ = ["Replays"]

_log = logging.getLogger(__name__)
_OFTEN = 4
"""How often a key is seen before it is recorded."""
_GRAPHS = 8
"""The most that are kept. Gradients were seen in six places by turns."""
_FORGOTTEN = 64
"""Calls after which a graph that was not replayed makes room, and the most keys that are remembered."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    result: Any
    last_call: int


class Replays:
    """Of one function that works in memory which its caller holds; little of its own, since a graph keeps that."""

    can_record = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._calls = 0
        self._where: dict[str, Any] = {}
        """The stream and the pool that all are captured in, so that they share what memory they keep."""

    def __call__(self, key: Hashable, launch: Callable[[], Any]) -> Any:
        """Launches, or replays what was launched with this key; what it returns is good until the next call.

        The key says all that the launches depend on but data, and the place of every tensor that they touch.
        """
        if not self.can_record or self._device.type != "cuda" or is_capturing(self._device):
            return launch()
        self._calls += 1
        recorded = self._graphs.get(key) or self._recorded(key, launch)
        if recorded is None:
            return launch()
        recorded.last_call = self._calls
        recorded.graph.replay()
        return recorded.result

    def _recorded(self, key: Hashable, launch: Callable[[], Any]) -> _Graph | None:
        if len(self._seen) == _FORGOTTEN:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] < _OFTEN or not self._makes_room():
            return None
        del self._seen[key]
        try:
            self._where = self._where or self._a_stream_and_a_pool()
            self._graphs[key] = _Graph(*captured(launch, self._device, **self._where), last_call=self._calls)
        except RuntimeError as error:
            _log.info("a pass over memory is not recorded as a CUDA graph: %s", error)
            self.can_record = False
            return None
        return self._graphs[key]

    def _makes_room(self) -> bool:
        """Never at the cost of a graph that is still in use."""
        if len(self._graphs) < _GRAPHS:
            return True
        key, oldest = min(self._graphs.items(), key=lambda item: item[1].last_call)
        if self._calls - oldest.last_call < _FORGOTTEN:
            return False
        del self._graphs[key]
        return True

    def _a_stream_and_a_pool(self) -> dict[str, Any]:
        return {"stream": torch.cuda.Stream(self._device), "pool": torch.cuda.graph_pool_handle()}  # type: ignore[no-untyped-call]
