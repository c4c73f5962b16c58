"""`mechanic_plugins.optim`: classes that programs find by name and build themselves."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from problems import differences, everything, perceptron, train
from torch.optim import Optimizer

from mechanic_plugins import MechanicOptimizer, Mechanized, Settings, demechanize, lion, mechanize, muon, optim, unwrap
from mechanic_plugins.options import DEFAULTS, Options, parameters

BASES: dict[str, type[Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
    "Lion": lion.Lion,
    "Muon": muon.MuonWithAdamW,
}
NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
EVERY = pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS_MUON) if n == "Muon" else n for n in BASES])


def test_the_table_is_the_module() -> None:
    assert {*BASES, "wrap"} == set(optim.__all__)


# -------------------------------------------------------------------- the classes


@EVERY
def test_they_are_real_classes_with_a_home(name: str) -> None:
    cls = getattr(optim, name)
    assert issubclass(cls, MechanicOptimizer)
    assert issubclass(cls, Mechanized)
    assert (cls.__module__, cls.__qualname__, cls.__name__) == ("mechanic_plugins.optim", name, name)
    assert cls.base_class is BASES[name]


@EVERY
def test_the_signature_has_the_bases_arguments_then_mechanics(name: str) -> None:
    own = list(inspect.signature(BASES[name]).parameters.values())
    shown = list(inspect.signature(getattr(optim, name)).parameters.values())
    assert [p.name for p in shown[: len(own)]] == [p.name for p in own]
    assert [p.default for p in shown[: len(own)] if p.name != "lr"] == [p.default for p in own if p.name != "lr"]
    taken = {p.name for p in own}
    ours = {f"mechanic_{p.name}" if p.name in taken else p.name: p.default for p in parameters()}
    assert {p.name: p.default for p in shown[len(own) :]} == ours
    assert {p.kind for p in shown[len(own) :]} == {inspect.Parameter.KEYWORD_ONLY}


@EVERY
def test_the_lr_is_1_unless_it_is_more_than_a_factor(name: str) -> None:
    expected = 1e-2 if name == "Adafactor" else 1.0  # its steps have at most the length lr
    cls = getattr(optim, name)
    assert inspect.signature(cls).parameters["lr"].default == expected
    assert cls(perceptron().parameters()).param_groups[0]["lr"] == expected


@EVERY
def test_they_train_as_mechanize_does(name: str) -> None:
    models = perceptron(), perceptron()
    base = BASES[name](models[0].parameters(), lr=1.0, weight_decay=0.1)
    train(models[0], mechanize(base, max_scale=0.1), 10)
    opt = getattr(optim, name)(models[1].parameters(), lr=1.0, weight_decay=0.1, max_scale=0.1)
    train(models[1], opt, 10)
    assert opt.scale > 0
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@EVERY
def test_state_dicts_go_both_ways(name: str) -> None:
    models = perceptron(), perceptron()
    one = getattr(optim, name)(models[0].parameters(), lr=0.5)
    two = mechanize(BASES[name](models[1].parameters(), lr=0.5))
    train(models[0], one, 6)
    models[1].load_state_dict(models[0].state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    train(models[0], one, 6, first=6)
    train(models[1], two, 6, first=6)
    assert not differences(everything(one), everything(two))
    one.load_state_dict(copy.deepcopy(two.state_dict()))
    assert not differences(everything(one), everything(two))


def saved_and_loaded(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@EVERY
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved_and_loaded])
def test_copies_keep_their_class_and_train_on_alike(name: str, copied: Any) -> None:
    model = perceptron()
    opt = getattr(optim, name)(model.parameters(), scope="group")
    train(model, opt, 5)
    twin_model, twin = copied((model, opt))
    assert type(twin) is getattr(optim, name)
    assert twin.settings == opt.settings
    train(model, opt, 5, first=5)
    train(twin_model, twin, 5, first=5)
    assert not differences(everything(opt), everything(twin))


@EVERY
def test_a_class_is_pickled_by_its_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(getattr(optim, name))) is getattr(optim, name)
    assert b"mechanic_plugins.optim" in pickle.dumps(getattr(optim, name))


# -------------------------------------------------------------------- forms of parameters


def named(model: torch.nn.Module) -> list[Any]:
    return list(model.named_parameters())


FORMS = {
    "tensors": lambda model: model.parameters(),
    "named": named,
    "groups": lambda model: [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[2].parameters()}],
    "named groups": lambda model: [{"params": named(model[0])}, {"params": named(model[2])}],
    "empty groups": lambda model: [{"params": []}, {"params": model.parameters()}, {"params": []}],
}


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("form", FORMS)
def test_parameters_come_in_every_form_that_torch_takes(name: str, form: str) -> None:
    """Classes alternate between the scopes, as a scope depends on the groups and not on the class."""
    scope = ("all", "group")[(list(FORMS).index(form) + list(BASES).index(name)) % 2]
    models = perceptron(), perceptron()
    build = getattr(optim, name)
    opt = build(FORMS[form](models[0]), scope=scope)
    losses = train(models[0], opt, 30)
    assert sum(losses[-5:]) < sum(losses[:5])
    twin = build(FORMS[form](models[1]), scope=scope)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    models[1].load_state_dict(models[0].state_dict())
    train(models[0], opt, 3, first=30)
    train(models[1], twin, 3, first=30)
    assert not differences(everything(opt), everything(twin))
    plain = demechanize(opt)
    assert all(group["lr"] > 0 for group in plain.param_groups)


@NEEDS_MUON
def test_muon_takes_a_group_later() -> None:
    """Groups added later used to be unknown to both halves."""
    model, more = perceptron(), torch.nn.Linear(4, 3)
    opt = optim.Muon(model.parameters(), lr=0.5, momentum=0.8, scope="group")
    with pytest.raises(ValueError, match="must hold matrices or other parameters, got both: add two groups"):
        opt.add_param_group({"params": more.parameters()})
    opt.add_param_group({"params": more.weight})
    opt.add_param_group({"params": [more.bias], "lr": 0.25})
    assert [group["use_muon"] for group in opt.param_groups] == [True, False, True, False]
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.5, 0.5, 0.25]
    assert opt.param_groups[2]["momentum"] == 0.8
    both = torch.nn.ModuleList([model, more])
    for _ in range(5):
        both.zero_grad()
        (model(torch.ones(2, 4)) + more(torch.ones(2, 4))).square().sum().backward()
        opt.step()
    assert (opt.scales > 0).all()


@NEEDS_MUON
def test_muon_keeps_names_with_their_parameters() -> None:
    """Groups may carry their parameters' names, as torchtitan's do; each half used to get all of them."""
    names, params = zip(*perceptron().named_parameters(), strict=True)
    opt = optim.Muon([{"params": list(params), "param_names": list(names)}])
    assert len(opt.param_groups) == 2
    of = dict(zip(names, params, strict=True))
    for group in opt.param_groups:
        assert [id(of[name]) for name in group["param_names"]] == [id(p) for p in group["params"]]


# -------------------------------------------------------------------- wrap


class Own(torch.optim.SGD):
    """A user's optimizer with an argument named like one of Mechanic's options, and **kwargs."""

    def __init__(self, params: Any, lr: float = 1e-3, scope: str = "mine", **more: Any) -> None:
        super().__init__(params, lr, **more)
        self.scope = scope


class Lame(torch.optim.Optimizer):
    """Not known to be linear in lr."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})


