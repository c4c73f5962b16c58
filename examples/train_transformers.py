"""Fine-tune a language model with transformers' Trainer and `optim="mechanic_adamw"`: no learning rate to choose.

    python examples/train_transformers.py --model path/to/a/pretrained/model --text book.txt
    python examples/train_transformers.py        # a small GPT-2 from scratch, on the documentation of Python's modules
    torchrun --nproc-per-node 2 examples/train_transformers.py

Needs `pip install '.[transformers]'`. Any of TrainingArguments' options can be added, such as
`--max_steps 500 --output_dir out --bf16`.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import mechanic_plugins.transformers  # noqa: F401  the one line: --optim now knows mechanic_adamw and the others


@dataclass
class Arguments:
    """This script's arguments, besides those of transformers."""

    model: str = field(default="", metadata={"help": "A folder with a pretrained model and its tokenizer."})
    text: str = field(default="", metadata={"help": "A text file; else the documentation of python's own modules."})
    length: int = field(default=64, metadata={"help": "Tokens in a training example."})


class Chunks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A long text, cut into pieces of equal length."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.pieces = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def read_text(path: str) -> str:
    if path:
        return Path(path).read_text(encoding="utf-8")
    documented = [name for name in sys.stdlib_module_names if name in sys.modules]
    return "\n".join(filter(None, (inspect.getdoc(sys.modules[name]) for name in sorted(documented))))


def pretrained(path: str, text: str) -> tuple[PreTrainedModel, Tensor]:
    tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(path), tokens


def from_scratch(text: str, length: int) -> tuple[PreTrainedModel, Tensor]:
    """A small untrained GPT-2. Its tokens are bytes, so it needs no tokenizer."""
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=length, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), torch.tensor(list(text.encode("utf-8")))


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(optim="mechanic_adamw", output_dir="trained", max_steps=300, logging_steps=20, report_to="none")
    ours, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    text = read_text(ours.text)
    model, tokens = pretrained(ours.model, text) if ours.model else from_scratch(text, ours.length)
    held_out = len(tokens) // 10
    train, test = Chunks(tokens[:-held_out], ours.length), Chunks(tokens[-held_out:], ours.length)
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test)
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    learned = result.metrics["mechanic/peak_lr"]
    print(f"loss on held-out text: {before:.3f} -> {after:.3f}; learned learning rate {learned:.2g}")


if __name__ == "__main__":
    main()
