"""The tuner's step as a CUDA graph: for GPUs without Triton.

By torch operations it is some two hundred of them on a few numbers each, and a GPU waits for the host to start them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.core import tuner
from mechanic_plugins.core.settings import Settings
from mechanic_plugins.core.tuner import Outcome
from mechanic_plugins.core.tuner_state import TunerState
from mechanic_plugins.kernels.cuda import captured
from mechanic_plugins.kernels.gpu_tuner import packed_copy, unpacked

__all__ = ["RecordedTuner"]


class RecordedTuner:
    """`mechanic_plugins.core.tuner.decide`, with all but the data as it was when it was recorded.

    Args:
        key: What it was recorded with.
        state: The tuner before the step.
        sums: The vector of a step.
        counters: Steps applied and steps skipped.
        settings: The constants, in the units of delta.
        betas: `settings.betas` on the device.
        hold: Leave the scale as it is.
        max_grad_norm: Take the gradients for clipped to this norm.
    """

    def __init__(
        self,
        key: Any,
        state: TunerState,
        sums: Tensor,
        counters: Tensor,
        *,
        settings: Settings,
        betas: Tensor,
        hold: bool,
        max_grad_norm: float | None,
    ) -> None:
        self.key = key
        self._row, before, counted = packed_copy(state, counters)
        self._sums, self._lrs = sums.clone(), torch.zeros_like(before.lr)
        self._written: Sequence[float] = [0.0] * len(self._lrs)

        def launch() -> tuple[Outcome, Tensor]:
            how: dict[str, Any] = {"settings": settings, "betas": betas, "hold": hold, "max_grad_norm": max_grad_norm}
            outcome = tuner.decide(before, self._sums, counted, lr=self._lrs, **how)
            return outcome, packed_copy(outcome.state, outcome.counters)[0]

        self._graph, (self._outcome, self._after) = captured(launch, sums.device)

    def decide(self, state: TunerState, sums: Tensor, counters: Tensor, lrs: Sequence[float]) -> Outcome:
        """The outcome of a step, good until the next; its state and counters stay as they are."""
        for row, old, new in zip(self._lrs, self._written, lrs, strict=True):
            if old != new:
                row.fill_(new)
        self._written = lrs
        self._row.copy_(packed_copy(state, counters)[0])
        self._sums.copy_(sums)
        self._graph.replay()
        new_state, new_counters = unpacked(self._after.clone(), tuners=len(self._lrs))
        return self._outcome._replace(state=new_state, counters=new_counters)
