from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS
from problems import differences, everything, perceptron, train, two_groups
from torch import nn

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.rule.settings import Settings

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in OPTIMIZERS}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# base, dtype, settings: each is saved after 15 steps and resumed for as many more in a new process.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{base}-{dtype}": (base, dtype, {})
    for base in ("SGD", "SGD-momentum", "AdamW", "Adagrad", "Adafactor")
    for dtype in DTYPES
}
CASES["theory"] = ("AdamW", "float32", {"rule": "theory"})
CASES["optax"] = ("AdamW", "float32", {"rule": "optax", "s_init": 1e-6})
CASES["paper"] = ("AdamW", "bfloat16", {"rule": "paper", "betas": (0.9, 0.999)})
CASES["max_scale"] = ("AdamW", "float32", {"max_scale": 0.01})
CASES["scope-group"] = ("AdamW", "bfloat16", {"scope": "group"})
BEFORE, AFTER = 15, 15


def build(case: str) -> tuple[nn.Sequential, MechanicOptimizer]:
    base, dtype, options = CASES[case]
    model = perceptron(DTYPES[dtype])
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    return model, mechanize(ROWS[base].build(groups, lr=0.1), settings=Settings(**options))


def resume(folder: Path) -> None:
    """Runs in the new process: resumes every case from its file and trains to the end."""
    for case in CASES:
        model, opt = build(case)
        saved = torch.load(folder / f"{case}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        train(model, opt, AFTER, first=BEFORE)
        torch.save(everything(opt), folder / f"{case}.end.pt")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with every case's end state after the resume, and the end states without interruption."""
    folder = tmp_path_factory.mktemp("resumed")
    ends = {}
    for case in CASES:
        model, opt = build(case)
        train(model, opt, BEFORE)
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, folder / f"{case}.pt")
        train(model, opt, AFTER, first=BEFORE)
        assert opt.scale.item() > 0
        ends[case] = everything(opt)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # for the helpers
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=250, env=env)
    return folder, ends


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_new_process_goes_on_bit_for_bit(case: str, resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, ends = resumed
    assert not differences(torch.load(folder / f"{case}.end.pt", weights_only=True), ends[case])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("base", ["AdamW", "SGD"])
def test_a_run_resumes_bit_for_bit_from_each_of_its_first_steps(base: str, dtype: torch.dtype) -> None:
    """Right before and right after steps that are measured, the first of which moves nothing, and between them."""
    last, model, saved = 34, perceptron(dtype), []
    opt = mechanize(ROWS[base].build(model.parameters(), lr=0.1))
    for step in range(last):
        if step <= 20:
            saved.append(copy.deepcopy((model.state_dict(), opt.state_dict())))
        train(model, opt, 1, first=step)
    for step, (weights, state) in enumerate(saved):
        twin = perceptron(dtype, seed=1)
        resumed = mechanize(ROWS[base].build(twin.parameters(), lr=0.1))
        twin.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(twin, resumed, last - step, first=step)
        assert not differences(everything(opt), everything(resumed)), step


def test_saving_changes_nothing_and_is_not_changed_by_training_on() -> None:
    """A state_dict shares its tensors, like torch's; the tuner's numbers in it are a snapshot."""
    models = perceptron(), perceptron()
    opts = [mechanize(torch.optim.AdamW(m.parameters())) for m in models]
    for step in range(20):
        for model, opt in zip(models, opts, strict=True):
            train(model, opt, 1, first=step)
        opts[0].state_dict()
    assert not differences(everything(opts[0]), everything(opts[1]))
    saved = opts[0].state_dict()
    groups = copy.deepcopy(saved["param_groups"])
    train(models[0], opts[0], 5, first=20)
    assert not differences(saved["param_groups"], groups)


def test_loading_leaves_the_loaded_dict_alone() -> None:
    """The inner dicts may be another optimizer's live state, which popping entries would break."""
    model = perceptron(torch.bfloat16)
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 10)
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    twin_model = copy.deepcopy(model)
    twin = mechanize(torch.optim.AdamW(twin_model.parameters()))
    twin.load_state_dict(state_dict=saved)
    assert not differences(before, saved)
    assert not differences(everything(opt), everything(twin))


def test_a_deferred_save_of_low_precision_weights_keeps_masters_in_float32() -> None:
    """torch's own load casts every floating-point tensor to the parameter's dtype."""
    model = perceptron(torch.bfloat16)
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 10)
    twin = mechanize(torch.optim.AdamW(model.parameters()))
    twin.load_state_dict(opt.state_dict())
    assert {state["mechanic_master"].dtype for state in twin.state.values()} == {torch.float32}
    assert not differences(everything(opt), everything(twin))


