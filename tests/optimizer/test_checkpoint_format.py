"""A checkpoint states its format and its settings, damage to it is noticed, and what was once written still loads."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import differences, everything, perceptron, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mechanic_plugins import MechanicOptimizer, Settings, mechanize
from mechanic_plugins.rule.decide import new_tuners

sys.path.append(str(Path(__file__).parent / "data"))
import record_format as golden

pytestmark = pytest.mark.slow  # many small damages
NAN, INF = math.nan, math.inf
KEY = "mechanic_tuner"
MISSING = object()
"""Stands for an entry that is left out."""
RULES: list[Any] = ["relative", "paper", "theory"]


def trained(steps: int = 10, dtype: torch.dtype = torch.float32, **options: Any) -> MechanicOptimizer:
    model = perceptron(dtype)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1), settings=Settings(**options))
    train(model, opt, steps)
    return opt


@functools.cache
def saved_with(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return copy.deepcopy(trained(**dict(options)).state_dict())


class Refusing:
    """A saved state dict, and an optimizer to load damaged copies of it into, which must leave it as it is."""

    def __init__(self, **options: Any) -> None:
        self.options = {name: value for name, value in options.items() if name != "dtype"}
        self.saved = saved_with(tuple(options.items()))
        self.opt = trained(5, **options)
        self.before, self.metrics = everything(self.opt), self.opt.metrics()

    def check(self, damaged: dict[str, Any], message: str) -> None:
        given = copy.deepcopy(damaged)
        with pytest.raises(ValueError, match=message):
            self.opt.load_state_dict(damaged)
        assert not differences(self.before, everything(self.opt))
        assert repr(self.opt.metrics()) == repr(self.metrics)
        assert repr(damaged) == repr(given)

    def check_mechanize(self, damaged: dict[str, Any], message: str) -> None:
        """Also checks that a base that has loaded it is not mechanized."""
        self.check(damaged, message)
        plain = torch.optim.AdamW([{"params": g["params"]} for g in self.opt.param_groups])
        plain.load_state_dict(damaged)
        with pytest.raises(ValueError, match=message):
            mechanize(plain, settings=Settings(**self.options))


def edited(saved: dict[str, Any], index: int, numbers: dict[str, Any] | None = None, **content: Any) -> dict[str, Any]:
    """A copy with other numbers in one group's tuner, and other things beside it."""
    twin = copy.deepcopy(saved)
    group = twin["param_groups"][index]
    entry = json.loads(group[KEY])
    entry["tuner"] |= numbers or {}
    entry |= content
    for entries in (entry, entry["tuner"] if isinstance(entry["tuner"], dict) else {}):
        for name in [name for name, value in entries.items() if value is MISSING]:
            del entries[name]
    group[KEY] = json.dumps(entry)
    return twin


# ------------------------------------------------------------------------------------------------ damage to the tuner

MAY_BE_NEGATIVE = {"signal", "s", "r", "q", "evidence"}
FIELDS = [(rule, f.name) for rule in RULES[:2] for f in fields(new_tuners(Settings(rule=rule), 1)[0])]
NO_NUMBERS = [NAN, INF, -INF, 1e300, None, "1", [], {}, True, 10**400, MISSING]


@pytest.mark.parametrize(("rule", "name"), FIELDS)
def test_every_field_of_a_tuner_is_saved_and_damage_to_it_refused(rule: Any, name: str) -> None:
    """Values that were not finite used to make every weight NaN in the next step; missing ones were read as 0."""
    refusing = Refusing(rule=rule, scope="group")
    good = json.loads(refusing.saved["param_groups"][1][KEY])["tuner"][name]
    values: list[Any] = [*NO_NUMBERS, *([] if name in MAY_BE_NEGATIVE else [-1.0])]
    if isinstance(good, list):
        values = [*([*good[:-1], value] for value in values if value is not MISSING), [], good[:-1], [*good, 1.0]]
        values += [None, 1.0, {}, "", MISSING]
    for index in (0, 1):
        for value in values:
            message = rf"the checkpoint's {name} is .* in param group {index}, expected .*: it is damaged"
            is_length = name == "s" and index == 0 and isinstance(value, list) and len(value) != len(good)
            refusing.check(edited(refusing.saved, index, {name: value}), "betas" if is_length else message)
    refusing.check_mechanize(edited(refusing.saved, 1, {name: values[0]}), message)


