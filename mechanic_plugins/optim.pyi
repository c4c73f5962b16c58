from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from mechanic_plugins.classes import Mechanized
from mechanic_plugins.options import Options, OptionsBesideBetas, OptionsBesideBoth, OptionsBesideEps

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "NAdam", "RMSprop", "wrap"]

def wrap(optimizer_class: type[Optimizer], **options: Unpack[Options]) -> type[Mechanized]: ...

class AdamW(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionsBesideBoth],
    ) -> None: ...

class Adam(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[OptionsBesideBoth],
    ) -> None: ...

class SGD(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None: ...

class Adagrad(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionsBesideEps],
    ) -> None: ...

class RMSprop(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionsBesideEps],
    ) -> None: ...

class NAdam(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionsBesideBoth],
    ) -> None: ...

class Adafactor(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **options: Unpack[OptionsBesideEps],
    ) -> None: ...

class Lion(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptionsBesideBetas],
    ) -> None: ...

class Muon(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        *,
        adamw_params: Iterable[Tensor] = (),
        lr: float = 1.0,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Unpack[OptionsBesideBoth],
    ) -> None: ...

class AdamW8bit(Mechanized):
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: object = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        **options: Unpack[OptionsBesideBoth],
    ) -> None: ...
