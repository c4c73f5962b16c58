"""Programs on Hugging Face's Trainer: TRL, peft's LoRA+ and sentence-transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from mechanic_plugins import demechanize, optim

pytest.importorskip("transformers")
import mechanic_plugins.transformers  # noqa: F401  the line of the page


def dataset(rows: list[dict[str, Any]]) -> Any:
    return tiny.installed("datasets").Dataset.from_list(rows)


# -------------------------------------------------------------------- TRL


@pytest.mark.parametrize("lora", [False, True])
def test_trl_sft(tmp_path: Path, lora: bool) -> None:
    trl = tiny.installed("trl")
    rows = dataset([{"text": tiny.sentence(i)} for i in range(64)])
    found = []
    for lr in (5e-5, 3e-2):
        adapter = tiny.installed("peft").LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        arguments = trl.SFTConfig(**tiny.training_arguments(tmp_path), learning_rate=lr, max_length=16)
        trainer = trl.SFTTrainer(
            tiny.language_model(),
            args=arguments,
            train_dataset=rows,
            processing_class=tiny.tokenizer(),
            peft_config=adapter if lora else None,
        )
        trainer.train()
        tiny.assert_trained(trainer)
        found.append(tiny.losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # the logs have few digits


def test_trl_dpo(tmp_path: Path) -> None:
    trl = tiny.installed("trl")
    rows = [{"prompt": "cat is ", "chosen": tiny.sentence(i), "rejected": tiny.sentence(i + 1)} for i in range(64)]
    arguments = trl.DPOConfig(**tiny.training_arguments(tmp_path), max_length=24)
    trainer = trl.DPOTrainer(
        tiny.language_model(),
        tiny.language_model(),
        args=arguments,
        train_dataset=dataset(rows),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    tiny.assert_trained(trainer)
    before, after = tiny.language_model().state_dict(), trainer.model.state_dict()
    assert not torch.equal(before["transformer.h.0.attn.c_attn.weight"], after["transformer.h.0.attn.c_attn.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trl sft", "-m trl.scripts.sft"])
def test_trl_on_the_command_line(tmp_path: Path, target: str) -> None:
    """The command starts the module through accelerate."""
    tiny.installed("trl")
    model = tiny.saved(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps({"text": tiny.sentence(i)}) for i in range(64)))
    options = {"model_name_or_path": model, "dataset_name": data, **tiny.training_arguments(tmp_path / "out")}
    options["dtype"] = "float32"
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "mechanic_plugins.run", *target.split(), *arguments]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Mechanic learned a learning rate of" in done.stdout + done.stderr


# -------------------------------------------------------------------- peft


def lora_model() -> Any:
    peft = tiny.installed("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return peft.get_peft_model(tiny.language_model(), config)


def loraplus(model: Any, **options: Any) -> Any:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(
        model=model, optimizer_cls=optim.AdamW, lr=1.0, loraplus_lr_ratio=16, loraplus_weight_decay=0.01, **options
    )


def step(model: Any, optimizer: Any, number: int) -> float:
    tokens = torch.tensor([tiny.tokenizer()(tiny.sentence(number + i))["input_ids"] for i in range(4)])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("scope", ["all", "group"])
def test_loraplus(scope: str) -> None:
    """Its groups are A, embeddings, B, and B without decay; here the second and the last are empty."""
    model = lora_model()
    opt = loraplus(model, scope=scope)
    assert type(opt) is optim.AdamW
    assert [len(group["params"]) for group in opt.param_groups] == [2, 0, 2, 0]
    first = [step(model, opt, number) for number in range(60)]
    assert sum(first[-5:]) < sum(first[:5])
    assert [group["lr"] for group in opt.param_groups] == [1.0, 1e-6, 16.0, 16.0]
    scales = opt.scales.tolist()
    if scope == "all":
        assert len(set(scales)) == 1
    else:
        assert scales[0] != scales[2]
        assert min(scales[0], scales[2]) > 0
        assert (scales[1], scales[3]) == (0.0, 0.0)  # nothing to learn from
    plain = demechanize(opt)
    assert all(group["lr"] > 0 for group in plain.param_groups)
    assert step(model, plain, 60) < first[0]


# -------------------------------------------------------------------- sentence-transformers


def test_sentence_transformers(tmp_path: Path) -> None:
    library = tiny.installed("sentence_transformers")
    from sentence_transformers import losses

    model = library.SentenceTransformer(str(tiny.saved(tmp_path / "model")), device="cpu")
    rows = dataset([{"anchor": tiny.sentence(i), "positive": tiny.sentence(i + 10)} for i in range(64)])
    arguments = library.SentenceTransformerTrainingArguments(**tiny.training_arguments(tmp_path / "out"))
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = library.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss)
    trainer.train()
    tiny.assert_trained(trainer)
