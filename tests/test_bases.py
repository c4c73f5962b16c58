"""What Mechanic must know about the optimizers it wraps and about how their tensors lie in memory."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimizers import Lion as TextbookLion
from problems import differences, everything
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mechanic_plugins import demechanize, mechanize
from mechanic_plugins.core import known_bases
from mechanic_plugins.core.param_state import DELTA, PREFIX
from mechanic_plugins.lion import Lion

Build = Callable[[Any], torch.optim.Optimizer]

# ------------------------------------------------------------------------------------------------ torch's fused kernels


def combinations(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


ADAMS = list(combinations(weight_decay=[0, 0.1], amsgrad=[False, True], maximize=[False, True]))
SGDS = [
    options
    for options in combinations(
        momentum=[0, 0.9], dampening=[0, 0.5], nesterov=[False, True], weight_decay=[0, 0.1], maximize=[False, True]
    )
    if not options["nesterov"] or (options["momentum"] and not options["dampening"])
]
FUSED = [
    (cls, options)
    for cls, choices in [(torch.optim.Adam, ADAMS), (torch.optim.AdamW, ADAMS), (torch.optim.SGD, SGDS)]
    for options in choices
]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def walk(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    """The weights and moments after five steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    moments = [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape]
    return [t.detach().double() for t in (p, *moments)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("cls", "options"), FUSED, ids=str)
def test_every_fused_cpu_kernel_that_is_taken_is_right(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """torch's fused SGD leaves whole SIMD blocks of 16-bit weights where they are: it was taken all the same."""
    for n in (1, 7, 16, 33):
        start = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
        ends = []
        for fused in (True, False):
            p = nn.Parameter(start.clone())
            p.grad = torch.zeros_like(p)
            if fused and not known_bases.can_fuse_on_cpu(cls([p], **options)):
                assert needs_the_plain_way(dtype)
                return
            ends.append(walk(cls([p], lr=0.1, **options, **({"fused": True} if fused else {"foreach": False})), p))
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b, rtol=ROUNDINGS[dtype], atol=ROUNDINGS[dtype] * b.abs().max().item())


def needs_the_plain_way(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=str)
def test_sgd_moves_16_bit_weights_on_a_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.linspace(1, 2, 64).to(dtype))
    opt = mechanize(torch.optim.SGD([p], lr=0.1, **options))
    for _ in range(100):
        p.grad = p.detach().clone()
        opt.step()
    assert (p.detach().abs() < torch.linspace(1, 2, 64)).all()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5, "foreach": True}], ids=str)
def test_a_first_gradient_may_come_late(options: dict[str, Any]) -> None:
    """torch's fused SGD takes the momentum buffers of all parameters or of none, and raised a TypeError."""
    ends = []
    for backend in ("auto", "foreach"):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        opt = mechanize(torch.optim.SGD(params, lr=0.1, **options), preset="0.1", backend=backend)
        for step in range(10):
            for p in params[: 1 if step < 5 else 2]:
                p.grad = p.detach().clone()
            opt.step()
        ends.append([p.detach() for p in params])
        assert (params[1] < 1).all()
    assert not differences(*ends)


# ------------------------------------------------------------------------------------------------ memory and dtypes


def convolution(memory_format: torch.memory_format) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]


def fit(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randn(8, 4, 4, 4, generator=generator)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        opt.zero_grad()
        (model(x.to(dtype)) - y).square().mean().backward()
        opt.step()


FORMATS = torch.contiguous_format, torch.channels_last
CONVOLVED: dict[str, Build] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Lion": Lion,
}


