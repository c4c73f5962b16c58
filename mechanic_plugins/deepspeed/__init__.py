"""DeepSpeed: import this module, then hand a mechanized optimizer to `deepspeed.initialize`.

    import deepspeed
    import mechanic_plugins.deepspeed
    from mechanic_plugins import mechanize

    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.scale  # as everywhere

or write it into the config: `"optimizer": {"type": "MechanicAdamW", "params": {"lr": 1.0, "s_decay": 0.0}}`.

ZeRO gives each rank a piece of the weights and steps the optimizer once for each of its groups or sub-groups. The
scale needs inner products over all weights of all ranks before any of them moves. So DeepSpeed builds its ZeRO
optimizer around the base, whose type it checks; the mechanized optimizer is then put in the base's place, and the first
`unscale_and_clip_grads` of a step, where an overflow is ruled out and nothing has moved yet, sums over all pieces,
reduces once and decides the step. The steps that follow only move their own piece.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

try:
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import groups
except ImportError as error:
    raise ImportError(
        f"mechanic_plugins.deepspeed cannot import deepspeed ({error}): pip install 'mechanic-plugins[deepspeed]'"
    ) from error
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from mechanic_plugins.api import Options, mechanize
from mechanic_plugins.core.param_state import DELTA, ParamState
from mechanic_plugins.core.tuner import SUMS
from mechanic_plugins.deepspeed.refusals import refuse_unsupported
from mechanic_plugins.deepspeed.universal import mend_universal_load, mend_universal_load_of_stage3
from mechanic_plugins.distributed.reduction import AllReduce
from mechanic_plugins.distributed.sharding import Counting, reduction_for
from mechanic_plugins.optimizer import MechanicOptimizer

__all__ = ["NAMES", "attach", "install", "mechanic_of"]

NAMES = {
    f"Mechanic{cls.__name__}": cls
    for cls in (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
    )
}
"""What `"type"` may be in a config's `"optimizer"`, and the base it stands for."""


