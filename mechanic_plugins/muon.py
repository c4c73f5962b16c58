"""Muon for a whole model: torch's Muon takes matrices only, AdamW takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["MuonWithAdamW"]

_USE_MUON = "use_muon"


class MuonWithAdamW(Optimizer):
    """One optimizer for all parameters: `torch.optim.Muon` for the matrices, `torch.optim.AdamW` for all others.

        opt = MuonWithAdamW(model.parameters(), adamw_params=model.get_input_embeddings().parameters())

    One lr serves both: Muon's steps are given the length of AdamW's (`adjust_lr_fn="match_rms_adamw"`). Each param
    group is split in two; `group["use_muon"]` says which half it is.

    Args:
        params: Parameters or param groups.
        adamw_params: Matrices for AdamW: embeddings and the output layer.
        lr: The learning rate of both.
        weight_decay: Decoupled, for both.
        momentum: Muon's.
        nesterov: Muon's.
        ns_steps: Muon's Newton-Schulz iterations.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ImportError: torch is older than 2.9, which brought Muon.
        ValueError: The parameters are FSDP1's flat slices, not matrices.
    """

    linear_in_lr = True
    """Both updates are proportional to lr: Mechanic may step them at lr=1."""

    def __init__(
        self,
        params: ParamsT,
        *,
        adamw_params: Iterable[Tensor] = (),
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        halves = {True: {**_muon().defaults, **muon}, False: {**_adamw().defaults, "betas": betas, "eps": eps}}
        for settings in halves.values():
            settings.update(lr=lr, weight_decay=weight_decay)
        others = {id(p) for p in adamw_params}
        groups = [half for group in _as_groups(params) for half in _split(group, others, halves)]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of matrices or of other parameters, with the settings of the half that it joins.

        Raises:
            ValueError: The group holds both.
        """
        if _USE_MUON not in param_group:
            halves = list(_split(_as_groups([param_group])[0], set(), {True: {}, False: {}}))
            if len(halves) > 1:
                raise ValueError(
                    "a param group added to Muon must hold matrices or other parameters, got both: add two groups."
                )
            param_group = {**self._settings_of(halves[0][_USE_MUON]), **halves[0]}
        super().add_param_group(param_group)

    def _settings_of(self, use_muon: bool) -> dict[str, Any]:
        known = next((group for group in self.param_groups if group[_USE_MUON] is use_muon), None)
        settings = (_muon() if use_muon else _adamw()).defaults if known is None else known
        return {k: v for k, v in settings.items() if k not in self.defaults and k not in ("params", "param_names")}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_flat_shards()
        for use_muon, build in ((True, _muon), (False, _adamw)):
            worker = self._worker(build)
            worker.state = self.state
            worker.param_groups = [group for group in self.param_groups if group[_USE_MUON] is use_muon]
            worker.step()
        return loss

    def _worker(self, build: Callable[[], Any]) -> Any:
        """Creates the inner optimizer on demand: pickles and copies keep only groups and state."""
        workers = self.__dict__.setdefault("_workers", {})
        if build not in workers:
            workers[build] = build()
        return workers[build]

    def _refuse_flat_shards(self) -> None:
        shapes = [tuple(p.shape) for group in self.param_groups if group[_USE_MUON] for p in group["params"]]
        if flat := [shape for shape in shapes if len(shape) != 2]:
            raise RuntimeError(
                f"Muon orthogonalises whole matrices, and a parameter has shape {flat[0]}: ZeRO and FSDP1 cut them "
                "into flat pieces. Use DDP or FSDP2 with it, or another optimizer."
            )


def _muon() -> Any:
    """Torch's Muon on a placeholder. Each step lends it our groups and state."""
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(f"torch {torch.__version__} has no Muon: pip install 'torch>=2.9'")
    return torch.optim.Muon([torch.zeros(1, 1)])


def _adamw() -> Any:
    return AdamW([torch.zeros(1)])


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    entries: list[Any] = list(params)
    entries = entries if not entries or isinstance(entries[0], dict) else [{"params": entries}]
    lists = [[e["params"]] if isinstance(e["params"], Tensor) else list(e["params"]) for e in entries]
    return [{**entry, "params": each} for entry, each in zip(entries, lists, strict=True)]


def _split(group: dict[str, Any], others: set[int], settings: dict[bool, dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Splits a group into halves. Names stay with their parameters; an empty group stays one group."""
    halves: dict[bool, list[Any]] = {True: [], False: []}
    names, params = group.pop("param_names", None), group.pop("params")
    for entry in params if names is None else zip(names, params, strict=True):
        p = entry[1] if isinstance(entry, tuple) else entry
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError("Muon needs whole matrices, and FSDP1 cuts them into flat pieces: use FSDP2.")
        halves[p.ndim == 2 and id(p) not in others].append(entry)
    for use_muon, half in halves.items():
        if half or not (use_muon or halves[True]):
            yield {**settings[use_muon], **group, "params": half, _USE_MUON: use_muon}