@pytest.mark.parametrize("how", ["in place", "checkpoint"])
@pytest.mark.parametrize(("first", "then"), [FORMATS, FORMATS[::-1]], ids=["to channels last", "to contiguous"])
@pytest.mark.parametrize("base", CONVOLVED)
def test_weights_may_change_their_memory_format(base: str, first: Any, then: Any, how: str) -> None:
    """Moments and delta kept the old order, and were walked as flat memory beside weights in the new one."""
    ends = []
    for later in (first, then):
        model = convolution(first)
        opt = mechanize(CONVOLVED[base](model.parameters()))
        fit(model, opt, 15)
        if how == "in place":
            model.to(memory_format=later)  # type: ignore[call-overload]
        else:
            saved, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
            model = convolution(later)
            model.load_state_dict(weights)
            opt = mechanize(CONVOLVED[base](model.parameters()))
            opt.load_state_dict(saved)
        fit(model, opt, 16)
        assert model.weight.is_contiguous(memory_format=later)
        assert opt.state[model.weight][DELTA].stride() == model.weight.stride()
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_weights_may_change_their_dtype_where_the_base_lets_them(momentum: float, to: torch.dtype) -> None:
    """delta stayed in float32 beside float64 weights, and the next step raised where plain SGD goes on."""
    model = convolution(torch.contiguous_format)
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    fit(model, opt, 10)
    model.to(to)
    if to == torch.bfloat16 and momentum:
        for p in model.parameters():
            opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"].to(to)
    before = model.weight.detach().clone()
    fit(model, opt, 1)
    moved = (model.weight - before).abs().max()
    assert 0 < moved < 0.05, "a jump: delta and weights do not belong together"
    assert opt.state[model.weight][DELTA].dtype == (torch.float64 if to == torch.float64 else torch.float32)
    fit(model, opt, 10)
    assert model.weight.isfinite().all()


# ------------------------------------------------------------------------------------------------ 16-bit weights


class Renamed(torch.optim.AdamW):
    """Nothing of its own: as good as torch's."""


class Overriding(torch.optim.AdamW):
    """May do anything."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Factored(torch.optim.Optimizer):
    """Keeps state in dtypes and structures of its own choice, in the style of no optimizer of torch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(t=0, wide=torch.zeros_like(p, dtype=torch.float32), pair=[torch.zeros_like(p), None])
            state["t"] += 1
            state["wide"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            state["pair"] = [state["pair"][0].lerp(p.grad, 0.1), None]
            size = (state["wide"] * (1 - 0.9 ** state["t"])).sqrt() + 1e-8
            p.addcdiv_(state["pair"][0], size, value=-self.param_groups[0]["lr"])


BASES_IN_16_BITS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adafactor": torch.optim.Adafactor,
    "a renamed AdamW": Renamed,
    "AdamW with a step of its own": Overriding,
    "Lion": TextbookLion,
    "no one's": Factored,
}


def descend(opt: Any, p: Tensor, steps: int) -> None:
    target = torch.linspace(-1, 1, p.numel()).view(p.shape)
    for step in range(steps):
        p.grad = (p.detach().float() - target - 0.1 * math.cos(step)).to(p.dtype)
        opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("base", BASES_IN_16_BITS)
def test_16_bit_weights_train_as_float32_ones_do_whatever_the_lr(base: str, dtype: torch.dtype) -> None:
    """The update was read off rounded weights: at a small lr of the base next to nothing was left of it."""
    scales, ends = {}, {}
    for wide in (True, False):
        p = nn.Parameter(torch.ones(8, 8, dtype=torch.float32 if wide else dtype))
        opt = mechanize(BASES_IN_16_BITS[base]([p], lr=5e-5), preset="0.1")  # a slow rise: roundings stay small
        descend(opt, p, 60)
        scales[wide], ends[wide] = opt.scale.item(), p.detach().float()
    assert (ends[True] - 1).abs().max() > 0.1, "nothing was learned that could be compared"
    torch.testing.assert_close(ends[False], ends[True], rtol=0, atol=0.05)
    assert scales[False] == pytest.approx(scales[True], rel=0.2)


@pytest.mark.parametrize("base", BASES_IN_16_BITS)
def test_state_of_16_bit_weights_has_the_dtypes_of_the_plain_base(base: str) -> None:
    kinds = []
    for wrap in (lambda base: base, mechanize):
        p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        opt: Any = wrap(BASES_IN_16_BITS[base]([p], lr=1e-2))
        descend(opt, p, 4)
        state = {name: value for name, value in opt.state[p].items() if not name.startswith(PREFIX)}
        kinds.append({name: torch.as_tensor((*value, 0)[0] if isinstance(value, list) else value).dtype
                      for name, value in state.items()})  # fmt: skip
        assert list(opt.state) == [p], "the twins are gone"
        assert opt.param_groups[0]["params"][0] is p
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("base", BASES_IN_16_BITS)
def test_16_bit_weights_resume_bit_for_bit(base: str) -> None:
    p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    opt = mechanize(BASES_IN_16_BITS[base]([p], lr=1e-2))
    descend(opt, p, 20)
    q = nn.Parameter(p.detach().clone())
    resumed = mechanize(BASES_IN_16_BITS[base]([q], lr=1e-2))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    if base == "no one's":  # torch narrows float32 state of 16-bit parameters when it loads
        resumed.state[q]["wide"] = opt.state[p]["wide"].clone()
    for each, weights in ((opt, p), (resumed, q)):
        descend(each, weights, 5)
    assert not differences(everything(opt), everything(resumed))


