from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, Row
from problems import backward, differences, everything, perceptron, train
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mechanic_plugins import MechanicOptimizer, demechanize, mechanize
from mechanic_plugins.core.param_state import DELTA, REF

ADAMW = torch.optim.AdamW
SKIPPED = "mechanic/skipped_steps"


def two_groups(model: nn.Sequential, *, lr: float = 0.5) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": lr}, {"params": list(model[2].parameters()), "lr": lr / 10}]


def filled(params: Iterable[Tensor], value: float = 1.0) -> None:
    for p in params:
        p.grad = torch.full_like(p, value)


# ------------------------------------------------------------------------------------------------ it trains


@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_training_goes_down(row: Row) -> None:
    model = perceptron()
    params = [p for p in model.parameters() if p.ndim == 2 or not row.matrices_only]
    losses = train(model, mechanize(row.build(params)), 400)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


def test_a_class_gives_what_an_instance_gives() -> None:
    models = perceptron(), perceptron()
    train(models[0], mechanize(ADAMW(models[0].parameters(), lr=0.1), s_decay=0.0), 20)
    train(models[1], mechanize(ADAMW, s_decay=0.0)(models[1].parameters(), lr=0.1), 20)
    assert not differences(models[0].state_dict(), models[1].state_dict())


def test_the_first_step_moves_nothing_and_later_ones_do() -> None:
    model = perceptron()
    start = copy.deepcopy(model.state_dict())
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 1)
    assert not differences(start, model.state_dict())
    assert opt.scale.item() == 0
    train(model, opt, 2, first=1)
    assert differences(start, model.state_dict())
    assert opt.scale.shape == ()
    assert opt.scale.item() > 0