BESIDE = {
    "format": [None, 0, -1, "1", NAN, [], MISSING],
    "settings": [None, 1, [], "relative", MISSING, {}],
    "tuners": [None, "1", 1.5, [], 0, -1, 7, MISSING],
    "tuner": [None, 1.0, [], {}, "", MISSING],
    "calls": [None, "1", 1.5, -1, True, NAN, [], {}, MISSING],
    "frozen": [None, 0, 1, "True", [], MISSING],
    "released": [None, 0, 1, "released", [], MISSING],
    "last_lr": [NAN, INF, 1e300, -0.1, 0.0, None, "0.1", [], True, 10**400, MISSING],
    "peak_lr": [NAN, INF, 1e300, -0.1, 0.0, None, "0.1", [], True, 10**400, MISSING],
}


@pytest.mark.parametrize("rule", ["relative", "theory"])
@pytest.mark.parametrize("name", BESIDE)
def test_damage_beside_the_numbers_is_refused(name: str, rule: Any) -> None:
    refusing = Refusing(rule=rule)
    assert json.loads(refusing.saved["param_groups"][0][KEY]).keys() == BESIDE.keys()
    for index in (0, 1):
        for value in BESIDE[name]:
            refusing.check_mechanize(edited(refusing.saved, index, **{name: value}), "the checkpoint")


@pytest.mark.parametrize("index", [0, 1])
def test_an_entry_that_is_not_what_was_written_is_refused(index: int) -> None:
    """Among them one that was cut short."""
    refusing = Refusing()
    text = refusing.saved["param_groups"][index][KEY]
    others: list[Any] = [1, 1.0, True, [], {}, b"", torch.ones(1), "[]", "{}", "1", "null", '"format"', text + "}"]
    for value in [*others, *(text[:length] for length in range(0, len(text), 9))]:
        damaged = copy.deepcopy(refusing.saved)
        damaged["param_groups"][index][KEY] = value
        refusing.check(damaged, f"the checkpoint's {KEY} is .* in param group {index}, expected .*: it is damaged")


@pytest.mark.parametrize("index", [0, 1])
def test_a_group_without_an_entry_is_refused(index: int) -> None:
    refusing = Refusing()
    damaged = copy.deepcopy(refusing.saved)
    del damaged["param_groups"][index][KEY]
    refusing.check_mechanize(damaged, f"only some .* hold Mechanic's tuner, group {index} does not: it is damaged")


@pytest.mark.parametrize(
    ("tuner", "content"),
    [
        ({"scale": 1e-3}, {}),
        ({}, {"frozen": True}),
        ({}, {"calls": 3}),
        ({}, {"released": True}),
        ({}, {"settings": {"rule": "relative", "scope": "group"}}),
    ],
    ids=str,
)
def test_groups_that_contradict_each_other_are_refused(tuner: dict[str, Any], content: dict[str, Any]) -> None:
    """They share one tuner, so a second version of it comes from another checkpoint."""
    refusing = Refusing()
    refusing.check_mechanize(edited(refusing.saved, 1, tuner, **content), "param groups .*: it is damaged")


# ------------------------------------------------------------------------------------------------ damaged tensors

NOT_FLOATING = (torch.int64, torch.uint8, torch.bool, torch.complex64)
SLOTS = [
    (rule, dtype, name)
    for rule, dtype, names in (
        ("relative", torch.float32, ["mechanic_ref"]),
        ("relative", torch.bfloat16, ["mechanic_ref", "mechanic_master"]),
        ("paper", torch.float32, ["mechanic_delta"]),
        ("paper", torch.bfloat16, ["mechanic_delta", "mechanic_ref"]),
    )
    for name in names
]


