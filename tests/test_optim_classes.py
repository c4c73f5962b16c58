"""`mechanic_plugins.optim`: classes that programs find by name and build themselves."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import differences, everything, perceptron, train
from torch.optim import Optimizer

from mechanic_plugins import MechanicOptimizer, Mechanized, demechanize, lion, mechanize, muon, optim, unwrap
from mechanic_plugins.optimizer import MechanicOptimizer as Core
from mechanic_plugins.options import Options, OptionsBesideBetas, OptionsBesideBoth, OptionsBesideEps, parameters

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
    assert isinstance(cls(perceptron().parameters()), type(mechanize(BASES[name](perceptron().parameters()))))


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
    expected = 1e-2 if name == "Adafactor" else 1.0  # its steps are at most lr long
    cls = getattr(optim, name)
    assert inspect.signature(cls).parameters["lr"].default == expected
    assert cls(perceptron().parameters()).param_groups[0]["lr"] == expected


def test_what_both_have_is_the_bases() -> None:
    opt = optim.AdamW(
        perceptron().parameters(), 0.5, (0.8, 0.9), mechanic_betas=(0.9, 0.99), mechanic_eps=1e-5, eps=1e-6
    )
    group = opt.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)
    assert (opt.settings.betas, opt.settings.eps) == ((0.9, 0.99), 1e-5)
    plain = optim.SGD(perceptron().parameters(), betas=(0.9,), eps=1e-5, momentum=0.9)
    assert (plain.settings.betas, plain.settings.eps, plain.param_groups[0]["momentum"]) == ((0.9,), 1e-5, 0.9)


@EVERY
def test_they_train_as_mechanize_does(name: str) -> None:
    models = perceptron(), perceptron()
    base = BASES[name](models[0].parameters(), lr=1.0, weight_decay=0.1)
    train(models[0], mechanize(base, s_decay=0.1), 10)
    opt = getattr(optim, name)(models[1].parameters(), lr=1.0, weight_decay=0.1, s_decay=0.1)
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
    opt = getattr(optim, name)(model.parameters(), s_decay=0.1)
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


# -------------------------------------------------------------------- parameters in every form


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
    """The classes take turns with the scope, which knows the groups and not the class."""
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
    """It asked each group which half it was, and those that came later had no answer."""
    model, more = perceptron(), torch.nn.Linear(4, 3)
    opt = optim.Muon(model.parameters(), lr=0.5, momentum=0.8, scope="group")
    with pytest.raises(ValueError, match="must hold matrices alone or none, got both: add two groups"):
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


# -------------------------------------------------------------------- wrap


class Own(torch.optim.SGD):
    """A user's optimizer, with names that Mechanic has too, and whatever else comes."""

    def __init__(self, params: Any, lr: float = 1e-3, scope: str = "mine", **more: Any) -> None:
        super().__init__(params, lr, **more)
        self.scope = scope


class Lame(torch.optim.Optimizer):
    """Nobody has said what its lr is."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})


def test_wrap_makes_such_a_class_of_any() -> None:
    cls = optim.wrap(Own, s_decay=0.25, scope="group")
    shown = inspect.signature(cls).parameters
    assert [*shown][:3] == ["params", "lr", "scope"]
    assert [*shown][-1] == "more"
    assert (shown["s_decay"].default, shown["mechanic_scope"].default, shown["lr"].default) == (0.25, "group", 1.0)
    opt = cls(perceptron().parameters(), momentum=0.5, s_init=1e-3)
    assert (opt.base.scope, opt.settings.scope) == ("mine", "group")
    assert (opt.settings.s_decay, opt.settings.s_init, opt.param_groups[0]["momentum"]) == (0.25, 1e-3, 0.5)
    twin = pickle.loads(pickle.dumps(cls))(perceptron().parameters())
    assert (twin.settings.s_decay, twin.settings.scope, twin.param_groups[0]["lr"]) == (0.25, "group", 1.0)
    assert inspect.signature(optim.wrap(Lame)).parameters["lr"].default == 1e-3


class Sub(optim.AdamW):
    """As users write it."""

    def __init__(self, params: Any, speed: float = 0.5) -> None:
        super().__init__(params, lr=speed, scope="group")


def test_a_class_can_be_subclassed() -> None:
    opt = Sub(perceptron().parameters())
    assert (opt.param_groups[0]["lr"], opt.settings.scope) == (0.5, "group")
    assert type(pickle.loads(pickle.dumps(opt))) is Sub


# -------------------------------------------------------------------- said once


def test_a_new_option_is_in_every_class_by_itself() -> None:
    """From `Options`, `Settings` and the wrapper's constructor: nothing else is asked."""
    assert {p.name for p in parameters()} == set(Options.__annotations__)
    mechanizes = inspect.signature(mechanize).parameters
    assert [*mechanizes.values()][1:] == list(parameters())
    assert mechanizes["scope"].default == "all"
    assert mechanizes["s_decay"].default is None
    wrappers = inspect.signature(Core.__init__).parameters
    assert {name: wrappers[name].default for name in ("group", "sync_replicas", "backend")} == {
        name: mechanizes[name].default for name in ("group", "sync_replicas", "backend")
    }
    documented = inspect.getdoc(mechanize) or ""
    assert [p.name for p in parameters() if f"\n    {p.name}: " not in documented] == []


