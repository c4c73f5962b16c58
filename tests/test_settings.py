from __future__ import annotations

import inspect
import math
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch

from mechanic_plugins import mechanize
from mechanic_plugins.api import Options
from mechanic_plugins.core.settings import LEFT_OPEN, Rule, Settings

NAN, INF = math.nan, math.inf

# The options, and fragments of the message: the value, the reason, what to write instead.
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"betas": ()}, ("got ()", "the discount factor of one tuner", "The paper's are (0.9, ")),
    ({"betas": []}, ("got []", "the discount factor of one tuner", "The paper's are (0.9, ")),
    ({"betas": 0.9}, ("got 0.9", "the discount factor of one tuner", "The paper's are (0.9, ")),
    ({"betas": None}, ("got None", "the discount factor of one tuner", "The paper's are (0.9, ")),
    ({"betas": "0.9"}, ("got '0.9'", "the discount factor of one tuner", "The paper's are (0.9, ")),
    ({"betas": (0.9, 0.0)}, ("got 0.0", "discount factor of past gradients", "1 keeps all of them")),
    ({"betas": (0.9, 1.5)}, ("got 1.5", "discount factor of past gradients", "1 keeps all of them")),
    ({"betas": (-0.9,)}, ("got -0.9", "discount factor of past gradients", "1 keeps all of them")),
    ({"betas": (NAN,)}, ("got nan", "discount factor of past gradients", "1 keeps all of them")),
    ({"betas": ("0.9",)}, ("got '0.9'", "discount factor of past gradients", "1 keeps all of them")),
    ({"betas": (True,)}, ("got True", "discount factor of past gradients", "1 keeps all of them")),
    ({"s_init": 0.0}, ("got 0.0", "would never leave zero", "'auto'")),
    ({"s_init": -1e-8}, ("got -1e-08", "would never leave zero", "'auto'")),
    ({"s_init": NAN}, ("got nan", "would never leave zero", "'auto'")),
    ({"s_init": INF}, ("got inf", "would never leave zero", "'auto'")),
    ({"s_init": "automatic"}, ("got 'automatic'", "would never leave zero", "'auto'")),
    ({"s_init": True}, ("got True", "would never leave zero", "'auto'")),
    ({"s_decay": -0.01}, ("got -0.01", "norm penalty", "0 turns it off")),
    ({"s_decay": NAN}, ("got nan", "norm penalty", "0 turns it off")),
    ({"s_decay": INF}, ("got inf", "norm penalty", "0 turns it off")),
    ({"s_decay": "0"}, ("got '0'", "norm penalty", "0 turns it off")),
    ({"eps": -1e-8}, ("got -1e-08", "the divisor sqrt(v)", "the paper's value is 1e-8")),
    ({"eps": NAN}, ("got nan", "the divisor sqrt(v)", "the paper's value is 1e-8")),
    ({"eps": INF}, ("got inf", "the divisor sqrt(v)", "the paper's value is 1e-8")),
    ({"eps": "1e-8"}, ("got '1e-8'", "the divisor sqrt(v)", "the paper's value is 1e-8")),
    ({"eps": 0.0, "rule": "experiments"}, ("got 0.0", "divides eps by eps", "Use 1e-8, or rule='paper'")),
    ({"eps": 0, "rule": "optax"}, ("got 0", "divides eps by eps", "Use 1e-8, or rule='paper'")),
    ({"smoothing": -0.1}, ("got -0.1", "moving average", "0 turns it off")),
    ({"smoothing": 1.0}, ("got 1.0", "moving average", "0 turns it off")),
    ({"smoothing": NAN}, ("got nan", "moving average", "0 turns it off")),
    ({"smoothing": 0.9, "rule": "theory"}, ("got 0.9", "exceed the wealth", "the default rule")),
    ({"first_move": 0.0}, ("got 0.0", "relative to the norm of the weights", "The default is 3e-3")),
    ({"first_move": 1.0}, ("got 1.0", "relative to the norm of the weights", "The default is 3e-3")),
    ({"smoothing": "0"}, ("got '0'", "moving average", "0 turns it off")),
    ({"hindsight": -0.1}, ("got -0.1", "fraction of a change of scale", "0 leaves past updates alone")),
    ({"hindsight": 1.1}, ("got 1.1", "fraction of a change of scale", "0 leaves past updates alone")),
    ({"hindsight": NAN}, ("got nan", "fraction of a change of scale", "0 leaves past updates alone")),
    ({"hindsight": True}, ("got True", "fraction of a change of scale", "0 leaves past updates alone")),
    ({"hindsight": 0.3, "rule": "theory"}, ("got 0.3", "re-applied at the new scale", "the default rule")),
    ({"max_scale": 0.0}, ("got 0.0", "would never leave zero", "None for no cap")),
    ({"max_scale": -1.0}, ("got -1.0", "would never leave zero", "None for no cap")),
    ({"max_scale": NAN}, ("got nan", "would never leave zero", "None for no cap")),
    ({"max_scale": INF}, ("got inf", "would never leave zero", "None for no cap")),
    ({"max_scale": "1"}, ("got '1'", "would never leave zero", "None for no cap")),
    ({"rule": "adam"}, ("got 'adam'", "must be one of 'optimistic', 'paper', 'experiments', 'optax', 'theory'")),
    ({"scope": "layer"}, ("got 'layer'", "must be one of 'all', 'group'")),
    ({"scope": None}, ("got None", "must be one of 'all', 'group'")),
    ({"preset": "optax"}, ("got 'optax'", "must be one of 'paper', '0.1'")),
    ({"normalize_lr": 1}, ("got 1", "must be True or False")),
    ({"normalize_lr": None}, ("got None", "must be True or False")),
    ({"own_warmup": 1}, ("got 1", "must be True or False")),
    ({"own_warmup": True, "rule": "theory"}, ("got True", "never rescaled", "the default rule")),
]


