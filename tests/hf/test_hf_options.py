"""`--optim_args`, `--learning_rate` and schedules: what is accepted, refused or warned about."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import build_model, run
from hf_tiny import HAS_MUON, assert_same, by_step, command_line, plain_loop, skip_unless_json_is_read
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from mechanic_plugins import Settings
from mechanic_plugins.hf.schedules import objection
from mechanic_plugins.options import literal, parsed
from mechanic_plugins.transformers import register

MUON = ["muon"] if HAS_MUON else []


def built(folder: Path, name: str, optim_args: str | None = None, **options: Any) -> Any:
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], optim=f"mechanic_{name}", optim_args=optim_args, **options
    )
    model = build_model()
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    return cls(model.parameters(), **kwargs)


# -------------------------------------------------------------------- parsing


def test_optim_args_are_keywords() -> None:
    text = "scope=group, eps=1e-6,betas=0.9:0.99,amsgrad=true"
    assert parsed(text) == {"scope": "group", "eps": 1e-6, "betas": (0.9, 0.99), "amsgrad": True}
    assert parsed(None) == {}


def test_all_of_mechanics_options_reach_it(tmp_path: Path) -> None:
    text = "sync_replicas=true,scope=group,max_scale=3,backend=foreach,kept_dtype=bfloat16,max_grad_norm=1"
    opt = built(tmp_path, "adamw", text)
    assert built(tmp_path, "adamw", "rule=theory").settings.rule == "theory"
    assert (opt.settings.scope, opt.settings.max_scale) == ("group", 3)
    assert (opt.sync_replicas, opt.backend, opt.kept_dtype, opt.max_grad_norm) == (True, "foreach", torch.bfloat16, 1)


def test_the_constants_of_a_published_rule_are_text_too(tmp_path: Path) -> None:
    """The base's betas and eps stay its own."""
    text = "rule=paper,s_init=1e-3,s_decay=0.1,tuner_betas=0.9:0.99,tuner_eps=1e-6,betas=0.8:0.9,eps=1e-5"
    opt = built(tmp_path, "adamw", text)
    assert opt.settings == Settings(rule="paper", s_init=1e-3, s_decay=0.1, betas=(0.9, 0.99), eps=1e-6)
    assert (opt.param_groups[0]["betas"], opt.param_groups[0]["eps"]) == ((0.8, 0.9), 1e-5)
    assert built(tmp_path, "adamw", "rule=optax,tuner_betas=0.99").settings == Settings(rule="optax", betas=(0.99,))


class Clips(torch.optim.SGD):
    """Has an argument with the name of one of Mechanic's options."""

    def __init__(self, params: Any, lr: float = 1e-3, max_grad_norm: float = 0.0) -> None:
        super().__init__(params, lr)
        self.own = max_grad_norm


def test_a_key_that_both_have_is_the_bases(tmp_path: Path) -> None:
    register("mechanic_clips", Clips)
    opt = built(tmp_path, "clips", "max_grad_norm=2,mechanic_max_grad_norm=1")
    assert (opt.base.own, opt.max_grad_norm) == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scope", "must look like 'key=value,key=value', got 'scope'"),
        ("scope=", "must look like 'key=value,key=value', got 'scope='"),
        ("max_scale=much", "max_scale must be a finite number > 0, got 'much'"),
        ("rule=papr", "rule must be one of .*, got 'papr'"),
        ("max_scal=0.1", "has no argument 'max_scal': did you mean 'max_scale'"),
        ("amsgrat=true", "has no argument 'amsgrat': did you mean 'amsgrad'"),
        (
            "settings=1",
            "settings must be a mechanic_plugins.Settings object, got 1: .* In text, .* as rule=paper,s_decay=0.1",
        ),
        ("normalize_lr=false", "has no argument 'normalize_lr'"),
        ("s_decay=0.1", "s_decay belongs to the published rules, .* choose one of them, as rule='paper', or leave it"),
        ("rule=paper,tuner_betas=0.9:2", "tuner_betas must be numbers in .0, 1., got 2"),
        ("rule=paper,tuner_eps=-1", "tuner_eps must be a finite number >= 0"),
        ("lr=0.1", "use --learning_rate"),
        ("weight_decay=0.1", "use --weight_decay"),
    ],
)
def test_bad_optim_args_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        built(tmp_path, "adamw", text)


def test_values_are_read_by_what_they_look_like() -> None:
    texts = {"1": 1, "1e-3": 1e-3, "true": True, "None": None, "std": "std", "0.9:0.95": (0.9, 0.95)}
    assert {text: literal(text) for text in texts} == texts


# -------------------------------------------------------------------- what reaches the base


def test_the_bases_own_keys_reach_adamw(tmp_path: Path) -> None:
    """transformers drops all of optim_args for AdamW: eps=10 used to change nothing."""
    result = run(command_line(tmp_path, optim_args="eps=10,betas=0.8:0.9,amsgrad=true", max_steps=8))
    expected = plain_loop(
        by_step([result]), lambda groups, lr: torch.optim.AdamW(groups, lr, (0.8, 0.9), 10.0, amsgrad=True), steps=8
    )
    assert_same(result, expected)