def test_float32_weights_are_the_start_plus_scale_times_delta() -> None:
    model = perceptron(torch.float64)
    start = [p.detach().clone() for p in model.parameters()]
    opt = mechanize(ADAMW(model.parameters(), lr=1.0))
    train(model, opt, 60)
    for x0, p in zip(start, model.parameters(), strict=True):
        torch.testing.assert_close(p, x0 + opt.scale * opt.state[p][DELTA], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD-momentum", "AdamW", "Lion")], ids=str)
def test_low_precision_weights_are_always_the_rounding_of_an_exact_value(dtype: torch.dtype, row: Row) -> None:
    model = perceptron(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    more = {"eps": 1e-3} if row.name == "AdamW" else {}  # its 1e-8 is 0 in float16, and its own update infinite
    opt = mechanize(row.build(model.parameters(), **more))
    for step in range(40):
        train(model, opt, 1, first=step)
        scale = opt._progress.tuner.played[0, 0]
        for x0, p in zip(start, model.parameters(), strict=True):
            state = opt.state[p]
            assert (state[DELTA].dtype, state[REF].dtype) == (torch.float32, dtype)
            assert torch.equal(state[REF], x0)
            assert torch.equal(p, torch.addcmul(x0.float(), state[DELTA], scale.float()).to(dtype))
    assert opt.scale.item() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_from_outside_stay_as_they_were_put(dtype: torch.dtype) -> None:
    """Averaging, clamping, loading: a form that recomputes x from a reference would pull the weights back."""
    model = perceptron(dtype)
    opt = mechanize(ADAMW(model.parameters(), lr=1.0))
    train(model, opt, 30)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0)
    train(model, opt, 1, first=30)
    moved = max((p.float() - 2.0).abs().max().item() for p in model.parameters())
    assert moved < 0.05


# ------------------------------------------------------------------------------------------------ copies


def test_pickle_and_deepcopy_train_on_alike_and_apart() -> None:
    """A scheduler plants a `step` on the instance: a copy that kept it would step the original."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5), s_decay=0.0, max_scale=10.0)
    torch.optim.lr_scheduler.StepLR(opt, step_size=10)
    train(model, opt, 20)
    twins = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    at_20 = everything(opt)
    for twin_model, twin in twins:
        assert not differences(everything(twin), at_20)
        assert twin.settings == opt.settings
        train(twin_model, twin, 20, first=20)
        assert not differences(everything(opt), at_20)
    train(model, opt, 20, first=20)
    assert not differences(everything(twins[0][1]), everything(opt))
    assert not differences(everything(twins[1][1]), everything(opt))


def test_a_copy_of_a_frozen_one_is_frozen() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 5)
    opt.freeze()
    twin_model, twin = copy.deepcopy((model, opt))
    scale = opt.scale.item()
    train(twin_model, twin, 5, first=5)
    assert twin.scale.item() == scale


# ------------------------------------------------------------------------------------------------ groups


def takes_late_groups(base: type[torch.optim.Optimizer]) -> bool:
    """Adagrad of older torch falls over a group that was added after it was built, with Mechanic or without."""
    first, late = (torch.ones(2, requires_grad=True) for _ in range(2))
    plain = base([first])
    plain.add_param_group({"params": [late]})
    filled([first, late])
    try:
        plain.step()
    except KeyError:
        return False
    return True


LATE = [base for base in (ADAMW, torch.optim.Adagrad) if takes_late_groups(base)]


@pytest.mark.parametrize("scope", ["all", "group"])
@pytest.mark.parametrize("base", LATE, ids=lambda base: base.__name__)
def test_a_group_added_late_starts_at_its_own_weights(scope: Any, base: type[torch.optim.Optimizer]) -> None:
    model = perceptron()
    opt = mechanize(base(model[0].parameters(), lr=1.0), scope=scope)
    train(model, opt, 30)
    learned = opt.scales.tolist()
    new = [p.detach().clone() for p in model[2].parameters()]
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    assert opt.scales.tolist() == [learned[0], 0.0 if scope == "group" else learned[0]]
    assert opt.effective_lrs == [learned[0], opt.scales[1].item() * 0.1]
    assert opt.metrics()["mechanic/steps"] == 30
    for p, x0 in zip(model[2].parameters(), new, strict=True):
        assert torch.equal(p, x0)
    losses = train(model, opt, 60, first=30)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(scale > 0 for scale in opt.scales.tolist())
    assert opt.tuner.s.shape == ((2, 6) if scope == "group" else (6,))


def test_the_lr_of_a_late_group_is_read_when_it_is_asked_for() -> None:
    """effective_lrs kept the first answer for a group that has not made a step yet."""
    model = perceptron()
    opt = mechanize(ADAMW(model[0].parameters(), lr=1.0))
    train(model, opt, 3)
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    assert opt.effective_lrs[1] == opt.scale.item() * 0.5
    opt.param_groups[1]["lr"] = 0.25
    assert opt.effective_lrs[1] == opt.scale.item() * 0.25


def test_a_group_that_the_base_refuses_changes_nothing() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    before = everything(opt)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": list(model[0].parameters())})
    assert not differences(before, everything(opt))


def test_each_group_of_scope_group_learns_as_if_alone() -> None:
    models = perceptron(torch.float64), perceptron(torch.float64)
    together = mechanize(ADAMW(two_groups(models[0])), scope="group", normalize_lr=False)
    groups = two_groups(models[1])
    alone = [mechanize(ADAMW([group]), normalize_lr=False) for group in groups]
    for step in range(40):
        train(models[0], together, 1, first=step)
        backward(models[1], step)
        for opt in alone:
            opt.step()
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert together.scales.tolist() == [opt.scale.item() for opt in alone]
    assert together.scales[0] != together.scales[1]


# ------------------------------------------------------------------------------------------------ odd parameters


def test_no_gradients_at_all_is_no_step() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    opt.step()
    assert not opt.state
    assert opt.metrics()["mechanic/steps"] == 0
    train(model, opt, 5)
    opt.zero_grad()
    before = everything(opt)
    opt.step()
    assert not differences(before, everything(opt))
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_without_a_gradient_follows_the_scale_and_nothing_else() -> None:
    """Nothing is added to its delta, but x = start + scale * delta must hold for it as for the others."""
    model = perceptron(torch.float64)
    last = model[2].weight
    x0 = last.detach().clone()
    opt = mechanize(ADAMW(model.parameters(), lr=1.0))
    train(model, opt, 20)
    delta, moments, weights = (t.clone() for t in (opt.state[last][DELTA], opt.state[last]["exp_avg"], last.detach()))
    for step in range(20, 25):
        backward(model, step)
        last.grad = None
        opt.step()
    ratio = opt.state[last][DELTA] / delta
    torch.testing.assert_close(ratio, torch.full_like(ratio, ratio.mean().item()), rtol=1e-12, atol=0)
    assert torch.equal(opt.state[last]["exp_avg"], moments)
    assert not torch.equal(last, weights)
    torch.testing.assert_close(last, x0 + opt.scale * opt.state[last][DELTA], rtol=1e-12, atol=1e-14)


def test_frozen_parameters_cost_nothing() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    frozen = [p.clone() for p in model[0].parameters()]
    opt = mechanize(ADAMW(model.parameters(), weight_decay=0.1))
    train(model, opt, 20)
    assert set(opt.state) == set(model[2].parameters())
    assert all(map(torch.equal, frozen, model[0].parameters()))
    assert opt.scale.item() > 0


def strided() -> Tensor:
    return torch.arange(12.0).view(3, 4).t().requires_grad_()


def gapped() -> Tensor:
    return torch.arange(24.0).view(6, 4)[::2, ::2].requires_grad_()


def channels_last() -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )


ODD: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 4),
    "transposed": strided,
    "gapped": gapped,
    "channels-last": channels_last,
    "complex64": lambda: torch.tensor([1 + 2j, -3 + 0.5j]),
    "complex128": lambda: torch.tensor([[1 + 2j, -3 + 0.5j]], dtype=torch.complex128),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_parameters_train_like_plain_ones(make: Callable[[], Tensor], foreach: bool) -> None:
    """Beside a plain companion; the same numbers in a plain, contiguous, real tensor must move alike."""
    odd = make().detach().requires_grad_()
    plain = odd.detach().clone(memory_format=torch.contiguous_format)
    plain = (torch.view_as_real(plain) if plain.is_complex() else plain).clone().requires_grad_()
    ends = []
    for p in (odd, plain):
        companion = torch.tensor([5.0, -3.0], requires_grad=True)
        opt = mechanize(ADAMW([p, companion], lr=1.0, foreach=foreach))
        for _ in range(50):
            opt.zero_grad()
            (p.abs().square().sum() + companion.square().sum()).backward()
            opt.step()
        assert opt.scale.item() > 0
        ends.append((torch.view_as_real(p) if p.is_complex() else p).detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    if odd.numel():
        start = make().detach()
        assert odd.abs().square().sum() < start.abs().square().sum()


def test_gradients_laid_out_unlike_their_parameter() -> None:
    p = torch.arange(12.0).view(3, 4).requires_grad_()
    opt = mechanize(torch.optim.SGD([p], lr=1.0))
    for _ in range(5):
        p.grad = p.detach().t().contiguous().t()
        opt.step()
    assert not p.grad.is_contiguous()
    assert opt.scale.item() > 0


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    dense = torch.ones(2, requires_grad=True)
    opt = mechanize(torch.optim.SGD([dense, *embedding.parameters()], lr=1.0))
    before = everything(opt)
    embedding(torch.tensor([1])).sum().backward()
    filled([dense])
    with pytest.raises(ValueError, match=r"sparse .* Use sparse=False in the embedding, or p.grad.to_dense\(\)"):
        opt.step()
    assert not differences(before, everything(opt))


def test_a_parameter_of_another_shape_is_refused_before_anything_is_changed() -> None:
    p = torch.ones(6, requires_grad=True)
    opt = mechanize(torch.optim.SGD([p], lr=1.0))
    filled([p])
    opt.step()
    p.data, p.grad = torch.ones(9), torch.ones(9)
    before = everything(opt)
    with pytest.raises(ValueError, match=r"shape \(6,\) where the parameter has shape \(9,\).* Build a new optimizer"):
        opt.step()
    assert not differences(before, everything(opt))


UNFIT = [
    (lambda p: torch.optim.LBFGS([p]), "line search .* Use torch.optim.Adam, or LBFGS alone"),
    (lambda p: torch.optim.SparseAdam([p]), "every weight in every step. Use sparse=False"),
    (lambda p: ADAMW([p], differentiable=True), "outside autograd. Build the base with differentiable=False"),
    (lambda p: mechanize(ADAMW([p])), "mechanized already"),
]


@pytest.mark.parametrize(("build", "message"), UNFIT, ids=["LBFGS", "SparseAdam", "differentiable", "twice"])
def test_bases_that_cannot_be_scaled_are_refused(build: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mechanize(build(torch.zeros(2, requires_grad=True)))


# ------------------------------------------------------------------------------------------------ closures, hooks


@pytest.mark.parametrize("returns", ["loss", "nothing"])
def test_a_closure_is_called_once_and_gives_the_same_training(returns: str) -> None:
    models = perceptron(), perceptron()
    train(models[0], mechanize(ADAMW(models[0].parameters())), 10)
    opt = mechanize(ADAMW(models[1].parameters()))
    calls: list[Tensor] = []

    def closure() -> Tensor | None:
        assert torch.is_grad_enabled()
        calls.append(backward(models[1], len(calls)))
        return calls[-1] if returns == "loss" else None

    for step in range(10):
        result = opt.step(closure=closure)
        assert len(calls) == step + 1
        assert result is (calls[-1] if returns == "loss" else None)
    assert not differences(models[0].state_dict(), models[1].state_dict())


def test_a_base_that_calls_the_closure_again_gets_a_new_loss() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            losses.extend([closure(), closure()])
            super().step()
            return losses[-2]

    losses: list[Tensor] = []
    model = perceptron()
    opt = mechanize(Twice(model.parameters(), lr=1.0))
    calls = []
    first = opt.step(lambda: calls.append(0) or backward(model, len(calls)))  # type: ignore[func-returns-value]
    assert len(calls) == 2
    assert first is losses[0]
    assert losses[0] is not losses[1]


def test_an_error_in_the_closure_changes_nothing() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 5)
    before = everything(opt)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert not differences(before, everything(opt))


def test_step_hooks_fire_once_on_the_object_they_were_put_on() -> None:
    model = perceptron()
    base = ADAMW(model.parameters())
    fired: list[str] = []
    base.register_step_pre_hook(lambda *_: fired.append("base pre"))
    base.register_step_post_hook(lambda *_: fired.append("base post"))
    opt = mechanize(base)
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    train(model, opt, 1)
    assert fired == ["pre", "base pre", "base post", "post"]


def test_a_pre_hook_may_change_gradients_and_arguments() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=1.0))
    opt.register_step_pre_hook(lambda *_: filled(model.parameters(), 0.5))
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: torch.tensor(7.0)), {}))
    assert opt.step().item() == 7.0
    for p in model.parameters():
        torch.testing.assert_close(opt.state[p][DELTA], torch.full_like(p, -0.5))


def test_global_step_hooks_see_each_optimizer_once() -> None:
    """Two optimizers make one step, the wrapper and its base: a hook that counts steps can tell them apart."""
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    try:
        train(model, opt, 1)
    finally:
        handle.remove()
    assert seen == [opt.base, opt]


def test_state_dict_hooks_fire_once_and_may_change_it() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    fired: list[str] = []
    opt.register_state_dict_pre_hook(lambda *_: fired.append("state pre"))
    opt.register_state_dict_post_hook(lambda o, sd: fired.append("state post") or {**sd, "more": 1})  # type: ignore[func-returns-value]
    opt.register_load_state_dict_pre_hook(lambda o, sd: fired.append(f"load pre {sd.pop('more')}"))  # type: ignore[func-returns-value]
    opt.register_load_state_dict_post_hook(lambda *_: fired.append("load post"))
    opt.load_state_dict(opt.state_dict())
    assert fired == ["state pre", "state post", "load pre 1", "load post"]


def test_the_profiler_sees_the_step_and_zero_grad() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    backward(model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
        opt.zero_grad()
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#MechanicAdamW.step" in names
    assert "Optimizer.step#AdamW.step" in names
    assert any(name.startswith("Optimizer.zero_grad#") for name in names)


def test_zero_grad_forgets_or_zeroes() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    backward(model, 0)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.step()
    assert opt.scale.item() == 0
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------------------ what is not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD-momentum", "AdamW", "Adagrad")], ids=str)
@pytest.mark.parametrize("variant", ["for-loop", "fused"])
def test_one_gradient_that_is_not_finite_skips_the_step_whole(
    bad: float, dtype: torch.dtype, row: Row, variant: str
) -> None:
    """Peers turn their scale into NaN for ever. Here nothing changes but a count, and training goes on."""
    model = perceptron(dtype)
    opt = mechanize(row.build(model.parameters(), variant))
    train(model, opt, 10)
    before, metrics = everything(opt, without=("mechanic_skipped",)), opt.metrics()
    for step in (10, 11):
        backward(model, step)
        model[2].weight.grad[1, 3] = bad
        if step == 10:
            with pytest.warns(UserWarning, match="was not finite: the step was skipped whole"):
                opt.step()
        else:
            opt.step()  # warned of once: a second warning would be an error here
    assert not differences(before, everything(opt, without=("mechanic_skipped",)))
    after = opt.metrics()
    assert not math.isfinite(after.pop("mechanic/grad_norm"))
    del metrics["mechanic/grad_norm"]
    assert after == {**metrics, SKIPPED: metrics[SKIPPED] + 2}
    train(model, opt, 5, first=12)
    assert opt.metrics()["mechanic/steps"] == 15
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_first_step_that_is_not_finite_leaves_no_state() -> None:
    """SGD would keep a momentum of NaN for ever."""
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    filled(model.parameters(), float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert not opt.state
    assert opt.metrics()[SKIPPED] == 1


def test_the_count_of_skipped_steps_survives_a_checkpoint() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    filled(model.parameters(), float("inf"))
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    twin = mechanize(ADAMW(model.parameters()))
    twin.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="not finite"):
        metrics = twin.metrics()
    assert (metrics["mechanic/steps"], metrics[SKIPPED]) == (3, 1)


def test_a_grad_scaler_skips_an_overflow_and_unscales_the_rest() -> None:
    """With fp16 autocast on the CPU: the overflow halves the loss scale and touches nothing else."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    losses = []
    for step in range(60):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        before, loss_scale = everything(opt), scaler.get_scale()
        if step == 20:
            model[0].bias.grad[0] = float("inf")
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step == 20:
            assert not differences(before, everything(opt))
            assert scaler.get_scale() == loss_scale / 2
        losses.append(loss.item())
    assert opt.metrics()["mechanic/steps"] == 59
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_grad_scaler_unscales_for_a_fused_base_too(name: str) -> None:
    """A fused base says that it takes scaled gradients by itself: Mechanic's sums would be taken of scaled ones."""
    row = next(r for r in OPTIMIZERS if r.name == name)
    models = perceptron(), perceptron()
    opts = [mechanize(row.build(m.parameters(), "fused")) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    train(models[0], opts[0], 20)
    for step in range(20):
        backward(models[1], step)
        scaler.scale(torch.ones(()))
        for p in models[1].parameters():
            p.grad.mul_(2.0**7)
        scaler.step(opts[1])
        scaler.update()
    assert not differences(everything(opts[0]), everything(opts[1]))


def test_clipped_and_accumulated_gradients_are_what_is_seen() -> None:
    models = [perceptron(torch.float64) for _ in range(2)]
    opts = [mechanize(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
    for step in range(10):
        grads = []
        for part in (0, 1):
            backward(models[0], 2 * step + part)
            grads.append([p.grad for p in models[0].parameters()])
        for p, q, a, b in zip(models[0].parameters(), models[1].parameters(), *grads, strict=True):
            p.grad = a + b
            q.grad = a.clone()
            q.grad += b
        for model, opt in zip(models, opts, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    assert not differences(everything(opts[0]), everything(opts[1]))
    total = sum(p.grad.square().sum() for p in models[0].parameters()).sqrt()
    assert total.item() == pytest.approx(0.1, rel=1e-3)


# ------------------------------------------------------------------------------------------------ fused on a CPU

FUSED_ON_CPU = [row for row in OPTIMIZERS if row.name in ("Adam", "AdamW", "SGD")]


@pytest.mark.parametrize("row", FUSED_ON_CPU, ids=str)
@pytest.mark.parametrize(("backend", "same_as"), [("auto", "fused"), ("foreach", "for-loop")])
def test_a_cpu_steps_by_torchs_fused_kernel_unless_told_otherwise(row: Row, backend: Any, same_as: str) -> None:
    models = perceptron(), perceptron()
    opt = mechanize(row.cls(models[0].parameters(), **row.kwargs), backend=backend)
    train(models[0], opt, 20)
    train(models[1], mechanize(row.build(models[1].parameters(), same_as)), 20)
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert [group["fused"] for group in opt.param_groups] == [None]


def test_weights_that_lie_in_another_order_than_their_gradients_are_not_walked_together() -> None:
    x = torch.arange(6.0).view(2, 3)
    weights = [nn.Parameter(x.clone().t()), nn.Parameter(x.t().contiguous())]
    for weight in weights:
        opt = mechanize(ADAMW([weight], lr=1.0), s_init=1e-2)
        for step in range(10):
            weight.grad = (weight.detach() - step).contiguous()
            opt.step()
    torch.testing.assert_close(weights[0], weights[1])
    assert not torch.equal(weights[0], x.t())


def test_an_error_in_the_fused_kernel_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 3)
    before = copy.deepcopy(model.state_dict())
    backward(model, 3)
    monkeypatch.setattr(torch, "_fused_adamw_", fails)
    with pytest.raises(MemoryError):
        opt.step()
    assert not differences(before, model.state_dict())
    assert [group["fused"] for group in opt.param_groups] == [None]


# ------------------------------------------------------------------------------------------------ errors half way


class Breaks(torch.optim.SGD):
    """Moves some weights, then fails, once it is told to."""

    failing: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if self.failing is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise self.failing
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_error_inside_the_base_leaves_weights_and_tuner_alone(error: BaseException, dtype: torch.dtype) -> None:
    """The tuner had moved on while the weights went back: the next step moved them by the wrong difference."""
    model = perceptron(dtype)
    base = Breaks(model.parameters(), lr=1.0)
    opt = mechanize(base)
    train(model, opt, 10)
    before = everything(opt)
    backward(model, 10)
    base.failing = error
    with pytest.raises(type(error)):
        opt.step()
    base.failing = None
    assert not differences(before, everything(opt))
    assert opt.param_groups[0]["lr"] == 1.0


def test_a_step_repeated_after_an_error_is_the_step_that_was_meant() -> None:
    models = perceptron(), perceptron()
    bases = [Breaks(m.parameters(), lr=0.5) for m in models]
    opts = [mechanize(base) for base in bases]
    for step in range(20):
        train(models[0], opts[0], 1, first=step)
        backward(models[1], step)
        bases[1].failing = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            opts[1].step()
        bases[1].failing = None
        opts[1].step()
    assert not differences(everything(opts[0]), everything(opts[1]))


# ------------------------------------------------------------------------------------------------ what a person does


def test_a_frozen_scale_stays_while_training_goes_on() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, 20)
    opt.freeze()
    tuner, weights = opt.tuner, copy.deepcopy(model.state_dict())
    train(model, opt, 10, first=20)
    assert all(map(torch.equal, tuner[:4], opt.tuner[:4]))
    assert differences(weights, model.state_dict())
    assert opt.metrics()["mechanic/steps"] == 30
    opt.unfreeze()
    train(model, opt, 5, first=30)
    assert not torch.equal(tuner.s, opt.tuner.s)


def test_frozen_training_is_the_bases_own_at_the_effective_lr() -> None:
    model = perceptron(torch.float64)
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.5))
    train(model, opt, 50)
    opt.freeze()
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=opt.effective_lrs[0])
    train(model, opt, 20, first=50)
    train(twin, plain, 20, first=50)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lr", [1e-3, 1.0])
