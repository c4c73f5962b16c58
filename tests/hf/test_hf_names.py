from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import build_model, run
from hf_tiny import assert_same, by_step, command_line, plain_loop
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.training_args import OptimizerNames

from mechanic_plugins.hf.optim_names import BASES
from mechanic_plugins.transformers import MechanicCallback, install, register

NAMES = ["adamw", "adamw_8bit", "sgd", "adagrad", "rmsprop", "adafactor", "lion", "muon"]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)


def test_a_wrong_name_lists_the_right_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="mechanic_adamm") as caught:
        arguments(tmp_path, optim="mechanic_adamm")
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args(["--optim", "mechanic_adamm"])
    printed = capsys.readouterr().err
    for name in NAMES:
        assert f"'mechanic_{name}'" in str(caught.value)
        assert f"mechanic_{name}" in printed


def test_the_enum_has_real_members(tmp_path: Path) -> None:
    member = OptimizerNames("mechanic_adamw")
    assert member is OptimizerNames.MECHANIC_ADAMW  # type: ignore[attr-defined]
    assert member in list(OptimizerNames)
    assert "mechanic_adamw" in [m.value for m in OptimizerNames]
    args = arguments(tmp_path, optim="mechanic_adamw")
    assert args.to_dict()["optim"] == "mechanic_adamw"
    assert arguments(tmp_path).set_optimizer("mechanic_sgd", args="scope=all").optim == "mechanic_sgd"


def test_registering_twice_is_harmless() -> None:
    before = (list(OptimizerNames), CallbackHandler.__init__, Trainer.get_optimizer_cls_and_kwargs)
    install()
    assert before == (list(OptimizerNames), CallbackHandler.__init__, Trainer.get_optimizer_cls_and_kwargs)


def callbacks(folder: Path, *more: Any) -> list[type]:
    trainer = Trainer(build_model(), arguments(folder), callbacks=[*more])
    return [type(each) for each in trainer.callback_handler.callbacks]


def test_the_callback_comes_before_those_that_read_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if a program replaces the default callbacks, as ms-swift does."""

    class Flow(DefaultFlowCallback):
        pass

    assert callbacks(tmp_path)[:2] == [DefaultFlowCallback, MechanicCallback]
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [Flow])
    assert callbacks(tmp_path)[:2] == [Flow, MechanicCallback]
    for given in (MechanicCallback, MechanicCallback()):
        assert callbacks(tmp_path, given).count(MechanicCallback) == 1


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"])
def test_transformers_own_optimizers_are_as_before(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path, optim=name)
    now = Trainer.get_optimizer_cls_and_kwargs(args)
    assert now == Trainer.get_optimizer_cls_and_kwargs.__wrapped__(args)  # type: ignore[attr-defined]
    assert issubclass(now[0], torch.optim.Optimizer)


def test_a_plain_run_has_no_mechanic_in_it(tmp_path: Path) -> None:
    result = run(command_line(tmp_path, optim="adamw_torch", max_steps=2))
    assert result["optimizers"] == ["AcceleratedOptimizer", "AdamW"]
    assert not any(key.startswith("mechanic") for entry in result["logs"] for key in entry)


class Momentum(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening)


def test_an_instance_in_a_classs_place() -> None:
    built = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(TypeError, match=r"mechanic_built needs a subclass of torch.optim.Optimizer"):
        register("mechanic_built", built)  # type: ignore[arg-type]


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    register("mechanic_momentum", Momentum)
    register("mechanic_momentum", Momentum)
    argv = command_line(tmp_path, optim="mechanic_momentum", optim_args="momentum=0.5,max_scale=0.1")
    result = run(argv)
    expected = plain_loop(by_step([result]), lambda groups, lr: Momentum(groups, lr, momentum=0.5), max_scale=0.1)
    assert_same(result, expected)


def test_one_of_transformers_own_under_another_name(tmp_path: Path) -> None:
    register("mechanic_adamw_torch", "adamw_torch")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="mechanic_adamw_torch"))
    optimizer = cls(build_model().parameters(), **kwargs)
    assert type(optimizer.base) is torch.optim.AdamW
    assert not optimizer.base.defaults["fused"]


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("myopt", Momentum, "must start with 'mechanic_', got 'myopt'"),
        ("mechanic_adamw", Momentum, "'mechanic_adamw' is already registered for 'adamw_torch_fused'"),
        ("mechanic_x", "no_such", "no_such is not a valid OptimizerNames"),
        ("mechanic_x", "lomo", "steps inside the backward pass"),
        ("mechanic_x", "galore_adamw_layerwise", "steps inside the backward pass"),
        ("mechanic_x", "schedule_free_adamw", "between train"),
        ("mechanic_x", "mechanic_sgd", "already mechanized"),
    ],
)
def test_names_that_cannot_be(name: str, base: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(name, base)
    assert "mechanic_x" not in BASES


def test_bitsandbytes_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="mechanic_adamw_8bit needs bitsandbytes: pip install bitsandbytes"):
        Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="mechanic_adamw_8bit"))


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_missing_extra_names_its_pip_command(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\nimport mechanic_plugins.{missing}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'mechanic-plugins[{missing}]'" in done.stderr.splitlines()[-1]