@pytest.mark.parametrize(("options", "fragments"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_a_value_out_of_range_is_refused_with_the_reason_and_a_remedy(
    options: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        mechanize(torch.optim.SGD, **options)
    message = str(refusal.value)
    missing = [f for f in (next(iter(options)), *fragments) if f not in message]
    assert not missing, message


def test_a_refusal_leaves_the_optimizer_as_it_was() -> None:
    base = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    before = {**base.param_groups[0]}
    with pytest.raises(ValueError, match="s_init"):
        mechanize(base, s_init=0.0)
    assert base.param_groups[0] == before


TAKEN: list[dict[str, Any]] = [
    {"betas": [0.5, 1]},
    {"betas": (1.0,)},
    {"s_init": 1},
    {"s_decay": 0},
    {"eps": 0.0},
    {"smoothing": 0.97},
    {"hindsight": 0},
    {"hindsight": 1},
    {"max_scale": 1e-30},
    {"scope": "group"},
    {"normalize_lr": False},
    {"own_warmup": False},
    *({"rule": rule} for rule in get_args(Rule)),
]


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_values_on_the_edge_are_taken(options: dict[str, Any]) -> None:
    settings = mechanize(torch.optim.SGD, **options).settings
    for name, value in options.items():
        assert getattr(settings, name) == (tuple(value) if name == "betas" else value)


def test_the_papers_preset_sets_its_constants_and_a_value_beside_it_wins() -> None:
    plain = mechanize(torch.optim.SGD, preset="paper").settings
    assert (plain.s_init, plain.s_decay, plain.eps, plain.rule) == (1e-8, 0.01, 1e-8, "paper")
    mixed = mechanize(torch.optim.SGD, preset="paper", s_decay=0.5, s_init=1e-3, scope="group").settings
    assert (mixed.s_init, mixed.s_decay, mixed.scope) == (1e-3, 0.5, "group")


def test_a_value_beside_a_preset_wins_where_it_is_the_default_too() -> None:
    settings = mechanize(torch.optim.SGD, preset="paper", s_decay=0.0, hindsight=Settings.hindsight).settings
    assert (settings.s_decay, settings.hindsight, settings.smoothing) == (0.0, Settings.hindsight, 0.0)


@pytest.mark.parametrize(
    ("rule", "s_init", "eps"), [("paper", 1e-8, 1e-8), ("experiments", 1e-8, 1e-10), ("optax", 1e-6, 1e-8)]
)
def test_published_rules_come_with_their_constants(rule: Any, s_init: float, eps: float) -> None:
    """rule="optax" kept the defaults' first move and lambda, and was neither the one nor the other."""
    settings = mechanize(torch.optim.SGD, rule=rule).settings
    assert (settings.s_init, settings.eps, settings.s_decay) == (s_init, eps, 0.01)
    assert (settings.smoothing, settings.hindsight, settings.own_warmup) == (0.0, 1.0, False)


def test_the_first_versions_defaults_are_a_preset() -> None:
    settings = mechanize(torch.optim.SGD, preset="0.1").settings
    assert settings == Settings(
        rule="paper", s_init="auto", first_move=1e-3, eps=1e-8, smoothing=0.97, hindsight=0.3, own_warmup=True
    )


def test_a_base_with_a_longer_step_gets_constants_for_the_same_trajectory() -> None:
    longer = Settings(s_init=1e-6, s_decay=0.5, eps=1e-8).at_lr(10.0)
    assert longer == Settings(s_init=1e-7, s_decay=5.0, eps=1e-7)
    assert Settings().at_lr(10.0).s_init == "auto"


def test_every_setting_is_an_option_with_the_same_default() -> None:
    options = inspect.signature(mechanize).parameters
    assert options.keys() - {"optimizer"} == Options.__annotations__.keys()
    following = ("steps", "haste", "usual_loss")  # from the base and the run
    names = [field for field in fields(Settings) if field.name not in following]
    expected = {field.name: None if field.name in LEFT_OPEN else field.default for field in names}
    assert {name: options[name].default for name in expected} == expected


def test_what_is_no_optimizer_is_refused_with_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer .* got Linear"):
        mechanize(torch.nn.Linear(1, 1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer .* got type"):
        mechanize(torch.nn.Linear)  # type: ignore[call-overload]


def test_averaging_over_replicas_needs_replicas() -> None:
    p = torch.ones(2, requires_grad=True)
    opt = mechanize(torch.optim.SGD, sync_replicas=True)([p], lr=1.0)
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first, or leave it False"):
        opt.step()
    assert torch.equal(p, torch.ones(2))
