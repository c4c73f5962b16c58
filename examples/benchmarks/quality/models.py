"""The networks that are trained, each as small as its family allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "MLP", "LinearModels", "ResNet"]


class LinearModels(nn.Module):
    """Logistic regressions that share nothing but the launches: one for each seed and learning rate."""

    def __init__(self, members: int, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(members))

    def forward(self, x: Tensor) -> Tensor:
        """(members, rows, inputs) to (members, rows, outputs)."""
        weights = torch.stack([model.weight for model in self.models])
        biases = torch.stack([model.bias for model in self.models])
        return torch.baddbmm(biases[:, None], x, weights.mT)


class MLP(nn.Sequential):
    """One hidden layer."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.skip(x))


class ResNet(nn.Module):
    """A residual network for small pictures; ResNet-18 is `ResNet(3, 10, width=64, blocks=(2, 2, 2, 2))`.

    `shrink` pools the pictures first, for slow machines.
    """

    def __init__(self, channels: int, classes: int, *, width: int, blocks: Sequence[int], shrink: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.AvgPool2d(shrink)] if shrink > 1 else []
        layers += [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        size = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                outputs = width * 2**stage
                layers.append(_Residual(size, outputs, stride=2 if stage and not block else 1))
                size = outputs
        self.body, self.head = nn.Sequential(*layers), nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class _Block(nn.Module):
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
    """A language model of bytes."""

    def __init__(self, *, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, max(1, width // 32)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))