@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD", "AdamW", "Rprop")], ids=str)
def test_the_cap_holds_whatever_the_lr(lr: float, row: Row) -> None:
    """max_scale is a factor on the lr, also where delta is measured in other units."""
    model = perceptron()
    free = mechanize(row.build(model.parameters(), lr=lr))
    train(model, free, 40)
    cap = free.scale.item() / 30
    model = perceptron()
    opt = mechanize(row.build(model.parameters(), lr=lr), max_scale=cap, smoothing=0.0)  # which nears it for ever
    scales = []
    for step in range(40):
        train(model, opt, 1, first=step)
        scales.append(opt.scale.item())
    assert max(scales) == pytest.approx(cap, rel=1e-12)


def test_demechanize_goes_on_at_the_learned_rate_with_its_moments() -> None:
    model = perceptron(torch.float64)
    base = ADAMW(model.parameters(), lr=0.5, weight_decay=0.0)
    opt = mechanize(base)
    train(model, opt, 50)
    lr = opt.effective_lrs[0]
    moments = {p: opt.state[p]["exp_avg"].clone() for p in model.parameters()}
    twin_model, twin = copy.deepcopy((model, opt))
    twin.freeze()
    plain = demechanize(opt)
    assert plain is base
    assert plain.param_groups[0]["lr"] == lr
    assert all(torch.equal(plain.state[p]["exp_avg"], moment) for p, moment in moments.items())
    keys = {k for entries in (*plain.param_groups, *plain.state.values()) for k in entries}
    assert not [k for k in keys if k.startswith("mechanic")]
    train(model, plain, 20, first=50)
    train(twin_model, twin, 20, first=50)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [0, 1])