class Sharpness(torch.optim.Optimizer):
    """Takes the gradient where it has gone up to, as SAM does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        (p,) = self.param_groups[0]["params"]
        p.add_(p.grad, alpha=0.5)
        up = p.grad.clone()
        with torch.enable_grad():
            closure()
        p.sub_(up, alpha=0.5).sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


def test_a_base_may_evaluate_16_bit_weights_where_it_has_moved_to() -> None:
    """The model knows the weights, not the float32 twins that the base moves."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(16, dtype=dtype))
        opt = mechanize(Sharpness([p], lr=1e-4), s_init=1e-2, preset="paper", normalize_lr=False)

        def closure(p: Tensor = p, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = (p.float() ** 4).sum()
            loss.backward()
            return loss

        for _ in range(20 if dtype == torch.float32 else 21):  # the first update to 16-bit weights is discarded
            opt.step(closure)
        ends.append(p.detach().float())
    assert (ends[0] < 0.9).all()
    torch.testing.assert_close(ends[1], ends[0], rtol=0.05, atol=0)


def test_an_error_leaves_16_bit_weights_and_moments_alone() -> None:
    p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    base = Overriding([p], lr=1e-2)
    opt = mechanize(base)
    descend(opt, p, 5)
    before = copy.deepcopy([p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", DELTA))])
    base.register_step_post_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        opt.step()
    after = [p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", DELTA))]
    assert not differences(before, after)
    assert list(opt.state) == [p], "the twins are gone"


# ------------------------------------------------------------------------------------------------ other bases


def test_lion_passes_over_a_group_without_gradients() -> None:
    """torch's grouping refuses empty lists; ZeRO-3 steps one group at a time and empties the others."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    opt = mechanize(Lion([{"params": [a]}, {"params": [b]}], lr=1.0))
    for _ in range(5):
        a.grad = torch.ones(3)
        opt.step()
    assert (a < 1).all()
    assert (b == 1).all()


class AdamWScheduleFree(torch.optim.SGD): ...


class ScheduleFreeAdamW(torch.optim.SGD): ...


class Mine(AdamWScheduleFree): ...


class Prodigy(torch.optim.SGD): ...


class DAdaptLion(torch.optim.SGD): ...


class Ranger21(torch.optim.SGD): ...


class FTRL(torch.optim.SGD): ...


@pytest.mark.parametrize("cls", [AdamWScheduleFree, ScheduleFreeAdamW, Mine, Prodigy, DAdaptLion, Ranger21, FTRL])
def test_bases_with_iterates_of_their_own_are_refused_by_name(cls: Any) -> None:
    """schedulefree, pytorch_optimizer, prodigyopt and dadaptation call theirs so; they ran, and went wrong."""
    with pytest.raises(ValueError, match=r"cannot be mechanized: it computes the weights from .* such as AdamW or SGD"):
        mechanize(cls([nn.Parameter(torch.ones(2))], lr=0.1))


class Remembers(torch.optim.SGD):
    """Keeps the weights it started from, under a name that says nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("first", p.clone())
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_of_the_weights_in_the_state_of_a_base_is_warned_of_once(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.linspace(1, 2, 8).to(dtype))
    opt = mechanize(Remembers([p], lr=0.1))
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"Remembers keeps a copy of the weights in its state \('first'\)"):
        opt.step()
    for _ in range(3):
        opt.step()  # warnings are errors here


@pytest.mark.parametrize("cls", [TextbookLion, Overriding, Factored])
@pytest.mark.parametrize("start", [torch.zeros(4), torch.ones(4), torch.linspace(0, 1, 4)], ids=str)
def test_other_state_is_not_taken_for_a_copy_of_the_weights(cls: Any, start: Tensor) -> None:
    p = nn.Parameter(start.clone())
    opt = mechanize(cls([p], lr=0.1))
    for grad in (start, torch.zeros(4), torch.zeros(4)):
        p.grad = grad.clone()
        opt.step()
    assert (p.detach() <= start).all()


class Counts(torch.optim.SGD):
    """Keeps in `state` what belongs to no parameter, as MADGRAD and SPAM do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.state["total_step"] = 1  # type: ignore[index]
        self.state["k"] = torch.tensor([3])  # type: ignore[index]


def test_a_base_may_keep_state_that_belongs_to_no_parameter() -> None:
    """Every key of `state` was taken for a parameter."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    opts = [mechanize(Counts([p])) for p in params[:1] * 2]
    for _ in range(3):
        params[0].grad = torch.ones(3)
        opts[0].step()
    saved = copy.deepcopy(opts[0].state_dict())
    opts[1].load_state_dict(saved)
    assert not differences(saved, opts[1].state_dict())
    opts[1].add_param_group({"params": [params[1]]})
    assert demechanize(opts[1]).state["total_step"] == 1  # type: ignore[index]


# ------------------------------------------------------------------------------------------------ odd beginnings


@pytest.mark.parametrize("keep", [True, False], ids=["both kept", "the first one gone"])
def test_a_base_that_is_mechanized_again_goes_on_with_its_tuner(keep: bool) -> None:
    """Its param groups hold the tuner as it was last saved, or new: that was read, and the scale learned anew."""
    p = nn.Parameter(torch.ones(8))
    base = torch.optim.AdamW([p])
    first: Any = mechanize(base)
    descend(first, p, 30)
    scale, saved = first.scale.item(), copy.deepcopy(first.state_dict())
    descend(first, p, 10)
    tuner, later = first.tuner, first.scale.item()
    if not keep:
        del first
    second = mechanize(base)
    assert second.scale.item() == later > scale > 0
    assert all(map(torch.equal, second.tuner, tuner))
    second.load_state_dict(saved)
    assert mechanize(base).scale.item() == scale
    assert mechanize(demechanize(second)).scale.item() == 0


def test_another_number_of_betas_for_a_mechanized_base_is_refused() -> None:
    p = nn.Parameter(torch.ones(8))
    base = torch.optim.AdamW([p])
    descend(mechanize(base), p, 3)
    with pytest.raises(ValueError, match="pass the same betas"):
        mechanize(base, betas=(0.9, 0.99))


SHARED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "the same": lambda x: [x, x],
    "overlapping": lambda x: [x[:6], x[4:]],
    "a column of it": lambda x: [x.view(2, 5), x.view(2, 5)[:, 1]],
}


@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_parameters_over_the_same_memory_are_refused(views: Callable[[Tensor], list[Tensor]]) -> None:
    """Each took the other's update for its own as well, and the weights came out wrong."""
    memory = torch.arange(10.0)
    params = [nn.Parameter(view) for view in views(memory)]
    opt = mechanize(torch.optim.SGD(params, lr=0.1))
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"shares memory with another one .* use one Parameter in both places"):
        opt.step()
    assert torch.equal(memory, torch.arange(10.0))


def test_parameters_that_share_a_storage_but_no_element_train_as_apart() -> None:
    ends = []
    for clone in (False, True):
        memory = torch.arange(12.0).view(3, 4)
        views = [memory[:, ::2], memory[:, 1::2]]
        params = [nn.Parameter(view.clone() if clone else view) for view in views]
        opt = mechanize(torch.optim.SGD(params, lr=0.1))
        for _ in range(10):
            for p in params:
                p.grad = p.detach().clone()
            opt.step()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(ends[0], ends[1])
    assert (ends[0][1] < torch.arange(12.0).view(3, 4)[:, 1::2]).all()


def test_memory_can_be_estimated_with_fake_tensors() -> None:
    """A tuner without data cannot be written into the param groups: mechanize() raised."""
    with FakeTensorMode():
        model = nn.Linear(4, 3)
        opt = mechanize(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            opt.step()
            kept = [set(opt.state[p]) for p in model.parameters()]
            assert kept == [{"step", "exp_avg", "exp_avg_sq", DELTA}] * 2


@pytest.mark.parametrize("base", ["RMSprop", "RAdam", "NAdam"])
def test_the_moments_of_a_16_bit_number_survive_a_checkpoint(base: str) -> None:
    """Without dimensions they were taken for counters, kept in float32, and rounded when torch loaded them."""
    p = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    opts = [mechanize(getattr(torch.optim, base)([q], lr=0.1)) for q in (p, p)]
    for step in range(4):
        p.grad = torch.full_like(p, 0.3 + step)
        opts[0].step()
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    moments = [{k: v for k, v in opt.state[p].items() if k not in ("step", "mu_product")} for opt in opts]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    assert opts[0].state[p]["step"].dtype == torch.float32
