"""What the Trainer reports about the learning rate, and optimizers that it or peft builds from a mechanized class."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_script import Sequences, add_lora, build_model
from peft.optimizers import create_loraplus_optimizer
from transformers import Trainer, TrainingArguments

import mechanic_plugins.transformers  # noqa: F401
from mechanic_plugins import mechanize, unwrap
from mechanic_plugins.summary import STILL_RISING


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages of our logger, a child of transformers'."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.mechanic")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def trained(folder: Path, model: Any = None, *, steps: int = 20, **options: Any) -> Trainer:
    names = ("optimizers", "optimizer_cls_and_kwargs")
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **{
            "disable_tqdm": True,
            "optim": "mechanic_adamw",
            **{key: value for key, value in options.items() if key not in names},
        },
    )
    own = {key: value for key, value in options.items() if key in names}
    trainer = Trainer(model=model or build_model(), args=args, train_dataset=Sequences(), **own)
    trainer.train()
    return trainer


def test_the_end_of_a_run_says_the_learned_learning_rate(tmp_path: Path, said: list[str]) -> None:
    """It used to be in no message or metric, and nothing said that a run was too short."""
    trainer = trained(tmp_path, learning_rate=1e-3, lr_scheduler_type="constant", steps=10, optim_args="rule=paper")
    logs = trainer.state.log_history
    peak = unwrap(trainer.optimizer).learned_lr
    assert 0 < peak <= max(entry["mechanic/effective_lr"] for entry in logs if "loss" in entry)
    assert logs[-1]["mechanic/peak_lr"] == pytest.approx(peak)
    line, warning = said
    assert line == f'Mechanic learned a learning rate of {peak:.3g} (rule="paper").'
    assert logs[-1]["mechanic/rule"] == "paper"
    assert warning == STILL_RISING
    assert "train_runtime" in logs[-1]


@pytest.mark.filterwarnings("ignore:.*was not finite. the step was skipped")
def test_a_run_that_skipped_steps_is_told_so(tmp_path: Path, said: list[str]) -> None:
    model, calls = build_model(), []
    factors = iter([1.0] * 5 + [math.nan] + [1.0] * 14)
    next(model.parameters()).register_hook(lambda grad: (calls.append(0), grad * next(factors))[1])
    trained(tmp_path, model, steps=20)
    assert len(calls) == 20
    skipped = [line for line in said if "skipped" in line]
    assert skipped == [
        "Mechanic skipped 1 of 20 steps, whose gradients were not finite or far larger than all before them."
    ]


def test_the_learned_learning_rate_is_in_what_train_returns(tmp_path: Path) -> None:
    """Scripts print and save these metrics."""
    trainer = trained(tmp_path, steps=3)
    output = trainer.train()
    assert output.metrics["mechanic/peak_lr"] > 0


def test_the_last_words_have_a_line_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They used to continue tqdm's line."""
    handler = logging.StreamHandler()  # writes to the captured stderr
    logging.getLogger("transformers.mechanic").addHandler(handler)
    trained(tmp_path, steps=3, disable_tqdm=False)
    logging.getLogger("transformers.mechanic").removeHandler(handler)
    assert "\nMechanic learned a learning rate of" in capsys.readouterr().err


def test_a_plain_run_says_nothing(tmp_path: Path, said: list[str]) -> None:
    trainer = trained(tmp_path, steps=3, optim="adamw_torch")
    assert not said
    assert "mechanic/peak_lr" not in trainer.state.log_history[-1]


def test_a_mechanized_class_is_taken_by_the_trainer(tmp_path: Path) -> None:
    """It used to fail with `Mechanized.__call__() missing 1 required positional argument: 'params'`."""
    cls = mechanize(torch.optim.AdamW, scope="group")
    trainer = trained(tmp_path, optim="adamw_torch", optimizer_cls_and_kwargs=(cls, {"lr": 1e-3}))
    optimizer = unwrap(trainer.optimizer)
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["initial_lr"] == 1e-3
    assert trainer.state.log_history[-2]["mechanic/scale"] == optimizer.scale.item() > 0


def test_lora_plus_takes_a_mechanized_class_and_every_groups_lr_is_logged(tmp_path: Path) -> None:
    """One group's learning_rate used to be logged beside another's effective_lr."""
    model = add_lora(build_model())
    optimizer = create_loraplus_optimizer(
        model, optimizer_cls=mechanize(torch.optim.AdamW), lr=5e-5, loraplus_lr_ratio=16
    )
    trainer = trained(tmp_path, model, optim="adamw_torch", steps=6, optimizers=(optimizer, None))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1]["mechanic/scale"] > 0
    for entry in logs:
        first = entry["mechanic/effective_lr/pg1"]
        assert first == pytest.approx(entry["mechanic/scale"] * entry["learning_rate"])
        assert entry["mechanic/effective_lr"] == entry["mechanic/effective_lr/pg3"] == pytest.approx(16 * first)
        assert "mechanic/scale/pg1" not in entry
    assert not any(math.isnan(entry["loss"]) for entry in logs)


def test_the_trainers_two_groups_are_one_number(tmp_path: Path) -> None:
    logs = trained(tmp_path, steps=3, weight_decay=0.1).state.log_history
    assert not any(key.startswith(("mechanic/effective_lr/", "mechanic/scale/")) for entry in logs for key in entry)