def test_wrap_makes_such_a_class_of_any() -> None:
    cls = optim.wrap(Own, max_scale=0.25, scope="group")
    shown = inspect.signature(cls).parameters
    assert [*shown][:3] == ["params", "lr", "scope"]
    assert [*shown][-1] == "more"
    assert (shown["max_scale"].default, shown["mechanic_scope"].default, shown["lr"].default) == (0.25, "group", 1.0)
    opt = cls(perceptron().parameters(), momentum=0.5, max_grad_norm=2.0)
    assert (opt.base.scope, opt.settings.scope) == ("mine", "group")
    assert (opt.settings.max_scale, opt.max_grad_norm, opt.param_groups[0]["momentum"]) == (0.25, 2.0, 0.5)
    assert cls(perceptron().parameters(), mechanic_scope="all").settings.scope == "all"
    twin = pickle.loads(pickle.dumps(cls))(perceptron().parameters())
    assert (twin.settings.max_scale, twin.settings.scope, twin.param_groups[0]["lr"]) == (0.25, "group", 1.0)
    assert inspect.signature(optim.wrap(Lame)).parameters["lr"].default == 1e-3


class Sub(optim.AdamW):
    """A subclass as users write it."""

    def __init__(self, params: Any, speed: float = 0.5) -> None:
        super().__init__(params, lr=speed, scope="group")


