"""`--replace` inside one process: the class that a program gets, and what it can do with it."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mechanic_plugins import MechanicOptimizer, Settings, demechanize, mechanize
from mechanic_plugins.runner.plan import Events, Plan, Replacement
from mechanic_plugins.runner.replace import wait_for


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of optimizers, new for each test, because replacements are permanent."""
    library: Any = ModuleType(f"library_{request.node.name.split('[')[0]}")
    monkeypatch.setitem(sys.modules, library.__name__, library)

    class Fancy(torch.optim.AdamW):
        def __init__(
            self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), charm: int = 1
        ) -> None:
            super().__init__(params, lr=lr, betas=betas)
            self.charm = charm

        def recharge(self, charm: int) -> int:
            self.charm = charm
            return self.charm

        @property
        def twice(self) -> int:
            return 2 * self.charm

    class Sibling(Fancy):
        """A subclass of another optimizer, as torch's AdamW is of Adam."""

    class Prodigy(torch.optim.Optimizer):
        """Has prodigyopt's name and signature, as the runner goes by the name."""

        def __init__(
            self,
            params: Any,
            lr: float = 1.0,
            betas: tuple[float, float] = (0.9, 0.999),
            beta3: float | None = None,
            weight_decay: float = 0,
            decouple: bool = True,
            d_coef: float = 1.0,
        ) -> None:
            raise AssertionError("the original must not be built")

    for cls in (Fancy, Sibling, Prodigy):
        cls.__module__, cls.__qualname__ = library.__name__, cls.__name__
        setattr(library, cls.__name__, cls)
    return library


@pytest.fixture(autouse=True)
def _events_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def replace(library: Any, name: str, new: str = "", **plan: Any) -> Events:
    events = Events.new()
    wait_for(Replacement(f"{library.__name__}.{name}", new), Plan(events=events.path, **plan), events)
    return events


def param() -> torch.Tensor:
    return torch.tensor([3.0, -2.0, 1.0], requires_grad=True)


def trained(optimizer: torch.optim.Optimizer, p: torch.Tensor, steps: int = 20) -> torch.Tensor:
    for _ in range(steps):
        p.grad = 2 * p.detach()
        optimizer.step()
    return p.detach()


def test_the_program_gets_mechanic_and_sees_its_own_class(library: Any, capsys: pytest.CaptureFixture[str]) -> None:
    signature = inspect.signature(library.Fancy)
    events = replace(library, "Fancy")
    opt = library.Fancy([param()], 0.5, charm=7)
    assert isinstance(opt, MechanicOptimizer)
    assert isinstance(opt, library.Fancy)
    assert isinstance(opt, torch.optim.AdamW)
    assert issubclass(type(opt), library.Fancy)
    assert (type(opt).__name__, type(opt).__module__) == ("Fancy", library.__name__)
    assert opt.param_groups[0]["lr"] == 0.5
    assert inspect.signature(library.Fancy) == signature
    assert events.of("replaced") == {f"{library.__name__}.Fancy"}
    assert f"{library.__name__}.Fancy built at {__file__}:" in capsys.readouterr().err
    library.Fancy([param()])
    assert capsys.readouterr().err == ""  # once per class and file


def test_it_trains_as_mechanize_does(library: Any) -> None:
    p, q = param(), param()
    expected = trained(mechanize(library.Fancy([p]), scope="group"), p)
    replace(library, "Fancy", options="scope=group")
    opt = library.Fancy([q])
    assert torch.equal(trained(opt, q), expected)
    assert opt.settings.scope == "group"
    assert opt.scale > 0


@pytest.mark.parametrize(("name", "new"), [("Fancy", ""), ("Prodigy", "torch.optim.AdamW")])
def test_another_one_by_the_class_of_the_first_is_mechanized_too(library: Any, name: str, new: str) -> None:
    """PyKEEN builds a new optimizer for each training, and used to get no second one."""
    replace(library, name, new, options="max_scale=3")
    first, p = getattr(library, name)([param()], lr=0.2), param()
    group = {key: value for key, value in first.param_groups[0].items() if key in ("lr", "betas")}
    group |= {key: value for key, value in first.param_groups[0].items() if key.startswith("mechanic_")}
    second = type(first)(**group | {"params": [p], "lr": 0.5})
    assert type(second) is type(first)
    assert (second.param_groups[0]["lr"], second.settings.max_scale) == (0.5, 3)
    for _ in range(3):
        second.zero_grad()
        p.square().sum().backward()
        second.step()
    assert second.learned_lr > 0


