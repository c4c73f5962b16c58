"""The learned lr is where people look: the console, W&B's dict. test_hf_trainer has TensorBoard and the state file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hf_script import Sequences, build_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import rewrite_logs

import mechanic_plugins.transformers  # noqa: F401

LR = "mechanic/effective_lr"


class LikeWandb(TrainerCallback):  # type: ignore[misc]
    """Takes the logs as W&B's callback does: comet, mlflow and clearml do the same."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(rewrite_logs(logs))


@pytest.mark.parametrize("has_bar", [True, False])
def test_the_console_and_the_dicts_of_others_have_it(
    tmp_path: Path, has_bar: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = LikeWandb()
    args = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=not has_bar,
        optim="mechanic_adamw",
    )
    trainer = Trainer(model=build_model(), args=args, train_dataset=Sequences(), callbacks=[logger])
    trainer.train()
    lrs = [entry[LR] for entry in trainer.state.log_history if "loss" in entry]
    assert [entry[f"train/{LR}"] for entry in logger.seen[:4]] == lrs
    assert logger.seen[-1]["train/mechanic/peak_lr"] == max(lrs)
    printed = capsys.readouterr()
    lines = [line[line.index("{") :].strip() for line in printed.out.splitlines() if "'loss'" in line]
    shown = [float(ast.literal_eval(line)[LR]) for line in lines]
    assert shown == pytest.approx(lrs, rel=1e-2)
    assert lrs[-1] > 0
