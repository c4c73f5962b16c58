"""What people, loggers and plugins read off a mechanized optimizer."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.optimizer.learned import Learned, on
from mechanic_plugins.optimizer.skips import Skips
from mechanic_plugins.rule.default import PATIENCE, TOP, DefaultTuner
from mechanic_plugins.rule.schedule import peak_lr
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.sums import WIDTH, Sums, gradient_norm

__all__ = ["Readings", "TunerState", "names_of"]

Group = dict[str, Any]
_DD = Sums._fields.index("dd")


class TunerState(NamedTuple):
    """The tuner's state, for research: n-vectors, or one row per param group. The default rule has n = 1.

    With the default rule, s is the scale, r the evidence, and v and m are the moving sums of z^2 and the steps.
    """

    s: Tensor
    r: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor


_LISTS = ("s", "r", "m", "v")
_OF_DEFAULT = ("scale", "evidence", "z_count", "z_squares")


class Readings:
    """`scale`, `scales`, `grad_norm` and `tuner` do not wait for the device; what returns floats does."""

    if TYPE_CHECKING:
        param_groups: list[Group]
        settings: Settings
        _skips: Skips

        @property
        def _learned(self) -> Learned: ...

        def _tuner_of(self, group: Group) -> int: ...

    @property
    def _device(self) -> torch.device:
        """The parameters' device, or the CPU if that one has no float64 or no data."""
        for group in self.param_groups:
            for p in group["params"]:
                device: torch.device = local(p).device
                return torch.device("cpu") if device.type in ("meta", "mps") else device
        return torch.device("cpu")

    @property
    def learned(self) -> Tensor:
        """`learned_lrs` as a tensor, without waiting for the device."""
        learned, groups = self._learned, self.param_groups
        far, long, tops = (learned.column(name, self._device) for name in ("sum_scale_lr", "sum_lr", "top_lr"))
        means = torch.where(long > 0, far / long.clamp(min=1e-300), 0.0)
        owners, course = [self._tuner_of(group) for group in groups], learned.course
        peaks = [course.get(index, (0.0, 0.0))[1] if course else tops[owner] for index, owner in enumerate(owners)]
        return torch.stack([means[owner] * peak for owner, peak in zip(owners, peaks, strict=True)])

    @property
    def learned_lrs(self) -> list[float]:
        """The learned learning rate of each group. Synchronises with the device.

        The mean rate in force over the mean place in the schedule: the fixed peak that would have gone as far. A group
        whose lr was changed by hand, or that was added late, has its present share of it. It is the number to give to a
        plain optimizer; by a published rule, which rescales past updates, a plain optimizer at it makes another run. 0
        if nothing has been learned yet.
        """
        lrs: list[float] = self.learned.tolist()
        return lrs

    @property
    def top_lrs(self) -> list[float]:
        """Per group, the base's lr at the schedule's top; 0 for a group that is held at 0."""
        course = self._learned.course
        return [
            course.get(index, (0.0, 0.0))[1] if course else peak_lr(group)
            for index, group in enumerate(self.param_groups)
        ]

    @property
    def learned_lr(self) -> float:
        """The largest of `learned_lrs`."""
        return max(self.learned_lrs, default=0.0)

    @property
    def scale(self) -> Tensor:
        """The learned factor on the learning rate, as a 0-dim tensor; with `scope="group"`, the largest one."""
        return self._learned.column("scale", self._device).max()

    @property
    def scales(self) -> Tensor:
        """The learned factor of each param group."""
        scales = self._learned.column("scale", self._device)
        if len(scales) == 1:
            return scales.clone().expand(len(self.param_groups))  # a captured step would overwrite them
        return torch.stack([scales[self._tuner_of(group)] for group in self.param_groups])

    @property
    def effective_lrs(self) -> list[float]:
        """Per group, scale times the lr of the last step: what a plain optimizer's lr would be.

        Synchronises with the device.
        """
        return [scale * float(lr) for scale, lr in zip(self.scales.tolist(), self.lrs, strict=True)]

    @property
    def lrs(self) -> list[float | Tensor]:
        """Per group, the lr of the last step, which a scheduler may have changed since; 1 if the base has none."""
        noted = self._learned.last_lrs
        lrs = noted + [group.get("lr") for group in self.param_groups[len(noted) :]]
        return [1.0 if lr is None else lr for lr in lrs]

    @property
    def tuner(self) -> TunerState:
        """The tuner's vectors, in units of the base's own learning rate."""
        learned = self._learned
        if self.settings.rule == "relative":
            tensors = [learned.column(name, self._device)[:, None].clone() for name in _OF_DEFAULT]
        else:
            tensors = [learned.lists(name, self._device).clone() for name in _LISTS]
        s, r, m, v = tensors if self.settings.scope == "group" else [tensor[0] for tensor in tensors]
        return TunerState(s, r, m, v, learned.column("steps", self._device)[0].clone())

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last step, over all ranks and before clipping, as a 0-dim tensor.

        0 before the first step; not finite if the last step was skipped for that reason.
        """
        sums = self._learned.last_sums
        if isinstance(sums, Tensor):
            return gradient_norm(sums)
        return on(self._device, [math.sqrt(sum((sums or [0.0])[1:-1:WIDTH]))])[0]

    @property
    def moved(self) -> Tensor:
        """The distance of the weights from where they started, at the last step: a 0-dim tensor.

        0 before the first move. NaN where it is unknown: between a load and the next step, after
        `freeze(release=True)`, and with a published rule.
        """
        learned, sums = self._learned, self._learned.last_sums
        unknown = torch.full((), math.nan, dtype=torch.float64, device=self._device)
        if self.settings.rule != "relative" or learned.released:
            return unknown
        if sums is None:
            return torch.where(learned.column("steps", self._device)[0] > 0, math.nan, 0.0)
        if isinstance(sums, Tensor):
            return sums[_DD:-1:WIDTH].sum().sqrt()
        return on(self._device, [math.sqrt(max(sum(sums[_DD:-1:WIDTH]), 0.0))])[0]

    @property
    def path(self) -> float:
        """The sum of the steps' changes of the median layer, as shares of its size. Synchronises with the device.

        With `scope="group"`, the largest one. NaN with a published rule.
        """
        tuners = [tuner for tuner in self._learned.wait_for_tuners() if isinstance(tuner, DefaultTuner)]
        return max((tuner.sum_scale_lr * math.sqrt(tuner.change_square) for tuner in tuners), default=math.nan)

    @property
    def agreement(self) -> float:
        """The evidence as a share of what it would be had all steps been favourable. Synchronises with the device.

        With `scope="group"`, the largest one. NaN before there is any, and with a published rule.
        """
        tuners = [tuner for tuner in self._learned.wait_for_tuners() if isinstance(tuner, DefaultTuner)]
        shares = [
            tuner.evidence / ((1 + TOP) * math.log1p(tuner.full_steps / PATIENCE))
            for tuner in tuners
            if tuner.full_steps > 0
        ]
        return max(shares, default=math.nan)

    def metrics(self) -> dict[str, float]:
        """What to log, as Python floats. Synchronises with the device once."""
        learned, groups = self._learned, len(self.param_groups)
        signal, counts = (
            learned.column("signal", self._device),
            [learned.column(name, self._device)[0] for name in ("steps", "skipped")],
        )
        last = torch.stack([*counts, self.grad_norm, self.moved])
        packed = torch.cat([self.scales, signal, last]).tolist()
        scales, h, (steps, skipped, norm, moved) = packed[:groups], packed[groups:-4], packed[-4:]
        lrs = [scale * float(lr) for scale, lr in zip(scales, self.lrs, strict=True)]
        metrics = {"mechanic/scale": max(scales), "mechanic/effective_lr": max(lrs), "mechanic/h": sum(h)}
        metrics |= {"mechanic/grad_norm": norm} | ({} if math.isnan(moved) else {"mechanic/moved": moved})
        if groups > 1:
            for name, scale, lr in zip(names_of(self.param_groups), scales, lrs, strict=True):
                metrics[f"mechanic/scale/{name}"], metrics[f"mechanic/effective_lr/{name}"] = scale, lr
        if skipped:
            self._warn_of_skips(int(steps), int(skipped))
        return {**metrics, "mechanic/steps": steps, "mechanic/skipped_steps": skipped}

    def _warn_of_skips(self, steps: int, skipped: int) -> None:
        text = self._skips.warning(self.param_groups, steps=steps, skipped=skipped)
        if text is not None:
            warnings.warn(text, stacklevel=3)


def names_of(groups: Sequence[Group]) -> list[str]:
    """Each group's "name", or pg1, pg2, ... for groups without a unique one; no two are alike."""
    given = [None if group.get("name") is None else str(group["name"]) for group in groups]
    count = Counter(given)
    names = []
    for place, name in enumerate(given, start=1):
        if name is None or count[name] > 1:
            name = f"pg{place}"
            while count[name] == 1:  # another group's own
                name += "_"
        names.append(name)
    return names
