"""The networks, each as small as its family allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BERT",
    "GPT",
    "LSTM",
    "MLP",
    "VAE",
    "VGG",
    "ConvNeXt",
    "LastByte",
    "MLPs",
    "Mixer",
    "ResNet",
    "TextClassifier",
    "UNet",
    "ViT",
    "add_lora",
]


class MLP(nn.Sequential):
    """An MLP with hidden layers of these widths; without any, a logistic regression."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        super().__init__(*layers, nn.Linear(inputs, outputs))


class MLPs(nn.Module):
    """Networks that share only kernel launches, one for each seed."""

    def __init__(self, seeds: Sequence[int], inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.members = nn.ModuleList()
        for seed in seeds:
            torch.manual_seed(seed)
            self.members.append(MLP(inputs, hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (members, rows, inputs) to (members, rows, outputs)."""
        for layers in zip(*self.members, strict=True):
            if isinstance(layers[0], nn.Linear):
                weights = torch.stack([layer.weight for layer in layers])
                biases = torch.stack([layer.bias for layer in layers])
                x = torch.baddbmm(biases[:, None], x, weights.mT)
            else:
                x = layers[0](x)
        return x


Norm = Callable[[int], nn.Module]


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.skip(x))


class VGG(nn.Module):
    """Plain stacked convolutions. Without batch norm, torch's initialisation starts them on a plateau."""

    def __init__(
        self, channels: int, pixels: int, classes: int, *, widths: Sequence[int], dropout: float, norm: bool = False
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            for inputs in (channels, width):
                layers.append(nn.Conv2d(inputs, width, 3, padding=1, bias=not norm))
                layers += [nn.BatchNorm2d(width), nn.ReLU()] if norm else [nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            channels, pixels = width, pixels // 2
        layers += [nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels * pixels**2, channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResNet(nn.Module):
    """A residual network for small pictures; ResNet-18 is `ResNet(3, 10, width=64, blocks=(2, 2, 2, 2))`.

    `shrink` pools the pictures first, for slow machines.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        width: int,
        blocks: Sequence[int],
        shrink: int = 1,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.AvgPool2d(shrink)] if shrink > 1 else []
        layers += [nn.Conv2d(channels, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
        size = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                outputs = width * 2**stage
                layers.append(_Residual(size, outputs, 2 if stage and not block else 1, norm))
                size = outputs
        self.body, self.head = nn.Sequential(*layers), nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A language model of bytes. Most of a larger vocabulary stays unused."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        length: int,
        heads: int | None = None,
        vocabulary: int = 256,
        tied: bool = False,
    ) -> None:
        super().__init__()
        heads = heads or max(1, width // 32)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def ends(self) -> list[nn.Parameter]:
        """The embeddings and the output layer, for which Muon is not meant."""
        return [self.tokens.weight, self.places.weight, self.head.weight]


class LastByte(GPT):
    """Predicts the byte that follows a text."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1]


class ViT(nn.Module):
    """A small vision transformer with layer norm, learned positions and mean pooling over the patches."""

    def __init__(self, channels: int, pixels: int, classes: int, *, width: int, layers: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((pixels // patch) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width, max(1, width // 64), causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.space, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.GroupNorm(1, width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(self.space(x)))))


class ConvNeXt(nn.Sequential):
    """Three stages of large depthwise convolutions, whose branches start almost closed."""

    def __init__(self, channels: int, classes: int, *, width: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 2, 2)]
        for stage in range(3):
            if stage:
                layers += [nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2)]
                width *= 2
            layers += [_ConvNeXtBlock(width) for _ in range(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, classes))


class _MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer of four blocks."""

    def __init__(self, channels: int, pixels: int, classes: int, *, width: int, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.blocks = nn.Sequential(*(_MixerBlock((pixels // patch) ** 2, width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT)).mean(1))


class VAE(nn.Module):
    """A variational autoencoder of rows, with a code of 16 numbers."""

    def __init__(self, inputs: int, *, width: int, code: int = 16) -> None:
        super().__init__()
        self.encoder = MLP(inputs, (width, width), 2 * code)
        self.decoder = MLP(code, (width, width), inputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The row seen again from its code, and the code's mean and logarithmic variance."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


class LSTM(nn.Module):
    """A recurrent language model of bytes."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.body = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x))[0])


class TextClassifier(nn.Module):
    """A post-norm transformer on bytes, with dropout and mean pooling."""

    def __init__(self, classes: int, *, length: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x) + self.places.weight).mean(1))


class BERT(nn.Module):
    """An encoder of bytes with layer norm after each branch; its head answers for each byte, or for all (`pooled`)."""

    def __init__(
        self, outputs: int, *, length: int, width: int, layers: int, dropout: float, pooled: bool = False
    ) -> None:
        super().__init__()
        self.pooled = pooled
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        heads = max(1, width // 64)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.dropout(self.norm(self.tokens(x) + self.places.weight)))
        return self.head(h.mean(1) if self.pooled else h)


# ------------------------------------------------------------------------------------------------ diffusion


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (inputs, outputs):
        layers += [nn.Conv2d(size, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Predicts the noise in a picture from its level; height and width must be divisible by four."""

    def __init__(self, channels: int, *, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.down1, self.down2 = _convolutions(channels, width), _convolutions(width, 2 * width)
        self.middle = _convolutions(2 * width, 4 * width)
        self.up2, self.up1 = _convolutions(6 * width, 2 * width), _convolutions(3 * width, width)
        self.out = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.linspace(0, 6, 32, device=x.device))
        when = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        fine = self.down1(x)
        coarse = self.down2(F.avg_pool2d(fine, 2))
        middle = self.middle(F.avg_pool2d(coarse, 2)) + when[:, :, None, None]
        h = self.up2(torch.cat([F.interpolate(middle, scale_factor=2.0), coarse], 1))
        return self.out(self.up1(torch.cat([F.interpolate(h, scale_factor=2.0), fine], 1)))


# ------------------------------------------------------------------------------------------------ LoRA


class _LoRA(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * (x @ self.a.T @ self.b.T)


def add_lora(model: nn.Module, rank: int = 8) -> None:
    """Freezes all weights and adds low-rank updates to every linear layer (alpha is twice the rank)."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, _LoRA(child, rank))
