from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from mechanic_plugins import mechanize
from mechanic_plugins.api import Options
from mechanic_plugins.rule.settings import Rule, Settings

NAN, INF = math.nan, math.inf

# Settings with fragments of their error messages: the value, the reason, the alternative.
ONE_LEARNER = ("the discount factor of one learner", "The paper's are (0.9, ")
DISCOUNT = ("discount factor of past gradients", "1 keeps all of them")
NEVER_LEAVES = ("would never leave zero", "The paper's is 1e-8")
PENALTY = ("norm penalty", "0 turns it off")
DIVISOR = ("the divisor sqrt(v)", "the paper's value is 1e-8")
CAP = ("would never leave zero", "None for no cap")
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({"betas": value}, (f"got {value!r}", *ONE_LEARNER)) for value in ((), [], 0.9, "0.9")),
    *(({"betas": (0.5, value)}, (f"got {value!r}", *DISCOUNT)) for value in (0.0, 1.5, -0.9, NAN, "0.9", True)),
    *(
        ({"s_init": value}, (f"got {value!r}", *NEVER_LEAVES))
        for value in (0.0, -1e-8, 10**400, NAN, INF, "auto", True)
    ),
    *(({"s_decay": value}, (f"got {value!r}", *PENALTY)) for value in (-0.01, 10**400, NAN, INF, "0")),
    *(({"eps": value}, (f"got {value!r}", *DIVISOR)) for value in (-1e-8, 10**400, NAN, INF, "1e-8")),
    *(({"max_scale": value}, (f"got {value!r}", *CAP)) for value in (0.0, -1.0, 10**400, NAN, INF, "1")),
    ({"eps": 0.0, "rule": "experiments"}, ("got 0", "divides eps by eps", "Use 1e-8, or rule='paper'")),
    ({"eps": 0, "rule": "optax"}, ("got 0", "divides eps by eps", "Use 1e-8, or rule='paper'")),
    ({"rule": "adam"}, ("got 'adam'", "must be one of 'relative', 'paper', 'experiments', 'optax', 'theory'")),
    ({"scope": "layer"}, ("got 'layer'", "must be one of 'all', 'group'")),
    ({"scope": None}, ("got None", "must be one of 'all', 'group'")),
    ({"normalize_lr": 1}, ("got 1", "must be True or False")),
    ({"normalize_lr": None}, ("got None", "must be True or False")),
]