def mechanic_of(engine: Any) -> MechanicOptimizer | None:
    """The mechanized optimizer in the engine; None where there is none."""
    for candidate in (engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
        if isinstance(candidate, MechanicOptimizer):
            return candidate
    return None


def attach(engine: Any) -> MechanicOptimizer:
    """Lets the engine's mechanized optimizer see all ranks' pieces. Engines built after this import need no call.

    Raises:
        TypeError: The engine's optimizer is not mechanized.
        ValueError: The engine is set up in a way that Mechanic cannot follow.
    """
    mechanic = mechanic_of(engine)
    if mechanic is None:
        raise TypeError(
            f"the engine's optimizer is {type(engine.optimizer).__name__} and holds no mechanized one: "
            "pass mechanize(...) to deepspeed.initialize(optimizer=...)."
        )
    if mechanic.count is None:
        refuse_unsupported(engine, mechanic)
        _connect(engine, mechanic)
    return mechanic


# -------------------------------------------------------------------- how an engine attaches itself


def install() -> None:
    """Makes every engine that is built from now on attach itself, and config files know `NAMES`. Twice is harmless."""
    for name, cls in NAMES.items():
        setattr(torch.optim, name, functools.partial(_build, cls))  # where DeepSpeed looks up a name it does not know
    if not hasattr(DeepSpeedEngine._configure_optimizer, "_mechanic"):
        DeepSpeedEngine._configure_optimizer = _attaching(DeepSpeedEngine._configure_optimizer)
        DeepSpeedEngine._configure_basic_optimizer = _building(DeepSpeedEngine._configure_basic_optimizer)


def _attaching(original: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed gets the base, whose type it checks; what it builds around the base then gets the mechanized one."""

    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        if callable(client_optimizer) and not isinstance(client_optimizer, tuple(self._supported_optims())):
            client_optimizer = client_optimizer(model_parameters)
        if isinstance(client_optimizer, MechanicOptimizer):
            client_optimizer = _hand_over(self, client_optimizer)
        original(self, client_optimizer, model_parameters)
        mechanic = vars(self).pop("_mechanic", None)
        if mechanic is not None:
            _put_back(self, mechanic)
            attach(self)

    _configure_optimizer._mechanic = True  # type: ignore[attr-defined]
    return _configure_optimizer


def _building(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        cls = NAMES.get(self.optimizer_name())
        if cls is None:
            return original(self, model_parameters)
        params = dict(self.optimizer_params() or {})
        offloaded = self.zero_use_cpu_optimizer() and not params.pop("torch_adam", False)
        return _hand_over(self, _build(_cpu_adam(cls) if offloaded else cls, model_parameters, **params))

    return _configure_basic_optimizer


def _hand_over(engine: Any, mechanic: MechanicOptimizer) -> Optimizer:
    refuse_unsupported(engine, mechanic)
    mechanic.state_dict()  # the groups then hold what the tuner knows, whatever DeepSpeed makes of them
    engine._mechanic = mechanic
    return mechanic.base


def _build(cls: Callable[..., Optimizer], params: Any, **kwargs: Any) -> MechanicOptimizer:
    """From a config's "params": the base's and Mechanic's, which are called mechanic_betas and mechanic_eps."""
    known = Options.__annotations__.keys() - {"group"}
    names = {f"mechanic_{name}": name for name in known} | {name: name for name in known - {"betas", "eps"}}
    options = {names[key]: kwargs.pop(key) for key in list(kwargs) if key in names}
    return mechanize(cls(params, **kwargs), **options)


def _cpu_adam(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """What DeepSpeed itself takes for an offloaded "Adam" or "AdamW"."""
    if cls not in (torch.optim.Adam, torch.optim.AdamW):
        return cls
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return functools.partial(DeepSpeedCPUAdam, adamw_mode=cls is torch.optim.AdamW)


def _put_back(engine: Any, mechanic: MechanicOptimizer) -> None:
    holder = engine.optimizer
    if holder is mechanic.base:
        engine.optimizer = mechanic
    elif getattr(holder, "optimizer", None) is mechanic.base:
        holder.optimizer = mechanic
    else:
        raise ValueError(
            f"DeepSpeed replaced the {type(mechanic.base).__name__} it was given by another optimizer, which Mechanic "
            "cannot tune: use torch.optim.AdamW or DeepSpeedCPUAdam."
        )
    engine.basic_optimizer = mechanic
    mechanic._live = None  # DeepSpeed drops groups that are empty: read the others anew
    if isinstance(holder, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        _undo_dummy_step(holder, mechanic)


def _undo_dummy_step(holder: Any, mechanic: MechanicOptimizer) -> None:
    """To create its state, DeepSpeed steps the base once with zero gradients: weight decay at an lr of 1 would show."""
    mechanic.state.clear()
    for group in mechanic.param_groups:
        group.pop("step", None)  # FusedAdam counts there
    holder.refresh_fp32_params()


# -------------------------------------------------------------------- what attaching does


def _connect(engine: Any, mechanic: MechanicOptimizer) -> None:
    holder = engine.optimizer
    if type(holder) is DeepSpeedZeroOptimizer:
        _Conductor(mechanic, holder, _Stages1And2(holder)).take_over()
        mend_universal_load(holder, mechanic)
    elif type(holder) is DeepSpeedZeroOptimizer_Stage3:
        _Conductor(mechanic, holder, _Stage3(holder)).take_over()
        mend_universal_load_of_stage3(holder, mechanic)
    elif type(holder) is BF16_Optimizer:
        mechanic.count = functools.partial(_count_pieces, holder.dp_process_group)
        mend_universal_load(holder, mechanic)
    elif holder is mechanic or isinstance(holder, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        mechanic.count = _count_replicas(engine, mechanic)
    else:
        raise ValueError(
            f"Mechanic does not know {type(holder).__module__}.{type(holder).__name__}, which DeepSpeed put around the "
            "optimizer: use ZeRO stage 0 to 3 without its variants."
        )


def _count_pieces(group: Any, params: Sequence[Tensor]) -> Counting:
    """Every rank of the group holds another piece."""
    return Counting(AllReduce(group), {id(p): 1.0 for p in params})


def _count_replicas(engine: Any, mechanic: MechanicOptimizer) -> Callable[[Sequence[Tensor]], Counting]:
    if not engine.has_moe_layers:
        return lambda params: reduction_for(params, sync_replicas=mechanic.sync_replicas)
    if isinstance(engine.optimizer, FP16_Optimizer):
        raise ValueError(
            "Mechanic does not support experts with FusedAdam at ZeRO stage 0: they lie in one flat tensor with the "
            "other weights. Use torch.optim.AdamW, or ZeRO stage 1 or 2."
        )
    return functools.partial(_count_experts, engine)


def _count_experts(engine: Any, params: Sequence[Tensor]) -> Counting:
    """Each expert is on some of the ranks, everything else on all of them."""
    holder = engine.optimizer
    pairs = zip(getattr(holder, "fp32_groups", ()), getattr(holder, "fp16_groups", ()), strict=True)
    models_own = {id(hp): lp for hps, lps in pairs for hp, lp in zip(hps, lps, strict=True)}
    group = engine.seq_data_parallel_group
    copies = {}
    for p in params:
        own = models_own.get(id(p), p)
        everywhere = dist.get_world_size(group)
        copies[id(p)] = groups._get_expert_data_parallel_world_size(own.group_name) if is_moe_param(own) else everywhere
    return Counting(AllReduce(group), {key: 1 / n for key, n in copies.items()})


class _Layout(Protocol):
    """Where one of DeepSpeed's ZeRO optimizers keeps this rank's pieces."""

    def pieces(self) -> Sequence[Tensor]:
        """The flat float32 weights."""

    def group_of(self, index: int) -> int:
        """The param group that a piece belongs to."""

    def gradients(self, index: int) -> Sequence[Tensor]:
        """A piece's gradients, end to end, before unscaling and clipping."""

    def unscale(self, probe: Tensor, total_norm: Any) -> None:
        """Does to the probe what DeepSpeed will do to each gradient in this step."""

    def prepared(self) -> ExitStack:
        """Within, all pieces are in the param groups, and nothing but weights is in the pieces."""


class _Stages1And2:
    def __init__(self, zero: Any) -> None:
        self.zero = zero

    def pieces(self) -> Sequence[Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def group_of(self, index: int) -> int:
        return index

    def gradients(self, index: int) -> Sequence[Tensor]:
        grad = self.zero.single_partition_of_fp32_groups[index].grad
        if grad is None:
            grad = getattr(self.zero, "_get_preflattened_grad_partition", lambda _: None)(index)
        return [grad] if grad is not None else list(self.zero.averaged_gradients[index])

    def unscale(self, probe: Tensor, total_norm: Any) -> None:
        type(self.zero).unscale_and_clip_grads(self.zero, [probe], total_norm)

    def prepared(self) -> ExitStack:
        return ExitStack()


class _Stage3:
    def __init__(self, zero: Any) -> None:
        self.zero = zero

    def pieces(self) -> Sequence[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def group_of(self, index: int) -> int:
        group: int = self.zero.sub_group_to_group_id[index]
        return group

    def gradients(self, index: int) -> Sequence[Tensor]:
        grad = self.zero.fp32_partitioned_groups_flat[index].grad
        return [grad] if grad is not None else list(self.zero.averaged_gradients[index])

    def unscale(self, probe: Tensor, total_norm: Any) -> None:
        twin = copy.copy(self.zero)  # this stage takes the gradient from its piece: give it a piece with ours
        twin.fp32_partitioned_groups_flat = [SimpleNamespace(grad=probe)]
        type(self.zero).unscale_and_clip_grads(twin, 0, total_norm)

    def prepared(self) -> ExitStack:
        self._clear_padding()
        stack = ExitStack()
        self.zero._set_fp32_optimizer_param_groups()
        stack.callback(self.zero._clear_fp32_optimizer_param_groups)
        return stack

    def _clear_padding(self) -> None:
        """What rounds a parameter up to the number of ranks is uninitialised memory, and would enter the norms."""
        for piece, params in zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True):
            start = 0
            for p in params:
                size = p.partition_numel()
                used = min(max(p.ds_numel - dist.get_rank(p.ds_process_group) * size, 0), size)
                piece.data[start + used : start + size] = 0
                start += size


class _Conductor:
    """Decides a step once, before the first piece moves; the optimizer's own steps then move one piece each."""

    def __init__(self, mechanic: MechanicOptimizer, zero: Any, layout: _Layout) -> None:
        self.mechanic = mechanic
        self.zero = zero
        self.layout = layout
        self.reduction = AllReduce(zero.dp_process_group)
        self._zero_step, self._zero_unscale = zero.step, zero.unscale_and_clip_grads
        self._playing: ExitStack | None = None

    def take_over(self) -> None:
        self.zero.step, self.zero.unscale_and_clip_grads = self.step, self.unscale_and_clip_grads
        self.mechanic.count = self._refuse_to_count

    def step(self, closure: Any = None) -> Any:
        """DeepSpeed's step. One that overflows returns before it unscales anything, and never reaches Mechanic."""
        self._playing = None
        with ExitStack() as stack:
            self._stack = stack
            return self._zero_step(closure)

    def unscale_and_clip_grads(self, which: Any, total_norm: Any) -> None:
        """Called for each piece in turn. At the first, every gradient is complete and no weight has moved."""
        if self._playing is None:
            self._playing = self._stack
            self._stack.enter_context(self.mechanic.applying(self._decided(total_norm)))
        self._zero_unscale(which, total_norm)

    @torch.no_grad()
    def _decided(self, total_norm: Any) -> Any:
        with self.layout.prepared():
            sums = self.mechanic.local_sums(list(self._parts()))
            return self.mechanic.decide(self.reduction.start(self._unscaled(sums, total_norm))())

    def _parts(self) -> Iterator[tuple[dict[str, Any], ParamState]]:
        for index, piece in enumerate(self.layout.pieces()):
            group = self.mechanic.param_groups[self.layout.group_of(index)]
            delta = self.mechanic.state.get(piece, {}).get(DELTA)
            start = 0
            for grad in self.layout.gradients(index):
                here = slice(start, start + grad.numel())
                yield (
                    group,
                    ParamState(piece.detach()[here], grad.view(-1), None if delta is None else delta[here], None),
                )
                start += grad.numel()

    def _unscaled(self, sums: Tensor, total_norm: Any) -> Tensor:
        """The sums as they are with unscaled and clipped gradients: one is linear in them, one quadratic."""
        factor = torch.ones(1, device=self.layout.pieces()[0].device)
        self.layout.unscale(factor, total_norm)
        factor = factor.to(sums)
        powers = torch.stack([{"dg": factor, "gg": factor**2}.get(name, factor**0) for name in SUMS], dim=1)
        return torch.cat([(sums[:-1].view(-1, len(SUMS)) * powers).flatten(), sums[-1:]])

    def _refuse_to_count(self, params: Sequence[Tensor]) -> NoReturn:
        raise RuntimeError(
            "this optimizer holds pieces of the weights that only DeepSpeed can put together: call engine.step(), not "
            "optimizer.step()."
        )


install()
