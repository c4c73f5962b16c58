"""A checkpoint states its format and its settings, and damage to it is noticed."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import differences, everything, perceptron, train
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.checkpoints import format as checkpoint_format
from mechanic_plugins.core import relative
from mechanic_plugins.core.row import SCALARS as FIELDS
from mechanic_plugins.core.row import VECTORS as LISTS
from mechanic_plugins.core.settings import Settings

NAN, INF = math.nan, math.inf


def trained(steps: int = 10, **options: Any) -> MechanicOptimizer:
    model = perceptron()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1), settings=Settings(**options))
    train(model, opt, steps)
    return opt


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return copy.deepcopy(trained().state_dict())


def refused(saved: dict[str, Any], message: str) -> None:
    """Checks that loading it, or mechanizing a base that has loaded it, raises and leaves the optimizer unchanged."""
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
    """It used to load, and the next step made every weight NaN."""
    damaged = copy.deepcopy(saved)
    group, key = damaged["param_groups"][1], f"mechanic_{name}"
    group[key] = [*group[key][:-1], value] if name in VECTORS else value
    refused(damaged, rf"{key} has (nan|inf|-inf) in param group 1, expected a finite number: it is damaged")


KEYS = [*VECTORS, *SCALARS, "steps", "skipped", "frozen", "tuners"]


@pytest.mark.parametrize("name", KEYS)
def test_a_missing_key_is_refused(saved: dict[str, Any], name: str) -> None:
    """Missing scalars were silently read as 0, and other missing keys raised a bare KeyError."""
    damaged = copy.deepcopy(saved)
    del damaged["param_groups"][0][f"mechanic_{name}"]
    refused(damaged, f"param group 0 lacks mechanic_{name}: it is damaged")


@pytest.mark.parametrize("name", ["r", "m", "v"])
def test_a_short_vector_is_refused(saved: dict[str, Any], name: str) -> None:
    damaged = copy.deepcopy(saved)
    damaged["param_groups"][0][f"mechanic_{name}"].pop()
    refused(damaged, f"mechanic_{name} has .* expected a list of 1 numbers")


WRONG: dict[str, list[tuple[Any, str]]] = {
    "s": [(1.0, "a list of numbers"), ({}, "a list of numbers"), (["1"], "a finite number")],
    "v": [([-1.0], "a number >= 0")],
    "played": [([1.0], "a finite number"), ("1", "a finite number"), (None, "a finite number"), (-1.0, ">= 0")],
    "steps": [(1.5, "a whole number"), (-1, "a whole number >= 0"), (NAN, "a whole number"), (True, "a whole number")],
    "unit": [(-1.0, "a number >= 0"), ([], "a finite number")],
    "frozen": [(1, "True, False or 'released'"), (None, "True, False or 'released'")],
    "tuners": [
        ("", "cannot be read"),
        (None, "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 3}', "is invalid"),
        (1, "older than the first release .* go on from its weights"),
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
    """torch puts an empty dict where a flattened state dict lacks an entry."""
    damaged = copy.deepcopy(saved)
    for entry in damaged["state"].values():
        entry["mechanic_ref"] = {}
    opt = trained(5)
    with pytest.raises(ValueError, match="tuner but no mechanic_ref"):
        opt.load_state_dict(damaged)


def test_groups_of_different_formats_are_refused(saved: dict[str, Any]) -> None:
    damaged = copy.deepcopy(saved)
    group = damaged["param_groups"][1]
    group["mechanic_tuners"] = json.dumps({**json.loads(group["mechanic_tuners"]), "format": 2})
    refused(damaged, "not all of one format: it is damaged")


@pytest.mark.parametrize("value", [NAN, INF])
def test_delta_that_is_not_finite_is_refused(saved: dict[str, Any], value: float) -> None:
    """It used to load, and every later step was skipped."""
    damaged = copy.deepcopy(saved)
    damaged["state"][1]["mechanic_ref"][3] = value
    opt = trained(5)
    before = everything(opt)
    with pytest.raises(ValueError, match="mechanic_ref of parameter 1 is not finite"):
        opt.load_state_dict(damaged)
    assert not differences(before, everything(opt))


def test_a_newer_format_is_refused(saved: dict[str, Any]) -> None:
    newer = copy.deepcopy(saved)
    for group in newer["param_groups"]:
        group["mechanic_tuners"] = json.dumps({**json.loads(group["mechanic_tuners"]), "format": 6, "more": 1})
    refused(newer, "has format 6 .* reads formats up to 5: pip install --upgrade mechanic-plugins")


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
    assert "settings=Settings(max_scale=None, betas=[0.9, 0.99], s_init=0.001)" in message
    twin = trained(**others)
    twin.load_state_dict(opt.state_dict())  # no warning: the last save has the settings in use


def test_a_base_that_loaded_other_settings_says_so_when_it_is_mechanized() -> None:
    opt = trained(max_scale=3.0)
    plain = torch.optim.AdamW([{"params": g["params"]} for g in opt.param_groups])
    plain.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match=r"max_scale was 3.0 and is 2.0.*settings=Settings\(max_scale=3.0\)"):
        mechanize(plain, max_scale=2.0)


def test_another_rule_than_the_default_cannot_go_on_from_a_rule() -> None:
    saved = trained(rule="paper", s_init=1e-3).state_dict()
    for rule in ("theory", "optax"):
        with pytest.raises(ValueError, match=f"saved with rule='paper', and rule='{rule}' cannot go on from it"):
            trained(1, rule=rule).load_state_dict(saved)


def of_format_2(steps: int, scope: str = "all", scale: float | None = None) -> tuple[nn.Sequential, dict[str, Any]]:
    """The checkpoint of a run with the former default rule: six betas, and no field of format 3."""
    model = perceptron()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1), scope=scope)
    train(model, opt, steps)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        header = json.loads(group["mechanic_tuners"])
        played = group["mechanic_played"] if scale is None else scale
        group.update({f"mechanic_{name}": [played / 6] * 6 for name in "srmv"})
        group.update(mechanic_s_init=0.01, mechanic_played=played)
        later = {f"mechanic_{name}": header["later"][f"mechanic_{name}"] for name in ("gradients", "longest")}
        settings = {"betas": [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999], "s_init": "auto", "first_move": 3e-3}
        settings |= {"s_decay": 0.0, "eps": 0.0, "rule": "optimistic", "smoothing": 0.97, "hindsight": 0.15}
        settings |= {"own_warmup": True, "max_scale": None, "scope": scope, "normalize_lr": True}
        settings |= {"steps": "normalised", "haste": 1.0, "usual_loss": 0.3}
        group["mechanic_tuners"] = json.dumps({**header, "format": 2, "settings": settings, "later": later})
    return model, saved


@pytest.mark.parametrize("scope", ["all", "group"])
def test_a_run_of_the_former_default_rule_goes_on(scope: Any) -> None:
    """It continues at its learned scale, which new evidence then moves by a bounded factor."""
    model, saved = of_format_2(40, scope)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.03}]
    opt = mechanize(torch.optim.AdamW(groups, lr=0.1), scope=scope)
    with pytest.warns(UserWarning, match="saved with rule='optimistic'. Its learned scale is kept") as caught:
        opt.load_state_dict(saved)
    assert len(caught) == 1
    learned = [group["mechanic_played"] / 0.1 for group in saved["param_groups"]]  # in units of delta
    assert opt.scales.tolist() == pytest.approx(learned, rel=1e-12)
    assert opt.metrics()["mechanic/steps"] == 40
    losses = train(model, opt, 1, first=40)
    for scale, was in zip(opt.scales.tolist(), learned, strict=True):
        assert math.exp(-4 / math.sqrt(21)) <= scale / was * (1 + 1e-9)
        assert scale / was <= math.exp(4 / math.sqrt(21)) * (1 + 1e-9)
    losses += train(model, opt, 200, first=41)
    assert sum(losses[-20:]) < sum(losses[:20])
    for scale, was in zip(opt.scales.tolist(), learned, strict=True):
        assert math.exp(-4) < scale / was < math.exp(4)
    twin = mechanize(torch.optim.AdamW(groups, lr=0.1), scope=scope)
    twin.load_state_dict(opt.state_dict())  # no more warnings
    assert not differences(everything(opt), everything(twin))


def test_a_run_of_the_former_default_rule_that_had_learned_nothing_begins() -> None:
    model, saved = of_format_2(1, scale=0.0)
    opt = mechanize(
        torch.optim.AdamW([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}])
    )
    with pytest.warns(UserWarning, match="saved with rule='optimistic'"):
        opt.load_state_dict(saved)
    losses = train(model, opt, 100, first=1)
    assert opt.scale.item() > 0
    assert sum(losses[-20:]) < sum(losses[:20])


def test_every_field_of_the_tuner_is_saved() -> None:
    saved = trained(rule="theory").state_dict()["param_groups"][0]
    names = {*saved, *json.loads(saved["mechanic_tuners"])["later"]}
    assert {f"mechanic_{name}" for name in (*LISTS, *FIELDS)} <= names
    assert max(checkpoint_format.SINCE.values()) <= checkpoint_format.FORMAT


def test_a_field_that_came_later_travels_in_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of its own would make older versions' sharded checkpoints unloadable."""
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