def test_a_class_can_be_subclassed() -> None:
    opt = Sub(perceptron().parameters())
    assert (opt.param_groups[0]["lr"], opt.settings.scope) == (0.5, "group")
    assert type(pickle.loads(pickle.dumps(opt))) is Sub


# -------------------------------------------------------------------- options, checkpoints and imports


def test_there_are_at_most_fourteen_options_and_each_is_documented() -> None:
    assert list(DEFAULTS) == list(Options.__annotations__) == [p.name for p in parameters()]
    assert len(DEFAULTS) <= 14
    documented = inspect.getdoc(mechanize) or ""
    assert [name for name in DEFAULTS if f"\n    {name}: " not in documented] == []


def test_a_checkpoint_that_names_a_class_is_loaded() -> None:
    """darts saves its models like this, and torch.load used to refuse them."""
    buffer = io.BytesIO()
    torch.save({"optimizer_cls": optim.Adam}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["optimizer_cls"] is optim.Adam


@pytest.mark.slow
def test_importing_it_loads_no_package_that_was_not_asked_for() -> None:
    program = """
import json, sys
import mechanic_plugins.optim
loaded = [name for name in ("bitsandbytes", "transformers", "accelerate", "lightning") if name in sys.modules]
dir(mechanic_plugins.optim)
print(json.dumps(loaded + [name for name in ("bitsandbytes",) if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == []


@pytest.mark.slow
def test_bitsandbytes_comes_when_it_is_asked_for() -> None:
    theirs = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    assert optim.AdamW8bit is optim.AdamW8bit
    assert optim.AdamW8bit.base_class is theirs
    assert "AdamW8bit" in dir(optim)
    assert pickle.loads(pickle.dumps(optim.AdamW8bit)) is optim.AdamW8bit
    models = perceptron(), perceptron()
    opt = optim.AdamW8bit(models[0].parameters(), min_8bit_size=1)
    train(models[0], opt, 10)
    twin = mechanize(theirs(models[1].parameters(), lr=1.0, min_8bit_size=1))
    train(models[1], twin, 10)
    assert opt.scale > 0
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


# -------------------------------------------------------------------- mistakes


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(vars(optim), "AdamW8bit", raising=False)
    with pytest.raises(ImportError, match=r"optim.AdamW8bit needs bitsandbytes: pip install bitsandbytes"):
        from mechanic_plugins.optim import AdamW8bit  # noqa: F401
    assert "AdamW8bit" not in dir(optim)


def test_an_unknown_optimizer_is_answered_with_the_known_one() -> None:
    with pytest.raises(AttributeError, match=r"no optimizer 'Adamw': did you mean 'AdamW'\? wrap\(cls\)"):
        optim.Adamw  # noqa: B018
    with pytest.raises(AttributeError, match=r"no optimizer 'Prodigy'\. wrap\(cls\) makes one of any class"):
        optim.Prodigy  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_skale": 0.1}, r"AdamW\(\) has no argument 'max_skale': did you mean 'max_scale'\?"),
        ({"momentum": 0.9}, r"AdamW\(\) has no argument 'momentum'\."),
        ({"mechanic_max_scale": 0.9}, r"'mechanic_max_scale': did you mean 'max_scale'\?"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_known_one(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        optim.AdamW(perceptron().parameters(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"max_skale": 1.0}, TypeError, r"has no option 'max_skale': did you mean 'max_scale'\? It has rule, "),
        ({"eps": 1e-3}, TypeError, r"has no option 'eps'.* The tuner's eps is the option tuner_eps"),
        ({"normalize_lr": False}, TypeError, r"'normalize_lr'.* in Python alone, by mechanize\(\.\.\., settings="),
        (
            {"s_decay": 1e-3},
            ValueError,
            "s_decay belongs to the published rules, .* choose one of them, as rule='paper'",
        ),
        ({"rule": "paper", "tuner_betas": "x"}, ValueError, "^tuner_betas must be a non-empty tuple or list"),
        ({"rule": "experiments", "tuner_eps": 0}, ValueError, "^tuner_eps must be > 0 with rule='experiments'"),
        ({"rule": np.array(["paper"])}, ValueError, "rule must be one of 'relative', .* got array"),
        ({"rule": np.array(["paper", "optax"])}, ValueError, "rule must be one of 'relative', .* got array"),
        ({"scope": np.array(["all", "group"])}, ValueError, "scope must be one of 'all', 'group', got array"),
        ({"backend": np.array(["auto", "auto"])}, TypeError, "backend must be a string such as 'auto', got array"),
        ({"kept_dtype": np.array([1, 2])}, ValueError, "kept_dtype must be None, torch.float32 or .* got array"),
        ({"max_grad_norm": 10**400}, ValueError, "max_grad_norm must be None or a number > 0"),
        ({"scope": "groups"}, ValueError, "scope must be one of 'all', 'group', got 'groups'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
        ({"group": "x"}, TypeError, "group must be a torch.distributed ProcessGroup or None, got 'x'"),
        ({"group": 3}, TypeError, "group must be a torch.distributed ProcessGroup or None, got 3"),
        ({"sync_replicas": None}, TypeError, "sync_replicas must be True or False, got None"),
        ({"settings": {"s_init": 1.0}}, TypeError, "settings must be a mechanic_plugins.Settings object, got {'s_in"),
        ({"settings": Settings(), "scope": "group"}, ValueError, "scope cannot be combined with settings="),
        (
            {"settings": Settings(rule="paper"), "tuner_betas": (0.9,), "s_decay": 0.0},
            ValueError,
            r"s_decay and tuner_betas cannot be .* settings=Settings\(s_decay=\.\.\., betas=\.\.\.\)",
        ),
    ],
    ids=str,
)
def test_options_that_are_refused(wrong: Any, error: type[Exception], sentence: str) -> None:
    """group="x", group=3 and sync_replicas=None used to be accepted."""
    for target in (torch.optim.SGD, torch.optim.SGD(perceptron().parameters())):
        with pytest.raises(error, match=sentence):
            mechanize(target, **wrong)


def test_the_constants_of_a_published_rule_are_keywords() -> None:
    """Under names of their own where the base has betas and an eps."""
    constants = {"s_init": 1e-3, "s_decay": 0.1, "tuner_betas": [0.9, 0.99], "tuner_eps": 1e-6}
    wanted = Settings(rule="paper", s_init=1e-3, s_decay=0.1, betas=(0.9, 0.99), eps=1e-6)
    built = optim.AdamW(perceptron().parameters(), betas=(0.8, 0.9), eps=1e-5, rule="paper", **constants)
    assert built.settings == wanted
    assert (built.param_groups[0]["betas"], built.param_groups[0]["eps"]) == ((0.8, 0.9), 1e-5)
    assert mechanize(torch.optim.SGD, rule="paper", **constants)(perceptron().parameters()).settings == wanted
    one = mechanize(torch.optim.SGD(perceptron().parameters()), rule="paper", tuner_betas=0.99)
    assert one.settings.betas == (0.99,)


def test_something_else_in_the_parameters_place() -> None:
    built = torch.optim.AdamW(perceptron().parameters())
    for given in (perceptron(), torch.optim.SGD):
        with pytest.raises(TypeError, match=r"AdamW\(\) takes parameters, got .*: write model.parameters\(\)"):
            optim.AdamW(given)
    with pytest.raises(TypeError, match=r"takes parameters, got AdamW: use mechanize\(optimizer\) instead"):
        optim.AdamW(built)
    for wrong in (built, "AdamW"):
        with pytest.raises(TypeError, match=r"wrap\(\) takes a subclass of torch.optim.Optimizer, got "):
            optim.wrap(wrong)
    with pytest.raises(ValueError, match="AdamW is mechanized already"):
        optim.wrap(optim.AdamW)
    with pytest.raises(ValueError, match="AdamW is mechanized already"):
        mechanize(optim.AdamW(perceptron().parameters()))


def test_a_class_in_an_optimizers_place() -> None:
    for function in (demechanize, unwrap):
        with pytest.raises(TypeError, match=r"got the class AdamW .*: build it, as AdamW\(model.parameters\(\)\)"):
            function(optim.AdamW)