def test_demechanize_before_anything_was_learned_is_refused(steps: int) -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters()))
    train(model, opt, steps)
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"scales are \[0.0\].*Train a few steps"):
        demechanize(opt)
    assert not differences(before, everything(opt))


def test_demechanize_scales_what_a_scheduler_starts_from() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=torch.tensor(0.5)))
    torch.optim.lr_scheduler.ConstantLR(opt, factor=0.5)
    train(model, opt, 10)
    scale = opt.scale.item()
    plain = demechanize(opt)
    assert float(plain.param_groups[0]["lr"]) == pytest.approx(0.25 * scale, rel=1e-6)
    assert float(plain.param_groups[0]["initial_lr"]) == pytest.approx(0.5 * scale, rel=1e-6)


METRICS = {f"mechanic/{name}" for name in ("scale", "effective_lr", "h", "grad_norm", "steps", "skipped_steps")}


@pytest.mark.parametrize("scope", ["all", "group"])
def test_metrics_name_every_group_where_there_are_several(scope: Any) -> None:
    model = perceptron()
    groups = two_groups(model)
    groups[1]["name"] = "head"
    opt = mechanize(ADAMW(groups), scope=scope)
    train(model, opt, 10)
    metrics = opt.metrics()
    per_group = {f"mechanic/{what}/{name}" for what in ("scale", "effective_lr") for name in ("pg1", "head")}
    assert metrics.keys() == METRICS | per_group
    assert all(type(value) is float for value in metrics.values())
    scales = opt.scales.tolist()
    assert (scales[0] == scales[1]) is (scope == "all")
    assert metrics["mechanic/scale/head"] == scales[1]
    assert metrics["mechanic/effective_lr/head"] == opt.effective_lrs[1] == pytest.approx(0.05 * scales[1])
    assert metrics["mechanic/scale"] == opt.scale.item() == max(scales)