@pytest.mark.parametrize(("rule", "dtype", "name"), SLOTS, ids=str)
def test_a_damaged_tensor_is_refused(rule: Any, dtype: torch.dtype, name: str) -> None:
    """It used to load, and the scale went on differently, or every later step was skipped."""
    refusing = Refusing(rule=rule, dtype=dtype)
    good = refusing.saved["state"][1][name]
    with_nan, with_inf = good.clone(), good.clone()
    with_nan[3], with_inf[0] = NAN, INF
    for value, message in [
        *(
            (value, "expected a floating-point tensor of shape")
            for value in (None, "", "x", [], {}, 1.0, good.tolist())
        ),
        *(
            (good.to(kind), "expected a floating-point tensor")
            for kind in (torch.int64, torch.uint8, torch.bool, torch.complex64)
        ),
        (with_nan, "of parameter 1 is not finite"),
        (with_inf, "of parameter 1 is not finite"),
        (good[:-1], "has shape .* where the parameter has"),
        (good[None], "has shape .* where the parameter has"),
        (torch.zeros(()), "has shape .* where the parameter has"),
    ]:
        damaged = copy.deepcopy(refusing.saved)
        damaged["state"][1][name] = value
        refusing.check(damaged, f"the checkpoint's {name} .*{message}")


LACKING = [slot for slot in SLOTS if slot != ("paper", torch.bfloat16, "mechanic_ref")]
"""The reference of a published rule can be computed from the weights: only its own rounding is lost."""


@pytest.mark.parametrize(("rule", "dtype", "name"), LACKING, ids=str)
@pytest.mark.parametrize("ids", [[0], [3], [0, 1, 2, 3]], ids=str)
def test_a_missing_tensor_is_refused(rule: Any, dtype: torch.dtype, name: str, ids: list[int]) -> None:
    """All masters may be missing: float32 weights have none, and may become 16-bit ones."""
    refusing = Refusing(rule=rule, dtype=dtype)
    damaged = copy.deepcopy(refusing.saved)
    for key in ids:
        del damaged["state"][key][name]
    if name == "mechanic_master" and len(ids) == 4:
        trained(0, rule=rule, dtype=dtype).load_state_dict(damaged)
    else:
        refusing.check(damaged, f"Mechanic's tuner but no {name} of parameter {ids[0]}")


def test_the_reference_of_a_published_rule_is_found_again() -> None:
    """See LACKING."""
    opt, twin = (trained(20, dtype=torch.bfloat16, rule="paper", s_init=1e-2) for _ in range(2))
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        del entry["mechanic_ref"]
    twin.load_state_dict(saved)
    for optimizer in (opt, twin):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert twin.scale.item() == opt.scale.item()
    for a, b in zip(opt.state.values(), twin.state.values(), strict=True):
        torch.testing.assert_close(a["mechanic_ref"], b["mechanic_ref"], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("value", [None, "", [], 1.0, torch.ones(3)], ids=str)
def test_state_of_a_parameter_that_is_no_dict_is_refused(value: Any) -> None:
    refusing = Refusing()
    damaged = copy.deepcopy(refusing.saved)
    damaged["state"][2] = value
    refusing.check(damaged, "the checkpoint's state of parameter 2 is .* expected a dict")


def test_sgd_without_any_reference_is_refused() -> None:
    """SGD has no state of its own: the entries of its parameters are empty then, like those of frozen ones."""
    model = perceptron()
    opt = mechanize(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, opt, 10)
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        entry.clear()
    before = everything(opt)
    with pytest.raises(ValueError, match="Mechanic's tuner but no mechanic_ref"):
        opt.load_state_dict(saved)
    assert not differences(before, everything(opt))


# ------------------------------------------------------------------------------------------------ versions


def test_a_newer_format_is_refused() -> None:
    refusing = Refusing()
    newer = edited(edited(refusing.saved, 0, format=2, more=1), 1, format=2, more=1)
    refusing.check_mechanize(newer, "has format 2 .* reads formats up to 1: pip install --upgrade mechanic-plugins")


def test_what_a_later_version_adds_is_ignored() -> None:
    """Without a new format, it may add entries and numbers that this version does not know."""
    saved = copy.deepcopy(trained().state_dict())
    later = edited(edited(saved, 0, {"later": 1.0}, later=[1]), 1, {"later": 1.0}, later=[1])
    twin = trained(5)
    twin.load_state_dict(later)
    assert not differences(twin.state_dict()["param_groups"], saved["param_groups"])


DEVELOPMENT = [
    {"mechanic_s": [0.1], "mechanic_played": 0.1, "mechanic_tuners": '{"format": 4}', "mechanic_frozen": False},
    {"mechanic_s": [0.1] * 6, "mechanic_lr": 0.1, "mechanic_tuners": 1},
]


@pytest.mark.parametrize("keys", DEVELOPMENT, ids=["format 4", "before the formats"])
def test_a_checkpoint_of_a_development_version_is_refused(keys: dict[str, Any]) -> None:
    refusing = Refusing()
    old = copy.deepcopy(refusing.saved)
    for group in old["param_groups"]:
        del group[KEY]
        group.update(copy.deepcopy(keys))
    refusing.check_mechanize(old, "development version of mechanic-plugins before .*: go on from the weights alone")


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(RULES, 2)])
def test_another_rule_cannot_go_on(old: Any, new: Any) -> None:
    message = f"saved with rule='{old}', this optimizer has rule='{new}', .*: pass rule='{old}'"
    Refusing(rule=new).check_mechanize(Refusing(rule=old).saved, message)