def test_its_own_methods_act_on_the_base(library: Any) -> None:
    replace(library, "Fancy")
    opt = library.Fancy([param()], charm=3)
    assert (opt.charm, opt.twice) == (3, 6)
    assert opt.recharge(5) == 5
    assert (opt.base.charm, opt.twice) == (5, 10)


def test_subclasses_of_the_program_count_and_the_librarys_own_do_not(library: Any) -> None:
    class Mine(library.Fancy):  # type: ignore[misc]
        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)
            self.mine = True

    replace(library, "Fancy")
    opt = Mine([param()], lr=0.2)
    assert isinstance(opt, MechanicOptimizer)
    assert isinstance(opt, Mine)
    assert opt.mine
    assert list(inspect.signature(Mine).parameters) == ["params", "kwargs"]
    assert not isinstance(library.Sibling([param()]), MechanicOptimizer)


def test_copies_pickles_and_checkpoints(library: Any) -> None:
    replace(library, "Fancy")
    p = param()
    opt = library.Fancy([p])
    trained(opt, p, steps=10)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert type(twin) is type(opt)
        q = twin.param_groups[0]["params"][0]
        q.data = p.detach().clone()
        assert torch.equal(twin.scale, opt.scale)
    fresh = library.Fancy([p])
    fresh.load_state_dict(opt.state_dict())
    assert torch.equal(fresh.scale, opt.scale)
    plain = demechanize(opt)
    assert type(plain) is library.Fancy
    assert not isinstance(plain, MechanicOptimizer)
    assert not isinstance(copy.deepcopy(plain), MechanicOptimizer)


def test_schedulers_and_the_grad_scaler_take_it(library: Any) -> None:
    replace(library, "Fancy")
    p = param()
    opt = library.Fancy([p])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(5):
        scaler.scale((p**2).sum()).backward()
        scaler.step(opt)
        scaler.update()
        scheduler.step()
        opt.zero_grad()
    assert opt.scale > 0
    assert p.grad is None


def test_what_is_mechanized_by_hand_is_left_alone(library: Any) -> None:
    replace(library, "Fancy")
    opt = mechanize(library.Fancy)([param()])
    assert type(opt).__name__ == "MechanicFancy"
    assert type(opt.base) is library.Fancy