def test_metrics_of_one_group_before_and_after_a_step() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    assert opt.metrics() == dict.fromkeys(METRICS, 0.0)
    train(model, opt, 7)
    metrics = opt.metrics()
    assert metrics.keys() == METRICS
    assert metrics["mechanic/steps"] == 7
    assert metrics["mechanic/effective_lr"] == opt.effective_lrs[0] == opt.scale.item() * 0.5
    assert metrics["mechanic/h"] != 0


def test_the_effective_lr_is_that_of_the_step_made() -> None:
    """A scheduler steps before anybody logs: the next step's lr would be reported, 0 at the end of a cosine."""
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=5)
    for step in range(5):
        lr = opt.param_groups[0]["lr"]
        train(model, opt, 1, first=step)
        scheduler.step()
        assert opt.effective_lrs == [opt.scale.item() * lr]
    assert opt.param_groups[0]["lr"] == 0
    assert opt.effective_lrs[0] > 0


def test_the_effective_lr_after_a_load_is_not_that_of_a_step_before_it() -> None:
    model = perceptron()
    opt = mechanize(ADAMW(model.parameters(), lr=0.5))
    train(model, opt, 5)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.125
    opt.load_state_dict(saved)
    assert opt.effective_lrs == [opt.scale.item() * 0.125]