@pytest.mark.parametrize("rule", ["relative", "paper"])
def test_a_state_dict_has_a_string_in_each_group_and_tensors(rule: Any) -> None:
    """Only these survive torch.distributed.checkpoint and FSDP: Python values in every group, tensors of p's shape."""
    model = perceptron()
    opt = mechanize(torch.optim.SGD(two_groups(model)), rule=rule)
    train(model, opt, 3)
    saved = opt.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    for group in saved["param_groups"]:
        assert {k: type(v) for k, v in group.items() if k.startswith("mechanic_")} == {"mechanic_tuner": str}
    slot = "mechanic_ref" if rule == "relative" else "mechanic_delta"
    for state, p in zip(saved["state"].values(), model.parameters(), strict=True):
        assert {k: v.shape for k, v in state.items()} == {slot: p.shape}


@pytest.mark.parametrize("base", ["SGD-momentum", "AdamW", "Adagrad"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_old_plain_checkpoint_starts_mechanic_mid_way_and_says_so(base: str, dtype: str) -> None:
    model = perceptron(DTYPES[dtype])
    plain = ROWS[base].build(model.parameters(), lr=0.01)
    train(model, plain, 20)
    saved = copy.deepcopy(plain.state_dict())
    opt = mechanize(ROWS[base].build(model.parameters(), lr=0.01))
    weights = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"saved without Mechanic: the base's moments are kept.*from scratch"):
        opt.load_state_dict(saved)
    for kept, state in zip(saved["state"].values(), opt.state.values(), strict=True):
        assert not differences({k: state[k] for k in kept}, kept)
    assert opt.scale.item() == 0
    train(model, opt, 1, first=20)
    assert not differences(weights, model.state_dict())
    twin = copy.deepcopy(model)
    other = ROWS[base].build(twin.parameters(), lr=0.01)
    other.load_state_dict(saved)
    ours, plains = train(model, opt, 180, first=21), train(twin, other, 180, first=21)
    assert sum(ours[-60:]) < 1.1 * sum(plains[-60:])


@pytest.mark.parametrize("base", ["SGD", "SGD-momentum", "AdamW", "Adagrad", "Adafactor"])
def test_a_plain_optimizer_takes_a_mechanized_checkpoint(base: str) -> None:
    """The moments are the base's own, and it ignores Mechanic's entries, as if there were none."""
    model = perceptron()
    opt = mechanize(ROWS[base].build(model.parameters(), lr=0.01))
    train(model, opt, 20)
    saved, models = copy.deepcopy(opt.state_dict()), [model, copy.deepcopy(model)]
    plains = [ROWS[base].build(each.parameters(), lr=0.01) for each in models]
    plains[0].load_state_dict(copy.deepcopy(saved))  # torch's takes over the tensors
    for entries in (*saved["param_groups"], *saved["state"].values()):
        for key in [key for key in entries if key.startswith("mechanic_")]:
            del entries[key]
    plains[1].load_state_dict({**saved, "state": {i: entries for i, entries in saved["state"].items() if entries}})
    losses = [train(each, plain, 20, first=20) for each, plain in zip(models, plains, strict=True)]
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *(each.parameters() for each in models)))


def test_mechanizing_a_plain_optimizer_that_took_a_mechanized_checkpoint_of_another_n_is_refused() -> None:
    """Its groups hold the old tuner, whose vectors do not fit: the first step used to fail on their shapes."""
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()), rule="paper")
    train(model, opt, 3)
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="saved with 6 betas, this optimizer has 2"):
        mechanize(plain, settings=Settings(rule="paper", betas=(0.9, 0.99)))


def fewer_groups(saved: dict[str, Any]) -> None:
    del saved["param_groups"][1]


def other_groups(saved: dict[str, Any]) -> None:
    first, second = saved["param_groups"]
    second["params"] = [first["params"].pop(), *second["params"]]


def other_shapes(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        for key, value in entry.items():
            if value.dim():
                entry[key] = torch.zeros(*value.shape, 2)


def order_of_params(saved: dict[str, Any]) -> None:
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]