def test_prodigy_becomes_adamw(library: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps Prodigy's defaults, not AdamW's, whose weight decay differs."""
    replace(library, "Prodigy")
    p, q = param(), param()
    opt = library.Prodigy([p], betas=(0.9, 0.99), d_coef=2.0, decouple=True)
    assert isinstance(opt, library.Prodigy)
    assert type(opt.base) is torch.optim.AdamW
    assert opt.defaults["weight_decay"] == 0
    assert opt.defaults["lr"] == 1.0
    err = capsys.readouterr().err
    assert "is mechanized, around torch.optim.adamw.AdamW." in err
    assert "warning: d_coef=2.0 has no meaning for AdamW with Mechanic and was dropped." in err
    base = torch.optim.AdamW([q], lr=1.0, betas=(0.9, 0.99), weight_decay=0)
    assert torch.equal(trained(opt, p), trained(mechanize(base), q))
    assert type(pickle.loads(pickle.dumps(opt))) is type(opt)
    with pytest.raises(TypeError, match="charm"):
        library.Prodigy([param()], charm=1)


def test_prodigy_plus_groups_have_the_entries_that_simpletuner_moves(library: Any) -> None:
    """It used to fail with KeyError 'running_d_numerator'."""
    library.Prodigy.__module__ = "prodigyplus.prodigy_plus_schedulefree"
    replace(library, "Prodigy")
    opt = library.Prodigy([{"params": [param()]}, {"params": []}])
    for group in opt.param_groups:
        assert group["running_d_numerator"].to("cpu") == group["running_d_denom"] == 0
    assert opt.d_coef == 1.0


def test_any_class_around_any_other(library: Any) -> None:
    replace(library, "Prodigy", "torch.optim.SGD")
    opt = library.Prodigy([param()], 0.3)
    assert type(opt.base) is torch.optim.SGD
    assert opt.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fancy", "has no fancy: did you mean 'Fancy'?"),
        ("Fency", "has no Fency: did you mean 'Fancy'?"),
        ("Module", "must be a subclass of torch.optim.Optimizer"),
        ("Mechanic", "name the plain class that the program builds"),
    ],
)
def test_names_that_are_refused(library: Any, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    library.Module, library.Mechanic = torch.nn.Module, MechanicOptimizer
    with pytest.raises(SystemExit) as stopped:
        replace(library, name)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_constants_of_a_published_rule_are_options(library: Any) -> None:
    replace(library, "Fancy", options="rule=paper,s_init=1e-3,s_decay=0.1,tuner_betas=0.9:0.99,tuner_eps=1e-6")
    settings = library.Fancy([param()]).settings
    assert settings == Settings(rule="paper", s_init=1e-3, s_decay=0.1, betas=(0.9, 0.99), eps=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("scop=group", "has no option 'scop': did you mean 'scope'?"),
        ("scope=groups", "scope must be one of 'all', 'group', got 'groups'"),
        ("max_scale=-1", "max_scale must be"),
        ("sync_replicas=2", "sync_replicas must be True or False, got 2"),
        ("normalize_lr=false", "normalize_lr can be set in Python alone"),
        ("s_decay=0.1", "s_decay belongs to the published rules, got 0.1 with the default one: choose one of them, as"),
        ("rule=paper,eps=1e-6", "The tuner's eps is the option tuner_eps; the base's is the base's own argument."),
        ("rule=paper,tuner_betas=2", "tuner_betas must be numbers in (0, 1], got 2"),
    ],
)
def test_options_that_are_refused(library: Any, options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    replace(library, "Fancy", options=options)
    with pytest.raises(SystemExit) as stopped:
        library.Fancy([param()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_mechanized_is_refused_with_the_option_that_helps(library: Any) -> None:
    class ScheduleFree(torch.optim.SGD):
        pass

    library.ScheduleFree = ScheduleFree
    replace(library, "ScheduleFree")
    with pytest.raises(ValueError, match=r"cannot be mechanized.*--replace .*\.ScheduleFree=torch\.optim\.AdamW"):
        ScheduleFree([param()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own, at its import
def test_an_optimizer_that_a_wrapper_cuts_up_is_refused(library: Any) -> None:
    """ZeroRedundancyOptimizer builds one on each rank, for different parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replace(library, "Fancy")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="each instance would learn its own scale"):
            ZeroRedundancyOptimizer([param()], library.Fancy)
    finally:
        torch.distributed.destroy_process_group()


def test_the_real_prodigy() -> None:
    prodigyopt = pytest.importorskip("prodigyopt")
    original = prodigyopt.Prodigy.__new__
    try:
        replace(prodigyopt, "Prodigy")
        opt = prodigyopt.Prodigy([param()], safeguard_warmup=True, use_bias_correction=True, weight_decay=0.01)
        assert isinstance(opt, MechanicOptimizer)
        assert opt.defaults["weight_decay"] == 0.01
        assert torch.isfinite(trained(opt, opt.param_groups[0]["params"][0])).all()
    finally:
        prodigyopt.Prodigy.__new__ = original


def test_events_are_seen_by_all_and_noted_once() -> None:
    one = Events.new()
    other = Events(one.path)
    assert one.note("built", "AdamW")
    assert not one.note("built", "AdamW")
    assert other.note("built", "SGD")
    assert one.of("built") == {"AdamW", "SGD"}
    assert one.of("mechanic") == set()
    one.remove()
    assert other.note("mechanic")  # as on another node, where the file does not exist
    assert other.of("mechanic") == set()
