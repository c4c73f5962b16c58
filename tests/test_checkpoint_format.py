"""A checkpoint says what it is: its format, its settings, and whether it is whole."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import golden
import pytest
import torch
from problems import differences, everything, perceptron, train

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.checkpoints import format as checkpoint_format

NAN, INF = math.nan, math.inf


def trained(steps: int = 10, **options: Any) -> MechanicOptimizer:
    model = perceptron()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1), **options)
    train(model, opt, steps)
    return opt


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return copy.deepcopy(trained().state_dict())


def refused(saved: dict[str, Any], message: str) -> None:
    """Loading, and mechanizing a base that has loaded it, raise and leave the optimizer as it was."""
    opt = trained(5)
    before, metrics = everything(opt), opt.metrics()
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    assert not differences(before, everything(opt))
    assert opt.metrics() == metrics
    plain = torch.optim.AdamW([{"params": g["params"]} for g in opt.param_groups])
    plain.load_state_dict(saved)
    with pytest.raises(ValueError, match=message):
        mechanize(plain)


VECTORS = ("s", "r", "m", "v")
SCALARS = ("s_init", "played", "h", "lr", "unit")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", [*VECTORS, *SCALARS])
def test_a_number_that_is_not_finite_is_refused(saved: dict[str, Any], name: str, value: float) -> None:
    """It loaded, and the next step made every weight NaN."""
    damaged = copy.deepcopy(saved)
    group, key = damaged["param_groups"][1], f"mechanic_{name}"
    group[key] = [*group[key][:-1], value] if name in VECTORS else value
    refused(damaged, rf"{key} has (nan|inf|-inf) in param group 1, expected a finite number: it is damaged")


KEYS = [*VECTORS, *SCALARS, "steps", "skipped", "frozen", "tuners"]


@pytest.mark.parametrize("name", KEYS)
def test_a_missing_key_is_refused(saved: dict[str, Any], name: str) -> None:
    """The scalars' were taken for 0 without a word, the others' ended in a bare KeyError."""
    damaged = copy.deepcopy(saved)
    del damaged["param_groups"][0][f"mechanic_{name}"]
    refused(damaged, f"param group 0 lacks mechanic_{name}: it is damaged")


@pytest.mark.parametrize("name", ["r", "m", "v"])
def test_a_short_vector_is_refused(saved: dict[str, Any], name: str) -> None:
    damaged = copy.deepcopy(saved)
    damaged["param_groups"][0][f"mechanic_{name}"].pop()
    refused(damaged, f"mechanic_{name} has .* expected a list of 6 numbers")


WRONG: dict[str, list[tuple[Any, str]]] = {
    "s": [(1.0, "a list of numbers"), ({}, "a list of numbers"), (["1"] * 6, "a finite number")],
    "v": [([-1.0] * 6, "a number >= 0")],
    "played": [([1.0], "a finite number"), ("1", "a finite number"), (None, "a finite number"), (-1.0, ">= 0")],
    "steps": [(1.5, "a whole number"), (-1, "a whole number >= 0"), (NAN, "a whole number"), (True, "a whole number")],
    "unit": [(-1.0, "a number >= 0"), ([], "a finite number")],
    "frozen": [(1, "True, False or 'released'"), (None, "True, False or 'released'")],
    "tuners": [
        ("", "cannot be read"),
        (None, "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2}', "is invalid"),
    ],
}


@pytest.mark.parametrize(("name", "value", "message"), [(k, *row) for k, rows in WRONG.items() for row in rows])
def test_a_value_of_the_wrong_type_is_refused(saved: dict[str, Any], name: str, value: Any, message: str) -> None:
    damaged = copy.deepcopy(saved)
    damaged["param_groups"][0][f"mechanic_{name}"] = value
    refused(damaged, message)


HEADERS = [("settings", None), ("later", []), ("tuners", "1"), ("delta_unit", NAN), ("delta_unit", 0.0), ("format", 0)]


@pytest.mark.parametrize(("entry", "value"), HEADERS)
def test_a_header_that_makes_no_sense_is_refused(saved: dict[str, Any], entry: str, value: Any) -> None:
    damaged = copy.deepcopy(saved)
    group = damaged["param_groups"][0]
    group["mechanic_tuners"] = json.dumps({**json.loads(group["mechanic_tuners"]), entry: value})
    refused(damaged, "mechanic_tuners is .* is invalid: it is damaged")


def test_delta_that_is_no_tensor_counts_as_missing(saved: dict[str, Any]) -> None:
    """torch puts an empty dict where a flattened state dict has nothing."""
    damaged = copy.deepcopy(saved)
    for entry in damaged["state"].values():
        entry["mechanic_delta"] = {}
    opt = trained(5)
    with pytest.raises(ValueError, match="tuner but no mechanic_delta"):
        opt.load_state_dict(damaged)


def test_groups_of_different_formats_are_refused(saved: dict[str, Any]) -> None:
    damaged = copy.deepcopy(saved)
    damaged["param_groups"][1]["mechanic_tuners"] = 1
    refused(damaged, "not all of one format: it is damaged")


@pytest.mark.parametrize("value", [NAN, INF])
def test_delta_that_is_not_finite_is_refused(saved: dict[str, Any], value: float) -> None:
    """It loaded, and every step after it was skipped."""
    damaged = copy.deepcopy(saved)
    damaged["state"][1]["mechanic_delta"][3] = value
    opt = trained(5)
    before = everything(opt)
    with pytest.raises(ValueError, match="mechanic_delta of parameter 1 is not finite"):
        opt.load_state_dict(damaged)
    assert not differences(before, everything(opt))


def test_a_newer_format_is_refused(saved: dict[str, Any]) -> None:
    newer = copy.deepcopy(saved)
    for group in newer["param_groups"]:
        group["mechanic_tuners"] = json.dumps({**json.loads(group["mechanic_tuners"]), "format": 3, "more": 1})
    refused(newer, "has format 3 .* reads formats up to 2: pip install --upgrade mechanic-plugins")


def test_other_settings_are_named_once() -> None:
    """A checkpoint of preset="paper" loaded into the defaults without a word, and went on at half the scale."""
    saved = trained(smoothing=0.9, hindsight=0.5, betas=(0.9, 0.99)).state_dict()
    opt = trained(smoothing=0.8, hindsight=0.5, betas=(0.9, 0.95), max_scale=2.0)
    with pytest.warns(UserWarning, match="saved with different settings") as caught:
        opt.load_state_dict(saved)
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("smoothing was 0.9 and is 0.8", "betas was [0.9, 0.99] and is [0.9, 0.95]", "max_scale was None"):
        assert part in message
    assert "hindsight" not in message
    assert "mechanize(..., betas=[0.9, 0.99], smoothing=0.9, max_scale=None)" in message
    twin = trained(smoothing=0.8, hindsight=0.5, betas=(0.9, 0.95), max_scale=2.0)
    twin.load_state_dict(opt.state_dict())  # says nothing: what was saved last is what was in force


def test_a_base_that_loaded_other_settings_says_so_when_it_is_mechanized() -> None:
    opt = trained(smoothing=0.9)
    plain = torch.optim.AdamW([{"params": g["params"]} for g in opt.param_groups])
    plain.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match=r"smoothing was 0.9 and is 0.5.*mechanize\(\.\.\., smoothing=0.9\)"):
        mechanize(plain, smoothing=0.5)


def load_golden(name: str, **options: Any) -> tuple[golden.Bowl, MechanicOptimizer]:
    case = golden.CASES[name]
    model, opt = golden.build(dataclasses.replace(case, settings={**case.settings, **options}))
    saved = torch.load(golden.FOLDER / "0.1.0" / f"{name}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    return model, opt


def test_the_change_of_the_default_rule_since_0_1_is_named() -> None:
    """0.1 saved no settings: whoever resumes after an upgrade must learn how to keep the old behaviour."""
    with pytest.warns(UserWarning, match=r"0\.1, which saved no settings.*preset='0\.1'") as caught:
        load_golden("adamw", rule="optimistic", eps=0.0)
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["adamw", "preset-paper", "rule-theory"])
def test_a_rule_that_was_chosen_on_purpose_is_not_questioned(name: str) -> None:
    load_golden(name)  # warnings are errors here


def test_every_field_of_the_tuner_has_its_format() -> None:
    """A new field goes into SINCE, with the format that brings it: an older file then takes the fresh value."""
    assert checkpoint_format.SINCE.keys() == set(checkpoint_format.TunerState._fields)
    assert max(checkpoint_format.SINCE.values()) <= checkpoint_format.FORMAT


def test_a_file_from_before_own_warmup_has_no_lr() -> None:
    case = golden.CASES["preset-paper"]
    saved = torch.load(golden.FOLDER / "0.1.0" / "preset-paper.pt", weights_only=True)
    for group in saved["optimizer"]["param_groups"]:
        del group["mechanic_lr"]
    model, opt = golden.build(case)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    golden.train(model, opt, case, golden.SAVED, golden.LAST)
    golden.assert_continues(golden.result(model, opt), "0.1.0", "preset-paper", case.dtype)


def test_a_field_that_came_later_travels_in_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key of its own it would shut out the older versions' sharded checkpoints."""
    keys = set(trained(1).param_groups[0])
    monkeypatch.setitem(checkpoint_format.SINCE, "h", 2)
    opt = trained(scope="group")
    saved = copy.deepcopy(opt.state_dict())
    assert set(saved["param_groups"][0]) == keys - {"mechanic_h"}
    twin = trained(5, scope="group")
    twin.load_state_dict(saved)
    assert twin.metrics()["mechanic/h"] == opt.metrics()["mechanic/h"] != 0
    header = json.loads(saved["param_groups"][0]["mechanic_tuners"])
    saved["param_groups"][0]["mechanic_tuners"] = json.dumps({**header, "later": {}})
    with pytest.raises(ValueError, match="param group 0 lacks mechanic_h"):
        twin.load_state_dict(saved)


def test_a_field_that_came_later_is_fresh_from_an_older_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint_format.SINCE, "h", 2)
    _, opt = load_golden("adamw")
    assert opt.metrics()["mechanic/h"] == 0
    assert opt.scale.item() > 0


def test_a_new_group_gets_a_tuner_of_its_own_and_the_others_keep_theirs() -> None:
    opt = trained(scope="group")
    scales = opt.scales.tolist()
    opt.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    assert opt.scales.tolist() == [*scales, 0.0]
    saved = opt.state_dict()["param_groups"]
    assert [json.loads(g["mechanic_tuners"])["tuners"] for g in saved] == [3, 3, 3]
    assert saved[2]["mechanic_steps"] == 10


def test_loading_plain_starts_afresh() -> None:
    opt = trained()
    keys = set(opt.param_groups[0])
    with opt.loading_plain():
        assert not [key for group in opt.param_groups for key in group if key.startswith("mechanic_")]
        assert not [key for entry in opt.state_dict()["state"].values() for key in entry if key.startswith("mechanic_")]
    assert set(opt.param_groups[0]) == keys
    assert opt.scale.item() == opt.metrics()["mechanic/steps"] == 0
