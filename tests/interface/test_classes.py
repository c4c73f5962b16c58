"""Every base has its own mechanized class."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import perceptron, train

import mechanic_plugins
from mechanic_plugins import MechanicOptimizer, Mechanized, mechanize
from mechanic_plugins.lion import Lion

BASES = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, Lion]


@pytest.mark.parametrize("base", BASES)
def test_an_instance_and_a_class_have_the_bases_name_in_theirs(base: Any) -> None:
    params = list(perceptron().parameters())
    built = mechanize(base)
    for opt in (mechanize(base(params, lr=0.1)), built(params, lr=0.1)):
        assert type(opt).__name__ == type(opt).__qualname__ == f"Mechanic{base.__name__}"
        assert isinstance(opt, MechanicOptimizer)
        assert type(opt.base) is base
    assert built.__name__ == f"Mechanic{base.__name__}"
    assert issubclass(built, Mechanized)
    assert issubclass(built, torch.optim.Optimizer)


def test_optimizers_with_one_base_have_one_class_and_others_another() -> None:
    one, two = (mechanize(torch.optim.SGD(perceptron().parameters()), max_scale=d) for d in (1.0, 0.1))
    other = mechanize(torch.optim.Adam(perceptron().parameters()))
    assert type(one) is type(two)
    assert type(one) is not type(other)


@pytest.mark.parametrize("base", BASES)
def test_a_class_shows_the_bases_own_constructor(base: Any) -> None:
    """Callers that pass only the arguments in a signature used to lose lr, betas and weight decay.

    Mechanic's options come after them.
    """
    own, ours = (inspect.signature(each).parameters for each in (base, mechanize(base)))
    assert [(p.name, p.kind, p.default) for p in own.values()] == [
        (p.name, p.kind, p.default) for p in list(ours.values())[: len(own)]
    ]
    assert {"params", "lr"} <= set(own)


def test_a_class_trains_as_an_instance_does() -> None:
    models = perceptron(), perceptron()
    train(models[0], mechanize(torch.optim.AdamW(models[0].parameters(), 0.3, (0.8, 0.9)), max_scale=0.1), 10)
    train(models[1], mechanize(torch.optim.AdamW, max_scale=0.1)(models[1].parameters(), 0.3, (0.8, 0.9)), 10)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_bad_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="MechanicSGD\\(\\) has no argument 'momentun': did you mean 'momentum'"):
        mechanize(torch.optim.SGD)(perceptron().parameters(), momentun=0.9)


def saved_and_loaded(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(("build", "copied"), [("instance", saved_and_loaded), ("class", copy.deepcopy)])
def test_copies_keep_their_class_and_train_on_alike(build: str, copied: Any) -> None:
    model = perceptron()
    params = model.parameters()
    opt = mechanize(torch.optim.AdamW(params)) if build == "instance" else mechanize(torch.optim.AdamW)(params)
    train(model, opt, 5)
    twin_model, twin = copied((model, opt))
    assert type(twin).__name__ == "MechanicAdamW"
    assert isinstance(twin, Mechanized) == (build == "class")
    train(model, opt, 5, first=5)
    train(twin_model, twin, 5, first=5)
    assert twin.scale.item() == opt.scale.item() > 0
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))


def test_a_class_can_be_pickled_and_keeps_its_settings() -> None:
    """Programs that start processes send the class to them."""
    built = mechanize(torch.optim.AdamW, max_scale=0.25, backend="foreach")
    twin = pickle.loads(pickle.dumps(built))
    opt = twin(perceptron().parameters(), lr=0.5)
    assert (opt.settings.max_scale, opt.backend) == (0.25, "foreach")
    assert copy.deepcopy(built) is built


@pytest.mark.slow
def test_a_pickle_is_read_in_a_process_that_has_made_no_such_class(tmp_path: Path) -> None:
    model = perceptron()
    opt = mechanize(torch.optim.AdamW(model.parameters()))
    train(model, opt, 5)
    (tmp_path / "opt.pkl").write_bytes(pickle.dumps(opt))
    program = "import pickle, sys; o = pickle.load(open(sys.argv[1], 'rb')); print(type(o).__name__, o.scale.item())"
    command = [sys.executable, "-c", program, str(tmp_path / "opt.pkl")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["MechanicAdamW", str(opt.scale.item())]


def test_a_state_dict_does_not_depend_on_the_class() -> None:
    class Mine(torch.optim.AdamW):
        linear_in_lr = True

    model, twin_model = perceptron(), perceptron()
    opt, twin = mechanize(torch.optim.AdamW(model.parameters())), mechanize(Mine)(twin_model.parameters())
    train(model, opt, 5)
    assert "AdamW" not in str(opt.state_dict()["param_groups"])
    twin.load_state_dict(opt.state_dict())
    assert type(twin).__name__ == "MechanicMine"
    assert twin.scale.item() == opt.scale.item() > 0


class Own(mechanize(torch.optim.SGD, max_scale=0.5)):  # type: ignore[misc]
    """A subclass at module level, as users write it."""

    def __init__(self, params: Any, speed: float) -> None:
        super().__init__(params, lr=speed)


def test_a_mechanized_class_can_be_subclassed() -> None:
    opt = Own(perceptron().parameters(), speed=0.5)
    assert (opt.param_groups[0]["lr"], opt.settings.max_scale) == (0.5, 0.5)
    assert list(inspect.signature(Own).parameters) == ["params", "speed"]
    assert pickle.loads(pickle.dumps(Own)) is Own
    assert type(pickle.loads(pickle.dumps(opt))) is Own
    assert type(copy.deepcopy(opt)) is Own


def test_a_class_is_mechanized_once() -> None:
    with pytest.raises(ValueError, match="MechanicSGD is mechanized already: mechanize\\(\\) it once"):
        mechanize(mechanize(torch.optim.SGD))


def test_another_class_of_the_same_name_may_be_mechanized() -> None:
    """Only the bare name used to be compared."""

    class MechanicOptimizer(torch.optim.SGD):
        pass

    assert isinstance(mechanize(MechanicOptimizer(perceptron().parameters())), mechanic_plugins.MechanicOptimizer)


def test_classes_made_for_bases_that_are_gone_go_with_them() -> None:
    def used() -> weakref.ref[type]:
        base = type("Passing", (torch.optim.SGD,), {})
        mechanize(base)(perceptron().parameters())
        return weakref.ref(base)

    gone = used()
    gc.collect()  # frees the class, after which the registry frees the base
    gc.collect()
    assert gone() is None
