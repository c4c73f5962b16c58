"""The learned lr is where users look: the console and W&B. test_hf_trainer covers TensorBoard and the state file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb_log
from hf_script import Sequences, build_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import rewrite_logs

from mechanic_plugins import optim, unwrap
from mechanic_plugins.transformers import demechanize_checkpoint

LR = "mechanic/effective_lr"


class LikeWandb(TrainerCallback):  # type: ignore[misc]
    """Takes the logs as W&B's callback does, and those of comet, mlflow and clearml."""

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
    assert logger.seen[-1]["train/mechanic/peak_lr"] == unwrap(trainer.optimizer).learned_lr
    printed = capsys.readouterr()
    lines = [line[line.index("{") :].strip() for line in printed.out.splitlines() if "'loss'" in line]
    shown = [float(ast.literal_eval(line)[LR]) for line in lines]
    assert shown == pytest.approx(lrs, rel=1e-2)
    assert lrs[-1] > 0


@pytest.mark.filterwarnings("default")  # for W&B's own
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    fixed = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), max_steps=4, report_to=["wandb"], optim="mechanic_adamw", **fixed)
    Trainer(model=build_model(), args=args, train_dataset=Sequences()).train()
    wandb.finish()
    names = [f"train/mechanic/{n}" for n in ("peak_lr", "effective_lr", "scale")]
    peak, lr, scale, rule = wandb_log.count(tmp_path, [*names, "mechanic/rule"])
    assert peak >= 1  # once in the history; also in the summary
    assert lr >= 4
    assert scale >= 4
    assert rule == 1  # in the config, which has no prefix


def test_each_network_has_a_scale_under_its_name_and_leaves_with_it(tmp_path: Path) -> None:
    """Nothing is learned for the frozen head, but the plain run must not start it at an lr of 0."""
    model = build_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    body = [p for p in model.parameters() if p is not model.lm_head.weight]
    groups = [{"params": [model.lm_head.weight], "name": "head"}, {"params": body, "name": "body"}]
    optimizer = optim.AdamW([*groups, {"params": [], "name": "adapter"}], lr=0.5, scope="group")
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_steps": 20}
    args = TrainingArguments(str(tmp_path), max_steps=20, lr_scheduler_type="constant", **fixed)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(), optimizers=(optimizer, None))
    trainer.train()
    entry = trainer.state.log_history[-2]
    assert entry["mechanic/scale/body"] == optimizer.scales[1].item() > 0
    assert entry["mechanic/scale/head"] == entry["mechanic/scale/adapter"] == 0
    demechanize_checkpoint(tmp_path / "checkpoint-20", tmp_path / "plain")
    plain = torch.load(tmp_path / "plain" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["lr"] for group in plain] == [pytest.approx(entry[f"{LR}/body"])] * 3