@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.maximize], ids=str)
def test_maximize_mirrors_minimizing_the_negative(row: Row) -> None:
    models = perceptron(torch.float64), perceptron(torch.float64)
    opts = [mechanize(row.build(m.parameters(), maximize=m is models[1])) for m in models]
    for step in range(20):
        backward(models[0], step)
        backward(models[1], step)
        for p in models[1].parameters():
            p.grad.neg_()
        for opt in opts:
            opt.step()
    assert not differences(models[0].state_dict(), models[1].state_dict())
    assert opts[0].scale.item() == opts[1].scale.item() > 0


def test_one_group_may_maximize_while_another_minimizes() -> None:
    low, high = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt = mechanize(torch.optim.SGD([{"params": [low]}, {"params": [high], "maximize": True}], lr=0.1))
    for _ in range(200):
        opt.zero_grad()
        (low.square().sum() - (high - 3).square().sum()).backward()
        opt.step()
    assert low.abs().max() < 0.5
    assert (high - 3).abs().max() < 1.0


@pytest.mark.parametrize("row", [r for r in OPTIMIZERS if r.name in ("SGD", "AdamW", "RMSprop")], ids=str)
def test_a_tensor_lr_trains_as_a_float_does_and_stays_the_same_object(row: Row) -> None:
    """Compiled steps hold on to the lr tensor: dividing it by the unit must not put another one in its place."""
    models = perceptron(torch.float64), perceptron(torch.float64)
    lr = torch.tensor(0.25, dtype=torch.float64)
    opts = [mechanize(row.build(m.parameters(), lr=each)) for m, each in zip(models, (0.25, lr), strict=True)]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 30)
    assert opts[1].param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert opts[1].scale.item() == pytest.approx(opts[0].scale.item(), rel=1e-9)
    assert opts[1].effective_lrs == [pytest.approx(opts[1].scale.item() * 0.25)]