KINDS = {kind.__name__: kind for kind in (Options, OptionsBesideBetas, OptionsBesideBoth, OptionsBesideEps)}


@pytest.mark.parametrize("name", [*BASES, "AdamW8bit"])
def test_the_stub_says_what_the_classes_take(name: str) -> None:
    if name == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
    if name == "Adam" and "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
        pytest.skip("the stub has what Adam takes since torch 2.7")
    tree = ast.parse(Path(optim.__file__).with_suffix(".pyi").read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (init,) = (node for node in cls.body if isinstance(node, ast.FunctionDef))
    positional = init.args.args[1:]
    unset = [inspect.Parameter.empty] * (len(positional) - len(init.args.defaults))
    defaults = [*unset, *map(ast.literal_eval, init.args.defaults), *map(ast.literal_eval, init.args.kw_defaults)]
    stubbed = [(a.arg, d) for a, d in zip([*positional, *init.args.kwonlyargs], defaults, strict=True)]
    assert init.args.kwarg is not None
    kind = KINDS[ast.unparse(init.args.kwarg.annotation).removeprefix("Unpack[").removesuffix("]")]
    shown = [(p.name, p.default) for p in inspect.signature(getattr(optim, name)).parameters.values()]
    assert shown[: len(stubbed)] == stubbed
    assert {each for each, _ in shown[len(stubbed) :]} == set(kind.__annotations__)


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
        ({"s_dekay": 0.1}, r"AdamW\(\) got an unexpected keyword argument 's_dekay': did you mean 's_decay'\?"),
        ({"momentum": 0.9}, r"AdamW\(\) got an unexpected keyword argument 'momentum'\."),
        ({"mechanic_s_decay": 0.9}, r"'mechanic_s_decay': did you mean 's_decay'\?"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_known_one(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        optim.AdamW(perceptron().parameters(), **wrong)


def test_an_unknown_option_of_mechanize_is_answered_with_the_known_one() -> None:
    for target in (torch.optim.SGD, torch.optim.SGD(perceptron().parameters())):
        with pytest.raises(TypeError, match=r"mechanize\(\) has no option 's_dekay': did you mean 's_decay'\? It has "):
            mechanize(target, s_dekay=0.1)  # type: ignore[call-overload]


def test_values_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="scope must be one of 'all', 'group', got 'groups'"):
        optim.AdamW(perceptron().parameters(), scope="groups")
    with pytest.raises(ValueError, match="backend must be one of"):
        optim.wrap(torch.optim.RAdam, backend="cuda")
    with pytest.raises(ValueError, match="betas must be a non-empty tuple"):
        optim.AdamW(perceptron().parameters(), mechanic_betas=0.9)


def test_something_else_in_the_parameters_place() -> None:
    with pytest.raises(TypeError, match=r"AdamW\(\) takes parameters, got the module Sequential: write model.param"):
        optim.AdamW(perceptron())
    with pytest.raises(TypeError, match=r"AdamW\(\) takes parameters, got the module Sequential: write model.param"):
        optim.AdamW(params=perceptron())
    with pytest.raises(TypeError, match=r"AdamW\(\) takes parameters, got the class SGD: write model.parameters"):
        optim.AdamW(torch.optim.SGD)
    built = torch.optim.AdamW(perceptron().parameters())
    with pytest.raises(
        TypeError, match=r"takes parameters, got AdamW: mechanize\(optimizer\) is for one that is built"
    ):
        optim.AdamW(built)
    with pytest.raises(TypeError, match=r"wrap\(\) takes a class, got an instance of AdamW: mechanize\(optimizer\)"):
        optim.wrap(built)
    with pytest.raises(TypeError, match=r"wrap\(\) takes a subclass of torch.optim.Optimizer, got 'AdamW'"):
        optim.wrap("AdamW")
    with pytest.raises(ValueError, match="AdamW is mechanized already"):
        optim.wrap(optim.AdamW)
    with pytest.raises(ValueError, match="AdamW is mechanized already"):
        mechanize(optim.AdamW(perceptron().parameters()))


def test_a_class_in_an_optimizers_place() -> None:
    for function in (demechanize, unwrap):
        with pytest.raises(TypeError, match=r"got the class AdamW .*: build it, as AdamW\(model.parameters\(\)\)"):
            function(optim.AdamW)


@pytest.mark.parametrize("cls", [optim.AdamW, mechanize(torch.optim.AdamW), optim.wrap(torch.optim.RAdam)])
def test_a_class_that_is_used_as_an_optimizer(cls: Any) -> None:
    """Schedulers, trainers and loggers read these of whatever they are given."""
    sentence = rf"got the class {cls.__name__} .*: build it, as {cls.__name__}\(model.parameters\(\)\)"
    for name in ("param_groups", "state", "defaults"):
        assert not hasattr(torch.optim.AdamW, name)
        with pytest.raises(AttributeError, match=sentence):
            getattr(cls, name)
    with pytest.raises(AttributeError, match=sentence):
        torch.optim.lr_scheduler.LambdaLR(cls, lambda step: 1.0)
    with pytest.raises(TypeError, match="OptimizerClass is not an Optimizer"):
        torch.optim.lr_scheduler.ConstantLR(cls)
    assert {"param_groups", "step"} <= dict(inspect.getmembers(cls)).keys()  # what documentation tools do
