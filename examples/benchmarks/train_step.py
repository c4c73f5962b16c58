"""The cost of Mechanic in a whole training step: tokens per second of a GPT-2, including forward and backward.

    python examples/benchmarks/train_step.py                     # GPT-2 124M, batch 16 x 1024, bf16 autocast
    python examples/benchmarks/train_step.py --rank 8            # the same with LoRA on every linear layer
    python examples/benchmarks/train_step.py --layers 2 --width 64 --batch 2 --length 64 --device cpu

The optimizers take turns, a few steps each on their own copy, so that all see the same load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mechanic_plugins import mechanize

VOCABULARY = 50257


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with its tied embedding: 148 tensors at 12 layers."""

    def __init__(self, *, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.norm(h) @ self.tokens.weight.T


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(frozen.in_features, rank, False), nn.Linear(rank, frozen.out_features, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def add_lora(model: GPT, rank: int) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer, rank))


class Synchronised(torch.optim.AdamW):
    """Waits for the device in each step, as Mechanic does without Triton."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][-1].grad.norm().item()
        return super().step(closure)


def optimizers(device: torch.device, *, foreach: bool) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    fused = device.type == "cuda"

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, fused=fused, foreach=None if fused else True)

    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": adamw,
        "mechanic": lambda params: mechanize(adamw(params)),
        "mechanic, paper": lambda params: mechanize(adamw(params), rule="paper"),
    }
    if fused:  # the next two step torch's fused AdamW
        found["mechanic, any base"] = lambda params: mechanize(adamw(params), backend="triton")
        found["mechanic, paper, any base"] = lambda params: mechanize(adamw(params), rule="paper", backend="triton")
    if fused and foreach:
        found["mechanic, foreach"] = lambda params: mechanize(adamw(params), backend="foreach")
        found["adamw, foreach"] = lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True)
        found["adamw, foreach, synchronised"] = lambda params: Synchronised(params, lr=1e-4, foreach=True)
    return found


class Trainer:
    def __init__(self, build: Callable[[Any], torch.optim.Optimizer], arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.model = GPT(width=arguments.width, layers=arguments.layers, length=arguments.length)
        if arguments.rank:
            add_lora(self.model, arguments.rank)
        self.model.to(self.device)
        self.optimizer = build([p for p in self.model.parameters() if p.requires_grad])
        shape = (arguments.batch, arguments.length + 1)
        self.data = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(self.data[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.data[:, 1:].flatten()).backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return (time.perf_counter() - start) / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, help="train LoRA of this rank")
    parser.add_argument("--foreach", action="store_true", help="also without Triton")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    builds = optimizers(torch.device(arguments.device), foreach=arguments.foreach)
    trainers = {name: Trainer(build, arguments) for name, build in builds.items()}
    for trainer in trainers.values():
        trainer.seconds(3)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(arguments.turns):
        for name, trainer in trainers.items():
            times[name].append(trainer.seconds(arguments.steps))
    tokens = arguments.batch * arguments.length
    for name, values in times.items():
        slower = statistics.median(a / b for a, b in zip(values, times["adamw"], strict=True)) - 1
        row = {"optimizer": name, "tokens/s": round(tokens / statistics.median(values)), "slower": round(slower, 4)}
        print(json.dumps(row) if arguments.json else "  ".join(f"{key}: {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
