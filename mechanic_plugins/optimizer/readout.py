"""What people and loggers read off a mechanized optimizer."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core.groups import average, names_of
from mechanic_plugins.core.tuner_state import gradient_norm
from mechanic_plugins.optimizer.interface import Wrapper

__all__ = ["Readout", "Tuner"]


class Tuner(NamedTuple):
    """The tuner's state in units of the base's own learning rate: n-vectors, or one row for each param group."""

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor


class Readout(Wrapper):
    """The scale, the learning rates and the metrics.

    `scale`, `grad_norm` and `tuner` do not synchronise with the device; `effective_lrs` and `metrics()` do.
    """

    def _note_lrs(self) -> None:
        """A scheduler may change the lr before somebody asks for the effective one."""
        lrs = (group.get("lr") for group in self.param_groups)
        self._last_lrs = [lr.detach().clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        now = torch.stack([scale * lr for scale, lr in zip(self.scales, self.lrs, strict=True)]).max()
        self._held["peak_lr"] = now if self._highest is None else torch.maximum(self._highest.to(now), now)  # type: ignore[assignment]

    @property
    def _highest(self) -> Tensor | None:
        return self._held.get("peak_lr")  # type: ignore[return-value]

    @property
    def learned_lr(self) -> float:
        """The learned learning rate: the highest scale * lr in force so far, of all groups. Synchronises.

        This is the number to write into a plain optimizer.
        """
        return max(self.effective_lrs) if self._highest is None else float(self._highest)

    @property
    def scale(self) -> Tensor:
        """The learned factor on the learning rate, a 0-dim tensor; with `scope="group"` the largest group's."""
        return self.scales.max()

    @property
    def scales(self) -> Tensor:
        """The learned factor of each param group."""
        played = self._progress.tuner.played[:, 0] / self._units.of_delta(self._progress)
        return played.expand(len(self.param_groups))

    @property
    def effective_lrs(self) -> list[float]:
        """For each group, scale times the lr of the last step: what a plain optimizer's lr would be.

        Synchronises with the device.
        """
        return [s * float(lr) for s, lr in zip(self.scales.tolist(), self.lrs, strict=True)]

    def get_avg_learning_rate(self) -> float:
        """The mean of `effective_lrs` over all weights, under the name that ai-toolkit looks for.

        Synchronises with the device.
        """
        return average(self.effective_lrs, self.param_groups)

    @property
    def lrs(self) -> list[float | Tensor]:
        """For each group the lr of the last step, which a scheduler may have changed since; 1 for a base without."""
        noted = self._last_lrs or []
        lrs = noted + [group.get("lr") for group in self.param_groups[len(noted) :]]
        return [1.0 if lr is None else lr for lr in lrs]

    @property
    def tuner(self) -> Tuner:
        """The tuner's vectors, in units of the base's own learning rate."""
        state, unit = self._progress.tuner, self._units.of_delta(self._progress)
        vectors = (state.s / unit, state.r, state.m * unit, state.v * unit**2)
        s, r, m, v = vectors if self.settings.scope == "group" else (t[0] for t in vectors)
        return Tuner(s, r.clone(), m, v, self._progress.steps.clone())  # a recorded step writes them over

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients that the last step was given, on all ranks, before it clipped them: 0-dim.

        0 before the first step; not finite where that is why a step was skipped.
        """
        sums = self._last.get("sums")
        return torch.zeros_like(self._progress.steps) if sums is None else gradient_norm(sums)

    def metrics(self) -> dict[str, float]:
        """What to log, as python floats. Synchronises with the device once."""
        progress, unit = self._progress, self._units.of_delta(self._progress)
        hs = progress.tuner.h[:, 0] * unit
        counts = torch.stack([progress.steps, progress.skipped, self.grad_norm])
        packed = torch.cat([self.scales, hs, counts]).tolist()
        scales, h, (steps, skipped, norm) = packed[: len(self.scales)], packed[len(self.scales) : -3], packed[-3:]
        lrs = self.effective_lrs
        metrics = {"mechanic/scale": max(scales), "mechanic/effective_lr": max(lrs), "mechanic/h": sum(h)}
        metrics["mechanic/grad_norm"] = norm
        if len(self.param_groups) > 1:
            for index, name in enumerate(names_of(self.param_groups)):
                metrics[f"mechanic/scale/{name}"] = scales[index]
                metrics[f"mechanic/effective_lr/{name}"] = lrs[index]
        if skipped:
            self._warn_of_skips(progress)
        return {**metrics, "mechanic/steps": steps, "mechanic/skipped_steps": skipped}

    def _warn_of_skips(self, progress: Progress) -> None:
        steps, skipped = int(progress.steps), int(progress.skipped)
        text = self._skips.warning(self.param_groups, steps=steps, skipped=skipped)
        if text is not None:
            warnings.warn(text, stacklevel=3)
