"""Weights in bfloat16 and float16: updates are float32, and state has the base's own dtypes."""

from __future__ import annotations

import copy
import functools
from collections import deque
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Factored, Overriding, Row
from optimizers import Lion as TextbookLion
from problems import descend, differences, everything, perceptron, train
from torch import Tensor, nn

from mechanic_plugins import Settings, demechanize, mechanize
from mechanic_plugins.weights.slots import MASTER, PREFIX, REF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD-momentum", "AdamW", "Lion")], ids=str)
def test_low_precision_weights_are_always_the_rounding_of_their_masters(dtype: torch.dtype, row: Row) -> None:
    model = perceptron(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    more = {"eps": 1e-3} if row.name == "AdamW" else {}  # its 1e-8 is 0 in float16, which makes its own update infinite
    opt = mechanize(row.build(model.parameters(), **more))
    for step in range(40):
        train(model, opt, 1, first=step)
        for x0, p in zip(start, model.parameters(), strict=True):
            state = opt.state[p]
            assert (state[MASTER].dtype, state[REF].dtype) == (torch.float32, dtype)
            assert step < 2 or torch.equal(state[REF], x0)
            assert torch.equal(p, state[MASTER].to(dtype))
    assert opt.scale.item() > 0


class Renamed(torch.optim.AdamW):
    """A subclass without changes, treated like torch's."""


BASES_IN_16_BITS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adafactor": torch.optim.Adafactor,
    "a renamed AdamW": Renamed,
    "AdamW with a step of its own": Overriding,
    "Lion": TextbookLion,
    "no one's": Factored,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("base", BASES_IN_16_BITS)
def test_16_bit_weights_train_as_float32_ones_do_whatever_the_lr(base: str, dtype: torch.dtype) -> None:
    """The update used to be computed from rounded weights, which left almost nothing of it at a small base lr."""
    scales, ends, longest = {}, {}, 0.0
    for wide in (True, False):
        p = nn.Parameter(torch.ones(8, 8, dtype=torch.float32 if wide else dtype))
        opt = mechanize(BASES_IN_16_BITS[base]([p], lr=5e-5))
        for _ in range(60):
            descend(opt, p, 1)
            longest = max(longest, opt.effective_lrs[0])
        scales[wide], ends[wide] = opt.scale.item(), p.detach().float()
    assert (ends[True] - 1).abs().max() > 0.1, "nothing was learned that could be compared"
    # A sign flipped by rounding makes two of Lion's steps. Rounded weights also shift the gradients by up to 0.004.
    apart = 2 * longest if base == "Lion" else longest / 2
    differences = (ends[False] - ends[True]).abs()
    if base == "Adafactor":  # single weights oscillate by a step, in a direction that rounding decides
        assert differences.mean() < longest / 10
    else:
        assert differences.max() < apart
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
    if base == "no one's":  # torch's load narrows float32 state of 16-bit parameters
        resumed.state[q]["wide"] = opt.state[p]["wide"].clone()
    for each, weights in ((opt, p), (resumed, q)):
        descend(each, weights, 5)
    assert not differences(everything(opt), everything(resumed))


class Sharpness(torch.optim.Optimizer):
    """Takes the gradient at a point uphill, as SAM does."""

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
    """The model reads the weights, not the float32 copies that the base moves."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(16, dtype=dtype))
        opt = mechanize(Sharpness([p], lr=1e-4), settings=Settings(rule="paper", s_init=1e-2, normalize_lr=False))

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
    before = copy.deepcopy([p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", REF))])
    base.register_step_post_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        opt.step()
    after = [p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", REF))]
    assert torch.equal(opt.state[p][MASTER].bfloat16(), p)
    assert not differences(before, after)
    assert list(opt.state) == [p], "the twins are gone"


@pytest.mark.parametrize("base", ["RMSprop", "RAdam", "NAdam"])
def test_the_moments_of_a_16_bit_number_survive_a_checkpoint(base: str) -> None:
    """Without dimensions, they used to be taken for counters, kept in float32, and rounded by torch's load."""
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


class Queue(torch.optim.Optimizer):
    """Steps with the previous gradient, from a queue."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            queue = self.state[p].setdefault("queue", deque([torch.zeros_like(p)] * 2, maxlen=2))
            queue.append(p.grad.clone())
            p.sub_(queue[0].lerp(p.grad, 0.5), alpha=self.param_groups[0]["lr"])


class Cell:
    """An object that holds a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class InAnObject(Queue):
    """Keeps its momentum in an object, where torch's own state dicts do not look either."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            cell = self.state[p].setdefault("cell", Cell(torch.zeros_like(p)))
            p.sub_(cell.value.lerp_(p.grad, 0.5), alpha=self.param_groups[0]["lr"])


class Casting(Queue):
    """Keeps its momentum in a fixed dtype."""

    dtype: torch.dtype

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=self.dtype))
            p.sub_(momentum.lerp_(p.grad.to(self.dtype), 0.5), alpha=self.param_groups[0]["lr"])


class Newton(Queue):
    """Differentiates the gradients once more."""

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        curved = torch.autograd.grad(grads, params, grad_outputs=[torch.ones_like(g) for g in grads])
        with torch.no_grad():
            for p, curvature in zip(params, curved, strict=True):
                p.sub_(p.grad / curvature, alpha=self.param_groups[0]["lr"])


def descend_a_parabola(opt: Any, p: Tensor, *, create_graph: bool) -> None:
    for _ in range(80):
        loss = ((p - torch.linspace(-1, 1, p.numel()).to(p.dtype)) ** 2).sum()
        (p.grad,) = torch.autograd.grad(loss, [p], create_graph=create_graph)
        opt.step()


def test_a_queue_of_gradients_of_16_bit_weights_is_widened_too() -> None:
    """lerp() used to reject a bfloat16 gradient together with a float32 one."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = mechanize(Queue([p], lr=1e-2))
    descend(opt, p, 80)
    assert (p.detach().float() - torch.linspace(-1, 1, 8)).norm() < 1.5, "it started at 3.4"
    queue = opt.state[p]["queue"]
    assert (type(queue), queue.maxlen, {g.dtype for g in queue}) == (deque, 2, {torch.bfloat16})


@pytest.mark.parametrize(
    ("cls", "reason"), [(InAnObject, "in an object"), (Casting, "a dtype of its own"), (Newton, "a graph")]
)
def test_a_base_that_cannot_step_float32_copies_steps_the_16_bit_weights(cls: Any, reason: str) -> None:
    """It used to raise because of mixed dtypes, or of weights not in its graph."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = mechanize(cls([p], lr=0.1))
    with pytest.warns(UserWarning, match=f"{cls.__name__} steps the bfloat16 weights themselves.*{reason}"):
        descend_a_parabola(opt, p, create_graph=cls is Newton)
    assert (p.detach().float() - torch.linspace(-1, 1, 8)).norm() < 1.5, "it started at 3.4"
    assert list(opt.state) == [p]


@pytest.mark.parametrize("base", [torch.optim.Adam, functools.partial(torch.optim.RMSprop, centered=True)])
def test_float16_weights_learn_what_float32_ones_do(base: Any) -> None:
    """Moments kept in float16 underflowed: Adam's scale collapsed, and a centered RMSprop wrote NaN."""
    losses = {}
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        x = torch.randn(256, 6)
        opt = mechanize(base(model.parameters()))
        for _ in range(300):
            opt.zero_grad()
            loss = (model(x.to(dtype)).float() - x.prod(1, keepdim=True)).square().mean()
            loss.backward()
            opt.step()
        losses[dtype] = loss.item()
        assert opt.metrics()["mechanic/skipped_steps"] == 0
    assert losses[torch.float16] < 1.2 * losses[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("base", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adam])
def test_a_resumed_run_of_16_bit_weights_is_the_same_to_the_last_bit(base: Any, dtype: torch.dtype) -> None:
    """torch rounds all state it loads to the weights' dtype, NAdam's mu_product included."""
    whole, first, second = (perceptron(dtype) for _ in range(3))
    opt = mechanize(base(whole.parameters()))
    train(whole, opt, 24)
    before, after = mechanize(base(first.parameters())), mechanize(base(second.parameters()))
    train(first, before, 12)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(second, after, 12, first=12)
    assert not differences(everything(opt), everything(after))


def test_a_plain_base_goes_on_from_float16_weights() -> None:
    model = perceptron(torch.float16)
    opt = mechanize(torch.optim.Adam(model.parameters()))
    train(model, opt, 5)
    plain = demechanize(opt)
    assert {value.dtype for state in plain.state.values() for value in state.values() if value.dim()} == {torch.float16}
    train(model, plain, 1, first=5)