def test_other_settings_are_named_once() -> None:
    saved = trained(rule="paper", s_init=1e-3, eps=1e-6, betas=(0.9, 0.99)).state_dict()
    others: dict[str, Any] = {"rule": "paper", "s_init": 1e-2, "eps": 1e-6, "betas": (0.9, 0.95), "max_scale": 2.0}
    opt = trained(**others)
    with pytest.warns(UserWarning, match="saved with different settings") as caught:
        opt.load_state_dict(saved)
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("s_init was 0.001 and is 0.01", "betas was [0.9, 0.99] and is [0.9, 0.95]", "max_scale was None"):
        assert part in message
    assert "eps" not in message
    assert "pass the options max_scale=None, tuner_betas=[0.9, 0.99], s_init=0.001." in message
    twin = trained(**others)
    twin.load_state_dict(opt.state_dict())  # no warning: the last save has the settings in use


def test_a_base_that_loaded_other_settings_says_so_when_it_is_mechanized() -> None:
    opt = trained(max_scale=3.0)
    plain = torch.optim.AdamW([{"params": g["params"]} for g in opt.param_groups])
    plain.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match=r"max_scale was 3.0 and is 2.0.*pass the options max_scale=3.0"):
        mechanize(plain, max_scale=2.0)


# ------------------------------------------------------------------------------------------------ recorded checkpoints


@pytest.mark.parametrize("run", golden.RUNS)
def test_a_recorded_checkpoint_goes_on_as_it_did(run: str) -> None:
    """The gradients are recorded too, so that what follows is the optimizer's alone."""
    content = torch.load(golden.file_of(run), weights_only=True)
    params, opt = golden.build(run)
    with torch.no_grad():
        for p, weights in zip(params, content["weights"], strict=True):
            p.copy_(weights)
    opt.load_state_dict(content["optimizer"])
    assert opt.metrics()["mechanic/steps"] == golden.BEFORE
    is_wide = params[0].dtype == torch.float64
    rtol = 1e-12 if is_wide else 2e-2  # 16-bit moments and weights may be rounded differently elsewhere
    for gradients, scales, weights in zip(*(content[k] for k in ("gradients", "scales", "after")), strict=True):
        found, x = golden.step(params, opt, gradients)
        assert found == pytest.approx(scales, rel=rtol)
        torch.testing.assert_close(x, weights, rtol=rtol, atol=0 if is_wide else 1e-2)
    assert len(content["gradients"]) == golden.AFTER


