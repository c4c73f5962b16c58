"""A language model of a few hundred weights, its tokenizer and data, all made here since the tests are offline."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mechanic_plugins import MechanicOptimizer, unwrap

WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "is", "not"]


def installed(module: str) -> Any:
    """Imports a module, or skips the test if its package is missing. An installed one that fails to import raises."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(module)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def language_model(positions: int = 32) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        n_positions=positions,
        vocab_size=16,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def sentence(i: int) -> str:
    return " ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 9))


def saved(folder: Path, positions: int = 32) -> Path:
    """Saves model and tokenizer for a program to load by name."""
    language_model(positions).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def training_arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "optim": "mechanic_adamw",
        **more,
    }


def assert_trained(trainer: Any) -> MechanicOptimizer:
    """Checks that the Trainer's optimizer is ours, has found a scale and is in the logs."""
    mechanic = unwrap(trainer.optimizer)
    assert mechanic.scale > 0
    logged = [entry["mechanic/scale"] for entry in trainer.state.log_history if "mechanic/scale" in entry]
    assert len(logged) == 12
    assert logged[-1] == mechanic.scale.item()
    return mechanic


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