@pytest.mark.parametrize(("options", "fragments"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_a_value_out_of_range_is_refused_with_the_reason_and_a_remedy(
    options: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        Settings(**{"rule": "paper", **options})
    message = str(refusal.value)
    missing = [f for f in (next(iter(options)), *fragments) if f not in message]
    assert not missing, message


@pytest.mark.parametrize("constant", [{"betas": (0.9,)}, {"s_init": 1e-8}, {"s_decay": 0.0}, {"eps": 1e-8}], ids=str)
def test_the_default_rule_has_none_of_the_published_constants(constant: dict[str, Any]) -> None:
    [name] = constant
    with pytest.raises(
        ValueError, match=f"{name} belongs to the published rules, .* choose one of them, as rule='paper'"
    ):
        Settings(**constant)


@pytest.mark.parametrize("options", [{"rule": "adam"}, {"max_scale": 0.0}, {"max_grad_norm": -1.0}], ids=str)
def test_a_refusal_leaves_the_optimizer_as_it_was(options: dict[str, Any]) -> None:
    base = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    before = {**base.param_groups[0]}
    with pytest.raises(ValueError, match=next(iter(options))):
        mechanize(base, **options)
    assert base.param_groups[0] == before


TAKEN: list[dict[str, Any]] = [
    {"betas": [0.5, 1]},
    {"s_init": 1},
    {"s_decay": 0},
    {"eps": 0.0},
    {"max_scale": 1e-30},
    {"normalize_lr": False},
    *({"rule": rule, "scope": "group"} for rule in get_args(Rule)),
]


NUMPY: list[dict[str, Any]] = [
    {name: kind(0.5)}
    for name in ("s_init", "s_decay", "eps", "max_scale")
    for kind in (np.float64, np.float32, np.float16)
]


@pytest.mark.parametrize(
    "options", [*NUMPY, {"betas": (np.float64(0.5), np.float32(1))}, {"s_init": np.int64(1)}], ids=str
)
def test_numpys_numbers_are_kept_as_pythons(options: dict[str, Any], tmp_path: Path) -> None:
    """They used to train and to be saved, and torch.load then refused them."""
    p = torch.ones(2, requires_grad=True)
    opt = mechanize(torch.optim.SGD([p]), settings=Settings(rule="paper", **options))
    p.grad = torch.ones(2)
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "saved.pt")
    opt.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    [(name, value)] = options.items()
    kept = getattr(opt.settings, name)
    assert kept == value
    assert {type(each) for each in (kept if name == "betas" else [kept])} == {float}


@pytest.mark.parametrize("value", [1e-320, 1e-31, 1.1e20, 1e308])
@pytest.mark.parametrize("name", ["s_init", "s_decay", "eps", "max_scale"])
def test_numbers_that_would_overflow_are_refused_before_anything_changes(name: str, value: float) -> None:
    base = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    constants: dict[str, Any] = {name: value}
    option: dict[str, Any] = {"tuner_eps" if name == "eps" else name: value}
    message = rf"{name} must lie between 1e-30 and 1e\+20, got {re.escape(str(value))}: a step"
    with pytest.raises(ValueError, match=message):
        Settings(rule="paper", **constants)
    with pytest.raises(ValueError, match=message):
        mechanize(base, rule="paper", **option)
    assert not [key for key in base.param_groups[0] if key.startswith("mechanic")]


@pytest.mark.filterwarnings("ignore:the weights of parameter 0")  # a step that makes them infinite
@pytest.mark.parametrize("value", [1e-30, 1e20])
@pytest.mark.parametrize("name", ["s_init", "s_decay", "eps", "max_scale"])
@pytest.mark.parametrize("rule", ["paper", "experiments", "optax", "theory"])
def test_what_trains_at_the_bounds_is_loaded_again(rule: Any, name: str, value: float) -> None:
    """s_decay=1e308 used to save a state that its own load called damaged; others stopped in an OverflowError."""
    constants: dict[str, Any] = {name: value}
    for lr in (1e-6, 1.0, 1e3):
        p = torch.ones(2, requires_grad=True)
        opt = mechanize(torch.optim.SGD([p], lr=lr), settings=Settings(rule=rule, **constants))
        for _ in range(6):
            p.grad = p.detach() - 3
            opt.step()
        opt.load_state_dict(opt.state_dict())


def settings_of(**options: Any) -> Settings:
    return mechanize(torch.optim.SGD([torch.zeros(2, requires_grad=True)]), **options).settings


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_values_on_the_edge_are_taken(options: dict[str, Any]) -> None:
    settings = settings_of(settings=Settings(**{"rule": "paper", **options}))
    for name, value in options.items():
        assert getattr(settings, name) == (tuple(value) if name == "betas" else value)


@pytest.mark.parametrize(
    ("rule", "s_init", "eps"),
    [("paper", 1e-8, 1e-8), ("experiments", 1e-8, 1e-10), ("optax", 1e-6, 1e-8), ("theory", 1e-8, 1e-8)],
)
def test_published_rules_come_with_their_constants(rule: Any, s_init: float, eps: float) -> None:
    settings = settings_of(rule=rule)
    assert settings == Settings(rule=rule)
    assert (settings.s_init, settings.eps, settings.s_decay, settings.n) == (s_init, eps, 0.01, 6)


def test_the_options_are_few_and_have_their_defaults_in_the_signature() -> None:
    options = inspect.signature(mechanize(torch.optim.SGD)).parameters
    assert options.keys() >= Options.__annotations__.keys()
    assert {options[name].default for name in ("rule", "max_scale", "settings", "kept_dtype")} == {None}


@pytest.mark.parametrize("name", ["preset", "total_steps", "first_move", "smoothing", "hindsight", "own_warmup"])
def test_an_option_that_is_gone_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"no option {name!r}"):
        mechanize(torch.optim.SGD, **{name: 1})  # type: ignore[call-overload]


def test_settings_beside_what_they_contain_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scope cannot be combined with settings=: write settings=Settings\(scope="):
        mechanize(torch.optim.SGD, settings=Settings(rule="paper"), scope="group")
    with pytest.raises(TypeError, match=r"settings must be a mechanic_plugins.Settings object, got 'paper'"):
        mechanize(torch.optim.SGD, settings="paper")  # type: ignore[arg-type]


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
