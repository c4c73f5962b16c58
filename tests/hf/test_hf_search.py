from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from hf_script import Sequences, build_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import mechanic_plugins.transformers  # noqa: F401

SPACE: dict[str, list[Any]] = {"weight_decay": [0.0, 1.0], "optim_args": ["max_scale=500"]}


class Histories(TrainerCallback):
    """Records the scales of each training."""

    def __init__(self) -> None:
        self.scales: list[list[float]] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scales.append([entry["mechanic/scale"] for entry in state.log_history if "loss" in entry])


def trainer_for(folder: Path, histories: Histories, **options: Any) -> Trainer:
    args = TrainingArguments(
        str(folder),
        optim="mechanic_adamw",
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return Trainer(
        model_init=lambda: build_model(),
        args=args,
        train_dataset=Sequences(),
        eval_dataset=Sequences(8),
        callbacks=[histories],
    )


def test_a_search_over_other_things_than_the_learning_rate(tmp_path: Path) -> None:
    """One Trainer runs all trials, and none may start from the previous one's scale, references or moments."""
    searched = Histories()
    trials: list[dict[str, Any]] = []

    def space(trial: optuna.Trial) -> dict[str, Any]:
        trials.append({name: trial.suggest_categorical(name, values) for name, values in SPACE.items()})
        return trials[-1]

    best = trainer_for(tmp_path, searched).hyperparameter_search(
        space, n_trials=2, backend="optuna", direction="minimize", sampler=optuna.samplers.GridSampler(SPACE, seed=0)
    )
    assert best.hyperparameters in trials
    alone = Histories()
    for trial in trials:
        trainer_for(tmp_path, alone, **trial).train()
    assert searched.scales == alone.scales
    assert len({tuple(scales) for scales in searched.scales}) == 2