@pytest.mark.parametrize("run", golden.RUNS)
def test_what_is_written_today_has_the_recorded_keys(run: str) -> None:
    """torch.distributed.checkpoint refuses a checkpoint that lacks a key of the live optimizer."""
    old = torch.load(golden.file_of(run), weights_only=True)["optimizer"]
    new = golden.record(run)["optimizer"]
    assert [group.keys() for group in new["param_groups"]] == [group.keys() for group in old["param_groups"]]
    for saved in (old, new):
        assert [k for k in saved["param_groups"][0] if k.startswith("mechanic_")] == [KEY]
    for name, entries in old["state"].items():
        kinds = {key: (value.dtype, value.shape) for key, value in entries.items()}
        assert {key: (value.dtype, value.shape) for key, value in new["state"][name].items()} == kinds
    assert json.loads(new["param_groups"][0][KEY])["format"] == golden.FORMAT


# ------------------------------------------------------------------------------------------------ where it is written


def test_the_live_groups_hold_the_tuner_once_it_is_written() -> None:
    """Programs that save the param groups by themselves call write_tuner() first. What is out of date must not load."""
    opt, refusing = trained(), Refusing()
    refusing.check(copy.deepcopy(opt.base.state_dict()), f"{KEY} is '' in param group 0, .* it is damaged")
    opt.write_tuner()
    refusing.opt.load_state_dict(copy.deepcopy(opt.base.state_dict()))
    assert not differences(opt.state_dict(), refusing.opt.state_dict())


@pytest.mark.parametrize("rule", ["relative", "paper"])
def test_state_that_was_loaded_into_the_base_counts(rule: Any) -> None:
    """Frameworks may load into the optimizer that they were given the wrapper of."""
    saved = copy.deepcopy(trained(rule=rule).state_dict())
    one, other = (trained(20, rule=rule) for _ in range(2))
    one.load_state_dict(copy.deepcopy(saved))
    other.base.load_state_dict(copy.deepcopy(saved))
    assert other.scale.item() == one.scale.item()
    for optimizer in (one, other):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert not differences(everything(one), everything(other))


def test_a_new_group_gets_a_tuner_of_its_own_and_the_others_keep_theirs() -> None:
    opt = trained(scope="group")
    scales = opt.scales.tolist()
    opt.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    assert opt.scales.tolist() == [*scales, 0.0]
    saved = [json.loads(group[KEY]) for group in opt.state_dict()["param_groups"]]
    assert [entry["tuners"] for entry in saved] == [3, 3, 3]
    assert [entry["tuner"]["scale"] for entry in saved] == [*scales, 0.0]


def test_loading_plain_starts_afresh() -> None:
    opt = trained()
    keys = set(opt.param_groups[0])
    with opt.loading_plain():
        assert not [key for group in opt.param_groups for key in group if key.startswith("mechanic_")]
        assert not [key for entry in opt.state_dict()["state"].values() for key in entry if key.startswith("mechanic_")]
    assert set(opt.param_groups[0]) == keys
    assert opt.scale.item() == opt.metrics()["mechanic/steps"] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["relative", "paper"])
def test_a_folder_of_torch_distributed_checkpoint_goes_on(
    rule: Any, dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    """Bit for bit, into an optimizer that has never made a step."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, twin = perceptron(dtype), perceptron(dtype, seed=1)
    opt, resumed = (mechanize(torch.optim.AdamW(each.parameters(), lr=0.1), rule=rule) for each in (model, twin))
    train(model, opt, 12)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, opt, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    states = {"model": twin.state_dict(), "optimizer": get_optimizer_state_dict(twin, resumed, options=options)}
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    twin.load_state_dict(states["model"])
    set_optimizer_state_dict(twin, resumed, states["optimizer"], options=options)
    for each, optimizer in ((model, opt), (twin, resumed)):
        train(each, optimizer, 5, first=12)
    assert not differences(everything(opt), everything(resumed))