REACHED: list[tuple[str, str, dict[str, Any]]] = [
    ("adamw", "eps=1e-6,maximize=true", {"eps": 1e-6, "maximize": True, "fused": True}),
    ("adamw", "fused=false,foreach=True", {"fused": False, "foreach": True}),
    ("sgd", "momentum=0.9,nesterov=true,maximize=false", {"momentum": 0.9, "nesterov": True, "maximize": False}),
    ("adagrad", "lr_decay=0.1,initial_accumulator_value=0.5", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("rmsprop", "alpha=0.5,centered=true,eps=1e-3", {"alpha": 0.5, "centered": True, "eps": 1e-3}),
    ("adafactor", "eps=1e-20:1e-2,clip_threshold=2", {"eps": (1e-20, 1e-2), "clip_threshold": 2}),
    ("lion", "betas=0.9:0.95", {"betas": (0.9, 0.95)}),
    *([("muon", "momentum=0.8", {"momentum": 0.8})] if HAS_MUON else []),
    ("adamw_8bit", "betas=0.8:0.9,min_8bit_size=16", {"betas": (0.8, 0.9)}),
]


@pytest.mark.parametrize(("name", "text", "expected"), REACHED)
def test_keys_reach_every_base(tmp_path: Path, name: str, text: str, expected: dict[str, Any]) -> None:
    opt = built(tmp_path, name, text)
    group = opt.param_groups[0]
    assert {key: group[key] for key in expected} == expected
    assert {type(group[key]) for key in expected} == {type(value) for value in expected.values()}


@pytest.mark.parametrize("name", ["adafactor", "lion"])  # one built by transformers, one by us
def test_an_unknown_key_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match="has no argument 'foo'"):
        built(tmp_path, name, "foo=bar")


def test_values_out_of_range_are_refused_by_whose_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_scale must be a finite number > 0"):
        built(tmp_path, "adamw", "max_scale=-1")
    with pytest.raises(ValueError, match="Invalid epsilon value: -1"):
        built(tmp_path, "adamw", "eps=-1")


def test_the_keys_that_transformers_takes_out_itself_are_known(tmp_path: Path) -> None:
    register("mechanic_ademamix", "ademamix")
    assert OptimizerNames("mechanic_ademamix")
    opt = built(tmp_path, "ademamix", "beta3=0.99,alpha=3,t_alpha=10")
    group = opt.param_groups[0]
    assert (group["betas"], group["alpha"], group["t_alpha"]) == ((0.9, 0.999, 0.99), 3.0, 10)


# -------------------------------------------------------------------- learning rates and schedules


def test_a_learning_rate_of_zero_is_refused(tmp_path: Path) -> None:
    """It used to train nothing, with a scale of 0 in every log."""
    with pytest.raises(ValueError, match=r"learning_rate must not be 0, got 0.0: mechanic_adamw learns .* write 1.0"):
        run(command_line(tmp_path, learning_rate=0))


FLOORS: list[tuple[str, dict[str, Any], float, str]] = [
    (
        "cosine_with_min_lr",
        {"min_lr": 1e-5},
        5e-5,
        "min_lr=1e-05, .* 0.2 of the .*min_lr_rate",
    ),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}, 5e-5, "min_lr_rate"),
    ("polynomial", {"lr_end": 1e-5}, 5e-5, "With learning_rate=1.0, lr_end is the fraction itself"),
    ("polynomial", {}, 1e-6, "lr_end=1e-07, .* 0.1 of the learned peak"),
]
RELATIVE: list[tuple[str, dict[str, Any], float]] = [
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, 5e-5),
    ("cosine_with_min_lr", {"min_lr": 0.0}, 5e-5),
    ("polynomial", {}, 5e-5),
    ("linear", {}, 5e-5),
]


def scheduled(folder: Path, kind: str, kwargs: dict[str, Any], lr: float) -> list[str]:
    if kwargs:
        skip_unless_json_is_read()
    options = {"lr_scheduler_kwargs": json.dumps(kwargs)} if kwargs else {}
    return command_line(folder, max_steps=4, lr_scheduler_type=kind, learning_rate=lr, **options)


@pytest.mark.parametrize(("kind", "kwargs", "lr", "message"), FLOORS)
def test_a_floor_that_is_a_learning_rate_is_warned_of(
    tmp_path: Path, kind: str, kwargs: dict[str, Any], lr: float, message: str
) -> None:
    """The final effective learning rate would depend on the base lr."""
    with pytest.warns(UserWarning, match=message):
        run(scheduled(tmp_path, kind, kwargs, lr))


@pytest.mark.parametrize(("kind", "kwargs", "lr"), RELATIVE)
def test_a_floor_that_is_a_share_is_fine(tmp_path: Path, kind: str, kwargs: dict[str, Any], lr: float) -> None:
    assert run(scheduled(tmp_path, kind, kwargs, lr))["logs"]  # a warning would be an error


def test_plain_optimizers_may_have_any_floor(tmp_path: Path) -> None:
    argv = scheduled(tmp_path, "cosine_with_min_lr", {"min_lr": 1e-5}, 5e-5)
    assert run([*argv, "--optim", "adamw_torch"])["logs"]


@pytest.mark.parametrize(
    ("kwargs", "is_wrong"), [({}, False), ({"min_lr": 1e-6}, True), ({"min_lr": [0.0, 1e-6]}, True)]
)
def test_a_plateau_may_have_no_floor_either(kwargs: dict[str, Any], is_wrong: bool) -> None:
    text = objection("reduce_lr_on_plateau", kwargs, 5e-5)
    assert ("min_lr=1e-06" in (text or "")) is is_wrong


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", *MUON])
def test_a_trainers_optimizer_can_be_pickled(tmp_path: Path, name: str) -> None:
    """Adafactor's class used to be made on the fly, under another class's name."""
    opt = built(tmp_path, name)
    twin = pickle.loads(pickle.dumps(opt))
    assert type(twin).__name__ == type(opt).__name__
    assert type(twin.base) is type(opt.base)
