from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import Sequences, build_model, run
from hf_tiny import HAS_MUON, STEPS, assert_same, by_step, command_line, plain_loop, skip_unless_json_is_read
from transformers import SchedulerType, Trainer, TrainingArguments
from transformers.optimization import Adafactor

import mechanic_plugins.transformers  # noqa: F401
from mechanic_plugins import mechanize
from mechanic_plugins.lion import Lion
from mechanic_plugins.muon import MuonWithAdamW


def test_a_trainer_run_is_a_plain_loop_with_mechanize(tmp_path: Path) -> None:
    result = run(command_line(tmp_path))
    assert result["optimizers"] == ["AcceleratedOptimizer", "MechanicAdamW", "AdamW"]
    assert len(result["batches"]) == STEPS
    assert_same(result, plain_loop(by_step([result])))


class LinearAdafactor(Adafactor):
    linear_in_lr = True


def adafactor(groups: Any, lr: float) -> torch.optim.Optimizer:
    return LinearAdafactor(groups, lr=lr, scale_parameter=False, relative_step=False)


def lion(groups: Any, lr: float) -> torch.optim.Optimizer:
    return Lion(groups, lr=lr, betas=(0.9, 0.999))


def muon(groups: Any, lr: float) -> torch.optim.Optimizer:
    tables = [p for group in groups for p in group["params"] if p.shape in ((32, 16), (12, 16))]
    assert len(tables) == 3  # tokens, positions and the output layer
    return MuonWithAdamW(groups, lr=lr, adamw_params=tables)


BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": adafactor,
    "lion": lion,
    **({"muon": muon} if HAS_MUON else {}),
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon multiplies in bf16, which not every CPU supports
@pytest.mark.parametrize("name", BASES)
def test_every_name_is_a_plain_loop_with_its_base(tmp_path: Path, name: str) -> None:
    result = run(command_line(tmp_path, optim=f"mechanic_{name}"))
    assert_same(result, plain_loop(by_step([result]), BASES[name]))


def test_accumulation_clipping_schedule_and_options_reach_mechanic(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine"}
    argv = command_line(tmp_path, optim_args="rule=optax,max_scale=0.5", learning_rate=1e-3, **options)
    result = run(argv)
    assert len(result["batches"]) == 2 * STEPS
    expected = plain_loop(
        by_step([result], accumulation=2),
        lr=1e-3,
        max_grad_norm=0.1,
        schedule="cosine",
        rule="optax",
        max_scale=0.5,
    )
    assert_same(result, expected)


def test_any_learning_rate_trains_alike(tmp_path: Path) -> None:
    runs = [run(command_line(tmp_path, learning_rate=lr)) for lr in (5e-5, 1e-3, 1.0)]
    for other in runs[1:]:
        for key in ("loss", "mechanic/effective_lr"):
            expected = [entry[key] for entry in runs[0]["logs"]]
            assert [entry[key] for entry in other["logs"]] == pytest.approx(expected, rel=1e-6)
    assert runs[0]["logs"][-1]["mechanic/effective_lr"] > 0


SCHEDULE_NEEDS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
    "warmup_stable_decay": {"lr_scheduler_kwargs": '{"num_decay_steps": 2}'},
}
WATCH_A_METRIC = ("reduce_lr_on_plateau", "greedy")


@pytest.mark.parametrize("name", [s.value for s in SchedulerType if s.value not in WATCH_A_METRIC])
def test_every_schedule_trains(tmp_path: Path, name: str) -> None:
    if name in SCHEDULE_NEEDS:
        skip_unless_json_is_read()
    result = run(command_line(tmp_path, max_steps=6, lr_scheduler_type=name, **SCHEDULE_NEEDS.get(name, {})))
    logs = result["logs"]
    assert logs[-1]["mechanic/scale"] > 0
    for entry in logs:
        assert entry["mechanic/effective_lr"] == pytest.approx(entry["mechanic/scale"] * entry["learning_rate"])


@pytest.mark.parametrize("name", [n for n in WATCH_A_METRIC if n in {s.value for s in SchedulerType}])
def test_schedules_that_watch_a_metric_train(tmp_path: Path, name: str) -> None:
    args = TrainingArguments(
        str(tmp_path),
        optim="mechanic_adamw",
        lr_scheduler_type=name,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=build_model(), args=args, train_dataset=Sequences(), eval_dataset=Sequences(8))
    with pytest.warns(UserWarning, match="greedy raises the learning rate") if name == "greedy" else nullcontext():
        trainer.train()
    assert [e for e in trainer.state.log_history if "loss" in e][-1]["mechanic/scale"] > 0


