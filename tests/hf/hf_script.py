"""A typical training script with HfArgumentParser and Trainer, and nothing about Mechanic.

The tests start it by every launcher, or call `run` in their own process if that is enough.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean

    lean.hide("bitsandbytes", "datasets", "deepspeed", "matplotlib", "pandas", "peft", "scipy", "sklearn", "wandb")

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ScriptArguments:
    dtype: str = field(default="float64", metadata={"help": "float64 leaves no room for rounding in comparisons."})
    tie: bool = field(default=False)
    lora: bool = field(default=False)
    width: int = field(default=16)
    result: str = field(default="", metadata={"help": "Write what came out as <result>.<rank>.json."})


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Counting by ones, twos or threes modulo 32, learnable in a few dozen steps."""

    def __init__(self, size: int = 64, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, 32, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % 32

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build_model(*, dtype: str = "float64", tie: bool = False, width: int = 16, seed: int = 42) -> GPT2LMHeadModel:
    set_seed(seed)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=width,
        vocab_size=32,
        n_positions=12,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tie,
    )
    return GPT2LMHeadModel(config).to(getattr(torch, dtype))


def add_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=True)
    )


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Trains, and returns the logs, the final weights and the batches this rank saw, as plain values."""
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses(list(argv))
    model = build_model(dtype=script.dtype, tie=script.tie, width=script.width, seed=args.seed)
    if script.lora:
        model = add_lora(model)
    seen: list[list[list[int]]] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True)
    trainer = Trainer(model=model, args=args, train_dataset=Sequences())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    return {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: weight.double().tolist() for name, weight in weights.items()},
        "batches": seen,
        "optimizers": _chain(trainer.optimizer),
        "distributed": trainer.accelerator.distributed_type.value,
    }


def _chain(optimizer: Any) -> list[str]:
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)
    return names


def main() -> None:
    result = run(sys.argv[1:])
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script.result:
        Path(f"{script.result}.{args.process_index}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():  # otherwise a rank that exits may abort while gloo's threads run
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