def no_reference(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        del entry["mechanic_ref"]


def half_the_groups(saved: dict[str, Any]) -> None:
    for key in [k for k in saved["param_groups"][1] if k.startswith("mechanic_")]:
        del saved["param_groups"][1][key]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], None], str]] = {
    "betas": (
        {"rule": "paper", "betas": (0.9, 0.99)},
        {"rule": "paper"},
        lambda saved: None,
        "saved with 2 betas, this optimizer has 6: pass the same betas",
    ),
    "fewer groups": ({}, {}, fewer_groups, "different number of parameter groups"),
    "other groups": ({}, {}, other_groups, "doesn't match the size of optimizer's group"),
    "other shapes": ({}, {}, other_shapes, r"has shape \(8, 4, 2\) where the parameter has \(8, 4\)"),
    "other order": ({}, {}, order_of_params, r"has shape \(8,\) where the parameter has \(8, 4\)"),
    "no reference": ({}, {}, no_reference, "tuner but no mechanic_ref of parameter 0"),
    "half the groups": ({}, {}, half_the_groups, "only some of the checkpoint's param groups"),
    "scope group": ({"scope": "group"}, {}, lambda saved: None, "scope='group'"),
    "scope all": ({}, {"scope": "group"}, lambda saved: None, "scope='all'"),
    "rule": (
        {},
        {"rule": "theory"},
        lambda saved: None,
        "neither can go on from the other's state: pass rule='relative'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_what_cannot_be_continued_is_refused_before_anything_is_changed(case: str, base: str) -> None:
    saved_with, loaded_with, damage, message = REFUSED[case]

    def trained(options: dict[str, Any], steps: int) -> MechanicOptimizer:
        model = perceptron()
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
        opt = mechanize(ROWS[base].build(groups, lr=0.1), settings=Settings(**options))
        train(model, opt, steps)
        return opt

    saved = copy.deepcopy(trained(saved_with, 10).state_dict())
    damage(saved)
    opt = trained(loaded_with, 5)
    before, metrics = everything(opt), opt.metrics()
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    assert not differences(before, everything(opt))
    assert opt.metrics() == metrics


def test_a_checkpoint_from_before_the_first_step_loads() -> None:
    """accelerate's prepare() loads an optimizer's own state_dict back into it."""
    for base in ("SGD", "AdamW", "Adagrad"):
        models = perceptron(), perceptron()
        opts = [mechanize(ROWS[base].build(m.parameters(), lr=0.1)) for m in models]
        opts[0].load_state_dict(opts[0].state_dict())
        for model, opt in zip(models, opts, strict=True):
            train(model, opt, 10)
        assert not differences(everything(opts[0]), everything(opts[1]))


def test_a_frozen_scale_stays_frozen_through_a_checkpoint() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 10)
    opt.freeze()
    twin = mechanize(torch.optim.AdamW(model.parameters()))
    twin.load_state_dict(opt.state_dict())
    train(model, twin, 5, first=10)
    assert twin.scale.item() == opt.scale.item()


def test_the_learned_lr_survives_and_is_the_peak_times_the_mean_scale() -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)
    far = time = 0.0
    for step in range(25):
        lr = opt.param_groups[0]["lr"]
        train(model, opt, 1, first=step)
        far, time = far + opt.scale.item() * lr, time + (lr if opt.scale.item() > 0 else 0.0)
        scheduler.step()
    assert opt.learned_lr == pytest.approx(0.3 * far / time, rel=1e-12)
    twin = mechanize(torch.optim.AdamW(model.parameters(), lr=0.3))
    assert twin.learned_lr == 0
    twin.load_state_dict(opt.state_dict())
    assert twin.learned_lr == opt.learned_lr
    assert twin.learned_lrs == opt.learned_lrs == [opt.learned_lr]


def test_parameters_without_a_gradient_have_nothing_to_save() -> None:
    """A checkpoint of a model with a frozen part loads, and that part can be trained afterwards."""
    model = perceptron()
    model[0].requires_grad_(False)
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 10)
    assert set(opt.state_dict()["state"]) == {2, 3}
    twin_model = copy.deepcopy(model).requires_grad_(True)
    twin = mechanize(torch.optim.AdamW(twin_model.parameters()))
    twin.load_state_dict(opt.state_dict())
    assert not differences(everything(opt), everything(twin))
    frozen, whole = train(model, opt, 200, first=10), train(twin_model, twin, 200, first=10)
    assert sum(whole[-50:]) < sum(frozen[-50:])


@pytest.mark.parametrize("options", [{}, {"rule": "paper", "s_init": 1e-2}], ids=["default", "paper"])
@pytest.mark.parametrize(("saved_dtype", "loaded_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_checkpoint_of_another_precision_goes_on_without_a_jump(
    saved_dtype: str, loaded_dtype: str, options: dict[str, Any]
) -> None:
    model, settings = perceptron(DTYPES[saved_dtype]), Settings(**options)
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=0.1), settings=settings)
    train(model, opt, 60)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    twin_model = copy.deepcopy(model).to(DTYPES[loaded_dtype])
    twin = mechanize(torch.optim.AdamW(twin_model.parameters(), lr=0.1), settings=settings)
    twin.load_state_dict(torch.load(file, weights_only=True))
    train(model, opt, 1, first=60)
    train(twin_model, twin, 1, first=60)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=0.02, atol=0.02)
    assert twin.scale.item() == pytest.approx(opt.scale.item(), rel=0.1)


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
