"""What people and loggers read off a mechanized optimizer."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.checkpoints.state import Progress
from mechanic_plugins.core.groups import average, names_of
from mechanic_plugins.core.tuner_state import SUMS, gradient_norm
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
        """A scheduler may change the lr before the effective one is read."""
        lrs = [dict.get(group, "lr") for group in self.param_groups]
        self._last_lrs = [lr if type(lr) is float or not isinstance(lr, Tensor) else lr.detach().clone() for lr in lrs]

    @property
    def learned(self) -> Tensor:
        """As `learned_lrs`, on the device."""
        progress, unit = self._progress, self._units.of_scale(self._progress)
        far, time, top = (progress.tuner.column(name)[:, 0] for name in ("travelled", "elapsed", "lr"))
        peaks = torch.where(time > 0, far / time.clamp(min=1e-300) * top / unit, 0.0)
        owners = [progress.tuner_of(group) for group in self.param_groups]
        first = [progress.lr_refs.get(place, 0.0) for place in range(len(owners))]
        largest = {owner: max(lr for lr, o in zip(first, owners, strict=True) if o == owner) for owner in owners}
        shares = [lr / largest[owner] if largest[owner] > 0 else 1.0 for lr, owner in zip(first, owners, strict=True)]
        return torch.stack([peaks[owner] * share for owner, share in zip(owners, shares, strict=True)])

    @property
    def learned_lrs(self) -> list[float]:
        """The learned learning rate of each group. Synchronises with the device.

        The peak of the schedule times the mean scale: the fixed peak that would have taken the run as far. This is the
        number to write into a plain optimizer. 0 before anything was learned.
        """
        numbers: list[float] = self.learned.tolist()
        return numbers

    @property
    def learned_lr(self) -> float:
        """The largest of `learned_lrs`."""
        return max(self.learned_lrs, default=0.0)

    @property
    def scale(self) -> Tensor:
        """The learned factor on the learning rate, a 0-dim tensor; with `scope="group"` the largest group's."""
        return self.scales.max()

    @property
    def scales(self) -> Tensor:
        """The learned factor of each param group."""
        played = self._progress.tuner.played / self._units.of_scale(self._progress)
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
        state, unit = self._progress.tuner, self._units.of_scale(self._progress)
        s, r, m, v = (state.column(name) for name in "srmv")
        if self.settings.rule != "relative":
            m, v = m * unit, v * unit**2
        s, r, m, v = (t if self.settings.scope == "group" else t[0] for t in (s / unit, r, m, v))
        steps = state.flat[-2]
        return Tuner(s, r.clone(), m.clone(), v.clone(), steps.clone())  # a recorded step writes them over

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients that the last step was given, on all ranks, before it clipped them: 0-dim.

        0 before the first step; not finite where that is why a step was skipped.
        """
        sums = self._last.get("sums")
        device = self._progress.tuner.device
        if sums is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return gradient_norm(torch.as_tensor(sums, dtype=torch.float64, device=device))

    @property
    def moved(self) -> Tensor:
        """How far the last step found the weights from their start, as a share of their size: 0-dim.

        0 before the first move. Not a number where it is not known: between a load and the next step, after
        `freeze(release=True)`, and with a published rule or after a checkpoint of one, which has not measured the size.
        """
        progress, tuner, sums = self._progress, self._progress.tuner, self._last.get("sums")
        if self.settings.rule != "relative" or progress.released:
            return torch.full((), math.nan, dtype=torch.float64, device=tuner.device)
        size, touched, path = (tuner.column(name)[:, 0] for name in ("size", "touched", "path"))
        whole = torch.where(path < 0, math.nan, size.square() * touched).sum()
        if sums is None:
            return torch.where(tuner.flat[-2] > 0, math.nan, 0.0)
        far = torch.as_tensor(sums, dtype=torch.float64, device=tuner.device)[SUMS.index("dd") : -1 : len(SUMS)].sum()
        return torch.where(whole > 0, far / whole, whole).sqrt()

    def metrics(self) -> dict[str, float]:
        """What to log, as python floats. Synchronises with the device once."""
        progress, unit = self._progress, self._units.of_scale(self._progress)
        hs = progress.tuner.column("h")[:, 0] * unit
        last = self.grad_norm.view(1), self.moved.view(1)
        packed = torch.cat([self.scales, hs, progress.tuner.flat[-2:], *last]).tolist()
        scales, h, (steps, skipped, norm, moved) = (
            packed[: len(self.scales)],
            packed[len(self.scales) : -4],
            packed[-4:],
        )
        lrs = self.effective_lrs
        metrics = {"mechanic/scale": max(scales), "mechanic/effective_lr": max(lrs), "mechanic/h": sum(h)}
        metrics |= {"mechanic/grad_norm": norm} | ({} if math.isnan(moved) else {"mechanic/moved": moved})
        if len(self.param_groups) > 1:
            for index, name in enumerate(names_of(self.param_groups)):
                metrics[f"mechanic/scale/{name}"] = scales[index]
                metrics[f"mechanic/effective_lr/{name}"] = lrs[index]
        if skipped:
            self._warn_of_skips(progress)
        return {**metrics, "mechanic/steps": steps, "mechanic/skipped_steps": skipped}

    def _warn_of_skips(self, progress: Progress) -> None:
        steps, skipped = map(int, progress.tuner.counts)
        text = self._skips.warning(self.param_groups, steps=steps, skipped=skipped)
        if text is not None:
            warnings.warn(text, stacklevel=3)