def test_a_warm_up_that_starts_at_zero_only_waits() -> None:
    """transformers' does: nothing may divide by zero, freeze, or learn from it."""
    model = perceptron()
    start = copy.deepcopy(model.state_dict())
    opt = mechanize(ADAMW(model.parameters(), lr=0.0))
    train(model, opt, 3)
    assert not differences(start, model.state_dict())
    assert opt.scale.item() == 0
    opt.param_groups[0]["lr"] = 0.1
    losses = train(model, opt, 60, first=3)
    assert opt.scale.item() > 0
    assert losses[-1] < losses[0]


def test_repr_shows_the_base_and_the_settings_but_no_vectors() -> None:
    text = repr(mechanize(ADAMW(perceptron().parameters(), lr=0.5), s_decay=0.25))
    assert text.startswith("Mechanic around AdamW (")
    assert "lr: 0.5" in text
    assert "s_decay=0.25" in text
    assert "mechanic_" not in text


def test_what_only_the_base_has_is_found_through_the_wrapper() -> None:
    opt = mechanize(torch.optim.Adagrad(perceptron().parameters()))
    assert opt.share_memory.__self__ is opt.base
    assert isinstance(opt, MechanicOptimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        opt.no_such_thing  # noqa: B018


def test_mechanizing_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = perceptron()
        opt = mechanize(ADAMW(model.parameters()))
        train(model, opt, 3)
    assert opt.metrics()[SKIPPED] == 0


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_loss_does_not_matter_to_sgd(scale: float) -> None:
    """eps was absolute: with a loss of a millionth the scale hardly rose."""
    ends = []
    for factor in (1.0, scale):
        model = perceptron(torch.float64)
        opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(60):
            backward(model, step)
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= factor
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-9)