def test_resuming_is_exact_and_the_state_on_disk_has_the_scale(tmp_path: Path) -> None:
    argv = command_line(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
    whole = run(argv)
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert [e["mechanic/scale"] for e in history] == [e["mechanic/scale"] for e in whole["logs"][: STEPS // 2]]
    assert {"learning_rate", "mechanic/effective_lr"} <= history[-1].keys()
    resumed = run([*argv, "--resume_from_checkpoint", str(checkpoint)])
    assert len(resumed["batches"]) == STEPS // 2
    assert resumed["logs"] == whole["logs"]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # as above
def test_bf16_trains_as_autocast_does_in_a_plain_loop(tmp_path: Path) -> None:
    result = run(command_line(tmp_path, bf16=True, dtype="float32", optim="mechanic_sgd"))
    assert_same(result, plain_loop(by_step([result]), torch.optim.SGD, dtype="float32", bf16=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_weights_train(tmp_path: Path) -> None:
    logs = run(command_line(tmp_path, dtype="bfloat16", max_steps=60, warmup_steps=0))["logs"]
    assert logs[-1]["mechanic/scale"] > 1
    assert sum(e["loss"] for e in logs[-5:]) < sum(e["loss"] for e in logs[:5])


@pytest.fixture
def environment() -> Iterator[None]:
    """Restores the environment, through which TrainingArguments would enable compilation for all later tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_torch_compile_changes_nothing(tmp_path: Path, environment: None) -> None:
    argv = command_line(tmp_path, max_steps=8)
    plain, compiled = run(argv), run([*argv, "--torch_compile", "True", "--torch_compile_backend", "aot_eager"])
    assert [e["mechanic/scale"] for e in compiled["logs"]] == pytest.approx(
        [e["mechanic/scale"] for e in plain["logs"]], rel=1e-6
    )


def test_lora_tunes_its_own_weights_alone(tmp_path: Path) -> None:
    result = run(command_line(tmp_path, lora=True))
    expected = plain_loop(by_step([result]), lora=True)
    assert_same(result, expected)


def test_auto_find_batch_size_starts_again_with_mechanic(tmp_path: Path) -> None:
    class Greedy(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    args = TrainingArguments(
        str(tmp_path),
        optim="mechanic_adamw",
        auto_find_batch_size=True,
        per_device_train_batch_size=3,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Greedy(model=build_model(), args=args, train_dataset=Sequences())
    trainer.train()
    assert trainer._train_batch_size <= 2  # accelerate halves 3 or reduces it by a tenth
    scales = [e["mechanic/scale"] for e in trainer.state.log_history if "loss" in e]
    assert len(scales) == 6
    assert scales[-1] > 0


def test_tensorboard_gets_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    logs = run(command_line(tmp_path, max_steps=4, report_to="tensorboard"))["logs"]
    (events,) = (path for path in tmp_path.rglob("events.out.*"))
    reader = EventAccumulator(str(events))
    reader.Reload()
    for key in ("mechanic/scale", "mechanic/effective_lr"):
        written = [event.value for event in reader.Scalars(f"train/{key}")]
        assert written == pytest.approx([entry[key] for entry in logs], rel=1e-6)


def trainer_arguments(folder: Path, **options: Any) -> TrainingArguments:
    fixed = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    return TrainingArguments(str(folder), max_steps=3, **{**fixed, **options})


def test_an_optimizer_of_ones_own_is_logged_too(tmp_path: Path) -> None:
    model = build_model()
    optimizer = mechanize(torch.optim.AdamW(model.parameters()), scope="group")
    args = trainer_arguments(tmp_path)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(), optimizers=(optimizer, None))
    trainer.train()
    assert trainer.state.log_history[0]["mechanic/scale"] == 0
    assert trainer.state.log_history[-2]["mechanic/scale"] > 0


def test_a_replaced_optimizer_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    model = build_model()
    args = trainer_arguments(tmp_path, optim="mechanic_adamw")
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(), optimizers=(plain, None))
    with pytest.raises(RuntimeError, match="but the optimizer is AcceleratedOptimizer around AdamW without"):
        trainer.train()


def test_one_scale_for_each_group_is_logged_by_group(tmp_path: Path) -> None:
    logs = run(command_line(tmp_path, max_steps=4, optim_args="scope=group"))["logs"]
    assert logs[-1]["mechanic/scale/pg1"] != logs[-1]["mechanic/scale/pg2"]


def test_fp16_trains_with_a_grad_scaler(tmp_path: Path) -> None:
    """The scaler's first steps overflow and are skipped, and the tuner must not see them."""
    logs = run(command_line(tmp_path, fp16=True, dtype="float32", warmup_steps=0))["logs"]
    assert all(math.isfinite(entry["loss"]) for entry in logs)
    assert logs[-1]["mechanic/scale"] > 0