# ------------------------------------------------------------------------------------------------ formats 3 and 4


def as_format_4(opt: Any) -> dict[str, Any]:
    """The checkpoint that a version with another prior and unit of size would have saved."""
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        header = json.loads(group["mechanic_tuners"]) | {"format": 4}
        header["later"]["mechanic_size"] *= relative.PRIOR / 0.2
        group["mechanic_tuners"] = json.dumps(header)
    return saved


def test_a_run_with_another_unit_of_size_goes_on() -> None:
    model, twin = perceptron(), perceptron()
    opt, resumed = (mechanize(torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (model, twin))
    train(model, opt, 12)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(as_format_4(opt))
    for each, optimizer in ((model, opt), (twin, resumed)):
        train(each, optimizer, 5, first=12)
    assert resumed.scale.item() == pytest.approx(opt.scale.item(), rel=1e-12)


def as_format_3(opt: Any) -> dict[str, Any]:
    """The checkpoint that a version with delta in place of the references would have saved."""
    saved = as_format_4(opt)
    played = saved["param_groups"][0]["mechanic_played"]
    for group in saved["param_groups"]:
        header = json.loads(group["mechanic_tuners"]) | {"format": 3}
        later, steps = header["later"], max(header["later"]["mechanic_elapsed"] / group["mechanic_lr"], 1)
        later["mechanic_path"] = math.sqrt(later["mechanic_path"] * steps)
        group["mechanic_tuners"] = json.dumps(header)
    for entries, p in zip(saved["state"].values(), opt.param_groups[0]["params"], strict=True):
        ref, master = entries["mechanic_ref"], entries.pop("mechanic_master", p.detach())
        entries["mechanic_delta"] = (master.float() - ref.float()) / played if played else ref.float()
        if p.dtype == torch.float32 or not played:
            del entries["mechanic_ref"]
            if p.dtype != torch.float32:
                entries["mechanic_ref"] = p.detach().clone()
    return saved


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 12])
def test_a_run_with_delta_goes_on(steps: int, dtype: torch.dtype, weights_first: bool) -> None:
    """It resumes even if weights are loaded after the optimizer, and from before the first move, at a scale of 0."""
    model = perceptron(dtype)
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, opt, steps)
    twin = perceptron(dtype)
    resumed = mechanize(torch.optim.AdamW(twin.parameters(), lr=1e-2))
    loads = [lambda: twin.load_state_dict(model.state_dict()), lambda: resumed.load_state_dict(as_format_3(opt))]
    for load in loads if weights_first else loads[::-1]:
        load()
    for each, optimizer in ((model, opt), (twin, resumed)):
        train(each, optimizer, 5, first=steps)
    assert resumed.scale.item() == pytest.approx(opt.scale.item(), rel=1e-3)
    assert all("mechanic_delta" not in state for state in resumed.state.values())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_of_torch_distributed_checkpoint_with_delta_goes_on(
    dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    """DCP loads by the optimizer's own key names, and used to refuse a checkpoint with other names."""
    model, options = perceptron(dtype), StateDictOptions(flatten_optimizer_state_dict=flat)
    opt = mechanize(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, opt, 12)
    names, written = [name for name, _ in model.named_parameters()], as_format_3(opt)
    saved: dict[str, Any] = {"state": dict(zip(names, written["state"].values(), strict=True))}
    saved["param_groups"] = [{**written["param_groups"][0], "params": names}]
    if flat:
        saved = {f"state.{n}.{k}": v for n, entries in saved["state"].items() for k, v in entries.items()} | {
            f"param_groups.{n}.{k}": v for n in names for k, v in saved["param_groups"][0].items() if k != "params"
        }
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    twin = perceptron(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = mechanize(torch.optim.AdamW(twin.parameters(), lr=1e-2))

    def load() -> None:
        states = get_optimizer_state_dict(twin, resumed, options=options)
        dcp.load({"optimizer": states}, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(twin, resumed, states, options=options)

    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: .*mechanic_(ref|master)"):
        load()
    with resumed.loading_old():
        load()
    for each, optimizer in ((model, opt), (twin, resumed)):
        train(each, optimizer, 5, first=12)
    assert resumed.scale.item() == pytest.approx(opt.scale.item(), rel=1e-3)
    assert all("mechanic_delta" not in state for state in resumed.state.values())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-5)
